# SPDX-License-Identifier: Apache-2.0
"""The HTML page of an experiment or a set of records, and the files that ``onea report`` writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from onea.errors import OneaError
from onea.files import write_text
from onea.presentation import style
from onea.presentation.tables import Table, csv_text, latex, markdown
from onea.research.record import Record
from onea.research.report import heat_maps
from onea.research.report.aggregate import Setting, best_first, curve, grid_metrics, grid_table, settings
from onea.research.report.curves import Point, banded_curves, cost_points, cost_scatter, same_sizes, stream_bars
from onea.research.report.foreign import ForeignResult, add_results
from onea.research.report.html import Block, Details, Picture, Section, Text, document, remarks, series
from onea.research.report.run_page import provenance
from onea.text import plural

MAX_MATRICES = 12  # of a setting, to limit the size of the page
LEGEND = Text(
    "Mean ± sample deviation over seeds. Marked blue: the best of a column; grey: the second best, both among complete "
    "cells and as printed. Hatched: not all seeds have been run."
)


def experiment_page(
    title: str,
    records: Sequence[Record],
    tables: Sequence[Table] = (),
    notes: Sequence[str] = (),
    pictures: Sequence[Picture] = (),
    leave_out: Collection[str] = (),
    closing: str = "",
    runs: int | None = None,
    foreign: Sequence[ForeignResult] = (),
) -> str:
    """The HTML of the page.

    Args:
        title: heading of the page.
        records: the runs; a record may have a ``title`` and the ``group`` of results that it belongs to, in addition
            to what a run writes.
        tables: tables of the experiment; by default one for each setting of the records.
        notes: notes at the top of the page.
        pictures: pictures of the experiment; they come before the standard ones.
        leave_out: standard pictures to omit (``curves``, ``updates``, ``bases``), because ``pictures`` has them.
        closing: the last line.
        runs: number of runs in the tables, if the records are only some of them.
        foreign: results that others report, for the tables of the settings.
    """
    if not records and not tables and not pictures:
        raise OneaError("The page has no records, tables or pictures; give at least one.")
    all_settings = settings(records)
    blocks = remarks(notes)
    over_seeds = any(value.wanted for table in tables for value in table.values.values())
    if all_settings or over_seeds:
        blocks.append(_lead(all_settings, runs))
    if tables:
        blocks.append(Section("Results", [*tables, LEGEND] if over_seeds else tables))
    blocks += [picture.section() for picture in pictures]
    for setting in all_settings:
        blocks += _setting(setting, all_settings, foreign, not tables, leave_out)
    if all_settings:
        blocks.append(provenance([record for setting in all_settings for record in setting.single_seed()]))
    if closing:
        blocks.append(Text(closing))
    return document(title, blocks)


def _lead(all_settings: Sequence[Setting], runs: int | None) -> Text:
    if not all_settings:
        return Text("Nothing has been run yet.", "lead")
    runs = runs or sum(len(group.records) for setting in all_settings for group in setting.groups)
    seeds = sorted({seed for setting in all_settings for seed in setting.seeds})
    with_seeds = f"{len(seeds)} seeds ({', '.join(map(str, seeds))})" if len(seeds) > 1 else f"seed {seeds[0]}"
    in_settings = plural(len(all_settings), "setting", "settings")
    return Text(f"{plural(runs, 'run', 'runs')} with {with_seeds} in {in_settings}.", "lead")


def _setting(
    setting: Setting,
    all_settings: Sequence[Setting],
    foreign: Sequence[ForeignResult],
    with_table: bool,
    leave_out: Collection[str],
) -> list[Section]:
    records = setting.single_seed()
    seeds = plural(len(setting.seeds), "seed", "seeds")
    table: list[Block] = (
        [_table(setting, all_settings, foreign, f"Results over {seeds}"), LEGEND]
        if with_table
        else [Details("Every metric of these runs", [_table(setting, all_settings, foreign, f"Over {seeds}")])]
    )
    pictures = [_curves(setting)] if "curves" not in leave_out else []
    pictures += [_stream(records[0]), _matrices(records)]
    if analysed := [record for record in records if heat_maps.has_analysis(record)]:
        gated = (record for record in analysed if _gates(record)[0] < _gates(record)[1])
        analysis = _analysis(next(gated, analysed[0]))
        pictures += [picture for name, picture in analysis.items() if name not in leave_out]
    if len(points := cost_points(setting)) > 1:
        pictures.append(_cost(points))
    return [Section(setting.name, table, apart=True), *(picture.section(3) for picture in pictures)]


def _table(
    setting: Setting, all_settings: Sequence[Setting], foreign: Sequence[ForeignResult], title: str | None = None
) -> Table:
    return add_results(grid_table(setting, title), list(grid_metrics(setting)), setting, foreign, all_settings)


def _curves(setting: Setting) -> Picture:
    curves = {group.name: curve(group) for group in setting.groups}
    lines = [f"{name}: {series([value.mean or 0.0 for value in values])}" for name, values in curves.items()]
    bars = "Grey bars: number of classes in each task"
    if not same_sizes(setting):
        bars += " (mean over seeds, whose task orders differ)"
    several = any(value.std is not None for values in curves.values() for value in values)
    legend = "Lines: mean over seeds; bands: one sample deviation to each side." if several else "One seed."
    return Picture(
        "Accuracy as classes arrive",
        partial(banded_curves, setting),
        "Line chart, accuracy in percent over all classes seen after each task. " + ". ".join(lines) + ".",
        f"{legend} {bars}.",
    )


def _stream(record: Record) -> Picture:
    sizes = record["stream"]["sizes"]
    return Picture(
        "The stream",
        partial(stream_bars, record),
        f"Bar chart, classes of each task in order of arrival: {', '.join(map(str, sizes))}.",
        f"{plural(sum(sizes), 'class', 'classes')} in {plural(len(sizes), 'task', 'tasks')}.",
    )


def _matrices(records: Sequence[Record]) -> Picture:
    shown = records[:MAX_MATRICES]
    final = [f"{r['title']}: {series([row[-1] for row in r['metrics']['matrix']])}" for r in shown]
    caption = (
        f"Seed {records[0]['config']['seed']}. A row is the accuracy on the test images of one task, among all "
        "classes seen by then."
    )
    if len(records) > len(shown):
        caption += f" The first {len(shown)} of {len(records)} configurations."
    return Picture(
        "Accuracy of each task",
        partial(heat_maps.matrix_panels, shown),
        "Heat maps, accuracy of each task after each task. After the last one, by task: " + ". ".join(final) + ".",
        caption,
    )


def _analysis(record: Record) -> dict[str, Picture]:
    name, _ = heat_maps.analysed_merge(record)
    merge = f"{record['title']}, seed {record['config']['seed']}, merge of {name}"
    low, high = _gates(record)
    return {
        "spectra": Picture(
            "Spectra and gates per layer",
            partial(heat_maps.spectra_and_gates, record),
            f"Line charts, normalised singular values and gates by layer; gates from {low:.2f} to {high:.2f}.",
            f"{merge}. The gate damps the base's strongest directions, on the left, and leaves the weaker ones free.",
        ),
        "updates": Picture(
            "Update strength per direction",
            partial(heat_maps.update_strength, record),
            "Line charts, norm of the update along each singular direction of the base.",
            f"{merge}. How far the merge moved the matrices along each singular direction of the base.",
        ),
        "bases": Picture(
            "Basis before and after",
            partial(heat_maps.basis_alignment, record),
            "Heat maps, overlap of the base's singular directions with those after the merge.",
            f"{merge}. A dark diagonal means that the directions did not change. Many directions are shown in blocks.",
        ),
    }


def _gates(record: Record) -> tuple[float, float]:
    """The lowest and the highest gate of the analysed merge."""
    _, analysis = heat_maps.analysed_merge(record)
    gates = [heat_maps.parse_numbers(layer["gate"]) for kind in analysis.values() for layer in kind["layers"]]
    return min(map(min, gates)), max(map(max, gates))


def _cost(points: Sequence[Point]) -> Picture:
    costs = ", ".join(f"{point.name} {point.cost:.2f}" for point in points)
    return Picture(
        "Accuracy and cost",
        partial(cost_scatter, points, "GFLOPs for one image after the last task"),
        f"Scatter chart, last accuracy against GFLOPs for one image after the last task: {costs}.",
        "Measured by counting the operations of one prediction after the last task.",
    )


def write_report(
    records: Sequence[Record], folder: Path, title: str, foreign: Sequence[ForeignResult] = ()
) -> list[Path]:
    """Write page, tables and curves, and return their paths; the tables include the results that others report."""
    records = best_first(records)
    all_settings = settings(records)
    tables = [_table(setting, all_settings, foreign) for setting in all_settings]
    lines = [csv_text(_with_setting_in_columns(table)).splitlines(keepends=True) for table in tables]
    texts = {
        "report.html": experiment_page(title, records, foreign=foreign),
        "table.md": "\n".join(map(markdown, tables)),
        "table.tex": "\n".join(map(latex, tables)),
        "table.csv": "".join([lines[0][0], *(line for table in lines for line in table[1:])]),
    }
    for name, text in texts.items():
        write_text(folder / name, text, "choose another --out")
    curves = ["curves.png"] if len(tables) == 1 else [f"curves-{n}.png" for n in range(1, len(tables) + 1)]
    figures = [
        style.save(banded_curves(setting), folder / name) for setting, name in zip(all_settings, curves, strict=True)
    ]
    return [*(folder / name for name in texts), *figures]


def _with_setting_in_columns(table: Table) -> Table:
    """The table with its setting in every column heading, because one CSV file holds several tables."""
    columns = tuple(dataclasses.replace(column, group=table.title) for column in table.columns)
    return dataclasses.replace(table, columns=columns)


def with_titles(records: Sequence[Record]) -> list[Record]:
    """Records with the titles of their methods, and of a classifier that is not the method's default."""
    from onea.research.methods import method_class

    def title(record: Record) -> str:
        method, classifier = record["config"]["method"], (record["config"].get("options") or {}).get("classifier")
        try:
            name = method_class(method).title
        except OneaError:  # the package of the method is not installed
            name = method
        return f"{name}, {classifier}" if classifier else name

    return [{"title": title(record)} | record for record in records]
