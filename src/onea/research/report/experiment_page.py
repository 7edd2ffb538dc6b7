# SPDX-License-Identifier: Apache-2.0
"""One HTML page about an experiment or any set of records, and all files of a report about them."""

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
from onea.research.report.aggregate import Setting, best_first, curve, grid_table, settings
from onea.research.report.curves import Point, banded_curves, cost_points, cost_scatter, same_sizes, stream_bars
from onea.research.report.html import Block, Details, Page, Picture, Section, Text, document, remarks, series
from onea.research.report.run_page import provenance
from onea.text import plural

MOST_MATRICES = 12  # of a setting; beyond, a page would be too large


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
) -> str:
    """The page as text.

    Args:
        title: heading of the page.
        records: all runs it is about; on top of what a run writes, a record may carry a ``title`` and the ``group`` of
            results that it belongs to.
        tables: of the experiment; by default one for each setting that the records come from.
        notes: what a reader must know before any number, in the first lines.
        pictures: of the experiment itself; they come before those that every page has.
        leave_out: of ``curves``, ``updates`` and ``bases``, what the pictures show already.
        closing: the last line.
        runs: how many stand behind the tables, where the records are only some of them.
    """
    if not records and not tables and not pictures:
        raise OneaError("There is no record and no table to make a page of; give at least one.")
    found = settings(records)
    blocks: list[Block] = [*remarks(notes)]
    waiting = any(value.wanted for table in tables for value in table.values.values())
    if found or waiting:
        blocks.append(_lead(found, runs))
    if tables:
        blocks.append(Section("Results", [*tables, LEGEND] if waiting else tables))
    blocks += [picture.section() for picture in pictures]
    for setting in found:
        blocks += _setting(setting, not tables, leave_out)
    if found:
        blocks.append(provenance([record for setting in found for record in setting.fixed()]))
    if closing:
        blocks.append(Text(closing))
    return document(Page(title, blocks))


def _lead(found: Sequence[Setting], runs: int | None) -> Text:
    if not found:
        return Text("Nothing has been run yet.", "lead")
    runs = runs or sum(len(group.records) for setting in found for group in setting.groups)
    seeds = sorted({seed for setting in found for seed in setting.seeds})
    which = f"{len(seeds)} seeds ({', '.join(map(str, seeds))})" if len(seeds) > 1 else f"seed {seeds[0]}"
    return Text(f"{plural(runs, 'run', 'runs')} with {which} in {plural(len(found), 'setting', 'settings')}.", "lead")


def _setting(setting: Setting, with_table: bool, leave_out: Collection[str]) -> list[Section]:
    fixed = setting.fixed()
    seeds = plural(len(setting.seeds), "seed", "seeds")
    table: list[Block] = (
        [grid_table(setting, f"Results over {seeds}"), LEGEND]
        if with_table
        else [Details("Every metric of these runs", [grid_table(setting, f"Over {seeds}")])]
    )
    pictures = [_curves(setting)] if "curves" not in leave_out else []
    pictures += [_stream(fixed[0]), _matrices(fixed)]
    if analysed := [record for record in fixed if heat_maps.has_analysis(record)]:
        gated = (record for record in analysed if _gates(record)[0] < _gates(record)[1])
        shown = _analysis(next(gated, analysed[0]))
        pictures += [picture for name, picture in shown.items() if name not in leave_out]
    if len(points := cost_points(setting)) > 1:
        pictures.append(_cost(points))
    return [Section(setting.name, table, apart=True), *(picture.section(3) for picture in pictures)]


