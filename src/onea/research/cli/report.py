# SPDX-License-Identifier: Apache-2.0
"""``onea report`` and ``onea compare``: what records tell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[str, typer.Argument(help="Folder with records at any depth, or a pattern in quotes.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write; by default the folder itself.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
) -> None:
    """Write report.html, table.md, table.tex, table.csv and a PNG of the curves about all records below a folder."""
    from onea.research.report.experiment_page import with_titles, write_report
    from onea.research.report.records import by_classifier, load_records, with_present_options

    found = [each for record in load_records(folder) for each in by_classifier(record)]
    records = with_titles(with_present_options(found))
    target = out or (Path(folder) if Path(folder).is_dir() else Path("onea-report"))
    for path in write_report(records, target, title or f"Report of {Path(folder).resolve().name}"):
        print(path)


def compare(
    first: Annotated[str, typer.Argument(help="A run's folder, a folder of runs, or a pattern in quotes.")],
    second: Annotated[str, typer.Argument(help="The same, of the other side.")],
) -> None:
    """Compare two configurations: paired differences over their common seeds, with 95 % intervals by Student's t."""
    from rich.console import Console

    from onea.presentation.tables import Table, fit_terminal
    from onea.research.report.compare import compare as compare_records
    from onea.research.report.records import load_records, with_present_options

    found = compare_records(*(with_present_options(load_records(place)) for place in (first, second)))
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
    console.print(fit_terminal(table, console))
    if len(found.seeds) > 1:
        console.print(
            f"Intervals by Student's t over {len(found.seeds)} paired seeds; one that contains 0 leaves open which "
            "side is better."
        )
    for note in found.notes:
        console.print(note, markup=False)
