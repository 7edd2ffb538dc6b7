# SPDX-License-Identifier: Apache-2.0
"""``onea report`` and ``onea compare``: tables, curves and paired differences from records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[str, typer.Argument(help="Folder of runs, searched recursively, or a glob pattern in quotes.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the report.", show_default="the folder of runs")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the report.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="CSV file with results of others: method, dataset, stream, seed, A_T and, if known, A_mean in "
            "percent. Dataset and stream are those in the title of a table."
        ),
    ] = None,
) -> None:
    """Write a report on all runs in a folder.

    The report consists of an HTML page, Markdown, LaTeX and CSV tables, and a figure of the accuracy curves. Results of
    others are marked as reported, and are never the best of a column.
    """
    from onea.research.report.aggregate import best_first, settings
    from onea.research.report.experiment_page import with_titles, write_report
    from onea.research.report.foreign import not_shown, read_results
    from onea.research.report.records import load_records, split_by_classifier, with_default_options

    foreign = read_results(results) if results else []
    loaded = [part for record in load_records(folder) for part in split_by_classifier(record)]
    records = with_titles(with_default_options(loaded))
    target = out or (Path(folder) if Path(folder).is_dir() else Path("onea-report"))
    for path in write_report(records, target, title or f"Report of {Path(folder).resolve().name}", foreign):
        print(path)
    for sentence in not_shown(foreign, settings(best_first(records))):
        typer.echo(sentence, err=True)


def compare(
    first: Annotated[str, typer.Argument(help="Folder of a run or of several runs, or a glob pattern in quotes.")],
    second: Annotated[str, typer.Argument(help="The same for the second configuration.")],
) -> None:
    """Compare two configurations on the seeds that both have.

    Shows paired differences with 95 % confidence intervals by Student's t.
    """
    from rich.console import Console

    from onea.presentation.tables import Table, fit_terminal
    from onea.research.report.compare import compare as compare_records
    from onea.research.report.records import load_records, with_default_options

    comparison = compare_records(*(with_default_options(load_records(folder)) for folder in (first, second)))
    rows = []
    for metric in comparison.rows:
        interval = "one seed" if metric.interval is None else f"{metric.interval[0]:+.2f} to {metric.interval[1]:+.2f}"
        better = sum((change > 0) == metric.higher_is_better and change != 0 for change in metric.differences)
        numbers = (f"{metric.first:.2f}", f"{metric.second:.2f}", f"{metric.mean:+.2f}")
        rows.append((metric.name, *numbers, interval, f"{better} of {len(metric.differences)}"))
    console = Console(highlight=False)
    for label, name in zip(("first: ", "second:"), comparison.names, strict=True):
        console.print(f"{label} {name}", markup=False)
    seeds = ", ".join(map(str, comparison.seeds))
    console.print(f"difference: second minus first, {'seed' if len(comparison.seeds) == 1 else 'seeds'} {seeds}")
    table = Table.from_texts("", ("metric", "first", "second", "difference", "95 % interval", "better in"), rows)
    console.print(fit_terminal(table, console))
    if len(comparison.seeds) > 1:
        console.print(
            f"95 % confidence intervals by Student's t over {len(comparison.seeds)} paired seeds; a difference whose "
            "interval contains 0 is not significant."
        )
    for note in comparison.notes:
        console.print(note, markup=False)
