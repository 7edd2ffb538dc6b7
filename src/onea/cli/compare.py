# SPDX-License-Identifier: Apache-2.0
"""``onea compare``: is the second one better?"""

from __future__ import annotations

from typing import Annotated

import typer


def compare(
    first: Annotated[str, typer.Argument(help="A run's folder, a folder of runs, or a pattern in quotes.")],
    second: Annotated[str, typer.Argument(help="The same, of the other side.")],
) -> None:
    """Compare two configurations: paired differences over their common seeds, with a 95 % bootstrap interval."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console

    from onea.report.compare import RESAMPLES
    from onea.report.compare import compare as compare_records
    from onea.report.find import find_records
    from onea.report.formats import terminal
    from onea.report.table import Table

    found = compare_records(find_records(first), find_records(second))
    seeds = f"{'seed' if len(found.seeds) == 1 else 'seeds'} {', '.join(map(str, found.seeds))}"
    lines = []
    for row in found.rows:
        interval = "one seed" if row.interval is None else f"{row.interval[0]:+.2f} to {row.interval[1]:+.2f}"
        better = sum((gap > 0) == row.higher_is_better and gap != 0 for gap in row.differences)
        numbers = (f"{row.first:.2f}", f"{row.second:.2f}", f"{row.mean:+.2f}")
        lines.append((row.name, *numbers, interval, f"{better} of {len(row.differences)}"))
    console = Console(highlight=False)
    for side, name in zip(("first: ", "second:"), found.names, strict=True):
        console.print(f"{side} {name}", markup=False)
    console.print(f"difference: second minus first, {seeds}")
    table = Table.of_texts("", ("metric", "first", "second", "difference", "95 % interval", "better in"), lines)
    console.print(terminal(table, no_wrap=True, box=SIMPLE_HEAD))
    if len(found.seeds) > 1:
        console.print(f"Interval of the mean difference: {RESAMPLES:,} resamples of the seeds.")
    for note in found.notes:
        console.print(note, markup=False)