def _curves(setting: Setting) -> Picture:
    lines = [f"{group.name}: {series(curve(group).mean)}" for group in setting.groups]
    bars = "Grey bars: how many classes each task brings"
    if not same_sizes(setting):
        bars += ", mean over seeds, which bring them in different orders"
    several = any(curve(group).std for group in setting.groups)
    lines_are = "Lines: mean over seeds; bands: one sample deviation to each side." if several else "One seed."
    return Picture(
        "Accuracy as classes arrive",
        partial(banded_curves, setting),
        "Line chart, accuracy in percent over all classes seen after each task. " + ". ".join(lines) + ".",
        f"{lines_are} {bars}.",
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
    shown = records[:MOST_MATRICES]
    ends = [f"{r['title']}: {series([row[-1] for row in r['metrics']['matrix']])}" for r in shown]
    caption = (
        f"Seed {records[0]['config']['seed']}. A row is the accuracy on the test images of one task, among all "
        "classes seen by then."
    )
    if len(records) > len(shown):
        caption += f" The first {len(shown)} of {len(records)} configurations."
    return Picture(
        "Accuracy of each task",
        partial(heat_maps.matrix_panels, shown),
        "Heat maps, accuracy of each task after each task. After the last one, by task: " + ". ".join(ends) + ".",
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
            f"{merge}. The gate holds back the base's strongest directions, on the left, and lets the weaker follow.",
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
            f"{merge}. A dark diagonal: the directions stayed where they were. Many directions are shown in blocks.",
        ),
    }


def _gates(record: Record) -> tuple[float, float]:
    """The lowest and the highest gate of the merge that is shown."""
    _, analysis = heat_maps.analysed_merge(record)
    every = [heat_maps.numbers(layer["gate"]) for kind in analysis.values() for layer in kind["layers"]]
    return min(map(min, every)), max(map(max, every))


def _cost(points: Sequence[Point]) -> Picture:
    costs = ", ".join(f"{point.name} {point.cost:.2f}" for point in points)
    return Picture(
        "Accuracy and cost",
        partial(cost_scatter, points, "GFLOPs for one image after the last task"),
        f"Scatter chart, last accuracy against GFLOPs for one image after the last task: {costs}.",
        "Measured by counting the operations of one prediction after the last task.",
    )


def write_report(records: Sequence[Record], folder: Path, title: str) -> list[Path]:
    """Write page, tables and curves, and return their paths; records are grouped by data, stream and network."""
    records = best_first(records)
    found = settings(records)
    tables = [grid_table(setting) for setting in found]
    lines = [csv_text(_with_setting_in_columns(table)).splitlines(keepends=True) for table in tables]
    texts = {
        "report.html": experiment_page(title, records),
        "table.md": "\n".join(map(markdown, tables)),
        "table.tex": "\n".join(map(latex, tables)),
        "table.csv": "".join([lines[0][0], *(line for table in lines for line in table[1:])]),
    }
    for name, text in texts.items():
        write_text(folder / name, text, "choose another --out")
    return [*(folder / name for name in texts), *_save_curves(found, folder)]


def with_titles(records: Sequence[Record]) -> list[Record]:
    """Records with the titles of their methods, where these are installed."""
    from onea.research.methods import method_class

    titles: dict[str, str] = {}
    for name in {record["config"]["method"] for record in records}:
        try:
            titles[name] = method_class(name).title
        except OneaError:  # somebody else's method, whose package is not installed here
            titles[name] = name
    return [{"title": titles[record["config"]["method"]] + _classifier(record)} | record for record in records]


def _classifier(record: Record) -> str:
    """Its classifier, where it is not the one that the method comes with."""
    classifier = (record["config"].get("options") or {}).get("classifier")
    return f", {classifier}" if classifier else ""


def _with_setting_in_columns(table: Table) -> Table:
    """The table with its setting in every column, because one file holds several tables."""
    columns = tuple(dataclasses.replace(column, group=table.title) for column in table.columns)
    return dataclasses.replace(table, columns=columns)


def _save_curves(found: Sequence[Setting], folder: Path) -> list[Path]:
    names = ["curves.png"] if len(found) == 1 else [f"curves-{number}.png" for number in range(1, len(found) + 1)]
    return [style.save(banded_curves(setting), folder / name) for setting, name in zip(found, names, strict=True)]
