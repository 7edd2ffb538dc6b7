# SPDX-License-Identifier: Apache-2.0
"""An experiment's files: its table as Markdown, LaTeX and CSV, gaps marked, its pictures, and one HTML page of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onea.files import write_text
from onea.presentation.tables import Table, TableColumn, Value
from onea.research.data import data_name
from onea.research.paper.experiment import (
    BACKBONE,
    BACKBONE_TITLE,
    DATASETS,
    METHODS,
    Cell,
    Experiment,
    number,
    reported_tables,
)
from onea.research.paper.pictures import pictures
from onea.research.record import Record
from onea.research.record_metrics import Metric, metric
from onea.research.report.aggregate import summarise

if TYPE_CHECKING:
    from onea.research.paper.scale import ExperimentPlan, PlannedCell
    from onea.research.report.html import Picture
    from onea.research.runs.config import RunConfig

Records = Mapping[str, Record]  # by ``RunConfig.key()``
_OURS = METHODS["One-A"]
_SETTINGS = ("learning_rate", "weight_decay", "batch_size", "epochs", "rank")
# What a kind of figure shows itself, so that the page need not show it again.
_DRAWN_ALREADY = {"curves": ("curves",), "directions": ("updates",), "alignment": ("bases",)}


def write_experiment(plan: ExperimentPlan, records: Records, folder: Path) -> tuple[Table | None, list[Path]]:
    """Write everything that is finished so far; returns the table, where there is one, and the files."""
    from onea.presentation import style, tables

    name = plan.experiment.name
    table = None if plan.experiment.kind == "streams" else grid_table(plan, records)
    drawn = pictures(plan, table, records)
    written = []
    if table:
        written = [_write(folder / f"{name}.{end}", write(table)) for end, write in tables.FORMATS.items()]
    written += [style.save(picture.draw(), folder / f"{picture.name}.png") for picture in drawn]
    written.append(_write(folder / f"{name}.html", page(plan, table, drawn, records)))
    return table, written


def page(plan: ExperimentPlan, table: Table | None, drawn: list[Picture], records: Records) -> str:
    """One self-contained page; its first line is how the runs differ from the paper's."""
    from onea.research.report.experiment_page import experiment_page

    experiment = plan.experiment
    return experiment_page(
        experiment.heading,
        detailed(plan, records),
        [replace(table, notes=())] if table else [],
        table.notes if table else (),
        drawn,
        leave_out=_DRAWN_ALREADY.get(experiment.kind, ()) if drawn else (),
        closing=_origin(plan),
        runs=len(records),
    )


def detailed(plan: ExperimentPlan, records: Records) -> list[Record]:
    """The finished runs that the page shows in detail, under the names of their rows; the full One-A first.

    Of a heat map's many runs these are the best and the worst of each panel.
    """
    found: dict[str, list[Record]] = {}
    for planned in sorted(plan.planned_cells, key=lambda planned: not is_full_one_a(planned.runs[0])):
        group = planned.cell.headings()[0][0]
        for run in planned.runs:
            record = records.get(run.key(), {})
            if record.get("status") == "finished":
                found.setdefault(group, []).append(record | {"title": planned.cell.row, "group": group})
    if plan.experiment.kind == "heatmap":
        by_accuracy = (sorted(group, key=lambda record: -record["metrics"]["A_T"]) for group in found.values())
        return [record for group in by_accuracy for record in (group[0], *group[1:][-1:])]
    return [record for group in found.values() for record in group]


def is_full_one_a(run: RunConfig) -> bool:
    """Whether a run is the method as published, whatever the scale."""
    return run.method == _OURS and all(name.endswith("epochs") for name in run.options)


def _origin(plan: ExperimentPlan) -> str:
    which = plan.experiment.heading.split(":")[0]
    where = f"“One Adapter for All” (arXiv 2603.10237, {plan.experiment.label})"
    return f"{which} of {where}; made here by `onea paper {plan.experiment.alias}`."


def _write(path: Path, text: str) -> Path:
    write_text(path, text)
    return path


def grid_table(plan: ExperimentPlan, records: Records) -> Table:
    """The experiment as a table, as far as its runs are finished.

    Args:
        plan: the runs.
        records: of runs, by ``RunConfig.key()``; what is missing or unfinished is a gap.
    """
    experiment = plan.experiment
    if experiment.kind == "settings":
        return settings_table(experiment)
    finished = {key: record for key, record in records.items() if record.get("status") == "finished"}
    columns: dict[tuple[str, str], TableColumn] = {}
    values: dict[tuple[str, tuple[str, str]], Value] = {}
    for planned in plan.planned_cells:
        printed = _reported(experiment, planned.paper)
        for index, heading in enumerate(planned.cell.headings()):
            shown = metric(planned.cell.columns[index][1])
            columns.setdefault(heading, TableColumn(heading[1], heading[0], shown.higher_is_better, shown.digits))
            numbers = _numbers(planned, heading, shown, plan, finished)
            value = summarise(numbers, len(planned.runs))
            values[planned.cell.row, heading] = replace(value, reported=printed[index])
    order = list(columns)
    return Table.from_values(
        title=experiment.heading,
        rows=tuple(dict.fromkeys(planned.cell.row for planned in plan.planned_cells)),
        columns=tuple(columns.values()),
        values={(row, order.index(heading)): value for (row, heading), value in values.items()},
        notes=notes(plan),
    )


def notes(plan: ExperimentPlan) -> tuple[str, ...]:
    """Notes; first how the runs differ from the paper's."""
    changes, experiment = plan.changes, plan.experiment
    lines = []
    if different := _differences(plan):
        context = " Its numbers are shown as context only." if experiment.name in reported_tables() else ""
        lines.append(f"Not the paper's setting: {'; '.join(different)}.{context}")
    if changes.scale != 1:
        lines.append(f"Scale {changes.scale:g}: this factor is applied to images per class and epochs.")
    if changes.seeds is not None and changes.seeds < experiment.seeds:
        lines.append(f"Seeds: {changes.seeds} of the {experiment.seeds} that the experiment has.")
    return (*lines, *_renamed(plan), *experiment.notes)


def settings_table(experiment: Experiment) -> Table:
    """The hyper-parameters that the paper lists, with those of our preset where they differ."""
    from onea.research.methods.presets import preset_options

    table = reported_tables()[experiment.name]
    names = {known.title: data for data, known in DATASETS.items()}
    values = {}
    for row in table.rows:
        preset = preset_options(_OURS, f"paper/{names[row]}")
        for index, option in enumerate(_SETTINGS):
            printed = table.rows[row][index]
            ours = None if preset[option] == number(printed).value else float(preset[option])
            values[row, index] = Value(ours, reported=printed)
    digits = (2, 4, 0, 0, 0)
    columns = tuple(TableColumn(name, digits=count) for name, count in zip(table.columns, digits, strict=True))
    same = all(value.mean is None for value in values.values())
    note = (
        f"Our presets `paper/NAME`, taken by runs on the paper's backbone, {'have' if same else 'differ from'} these."
    )
    return Table.from_values(experiment.heading, tuple(table.rows), columns, values, (note,))


def _numbers(
    planned: PlannedCell, heading: tuple[str, str], metric: Metric, plan: ExperimentPlan, finished: Records
) -> list[float]:
    """One number for each seed that has been run."""
    found = []
    for run in planned.runs:
        value = _read(run, metric, finished)
        if value is not None and metric.relative:
            base = _read(_one_a(plan, heading, run.seed), metric, finished)
            value = value / base if base else None
        if value is not None:
            found.append(float(value))
    return found


def _read(run: RunConfig | None, metric: Metric, finished: Records) -> float | None:
    record = finished.get(run.key()) if run else None
    return metric.value(record) if record else None


def _one_a(plan: ExperimentPlan, heading: tuple[str, str], seed: int) -> RunConfig | None:
    """The run of One-A in the same column and of the same seed."""
    runs = (run for planned in plan.planned_cells if heading in planned.cell.headings() for run in planned.runs)
    return next((run for run in runs if run.method == _OURS and run.seed == seed), None)


def _reported(experiment: Experiment, paper: Cell) -> list[str | None]:
    """What the paper prints in a cell's columns; figures print nothing."""
    table = reported_tables().get(experiment.name)
    headings = (" / ".join(filter(None, heading)) for heading in paper.headings())
    return [table.cell(paper.row, heading) if table else None for heading in headings]


def _differences(plan: ExperimentPlan) -> list[str]:
    runs = plan.configs
    different = [f"backbone {name} instead of {BACKBONE_TITLE}" for name in _other(runs, "backbone", BACKBONE)]
    foreign = sorted({run.data for run in runs if data_name(run.data) not in plan.experiment.datasets})
    if foreign:
        datasets = ", ".join(DATASETS[name].title for name in plan.experiment.datasets)
        different.append(f"data {', '.join(foreign)} instead of {datasets}")
    if plan.changes.tasks is not None and any(
        planned.paper.options["tasks"] != planned.cell.options["tasks"] for planned in plan.planned_cells
    ):
        different.append(f"T = {plan.changes.tasks}")
    return different


def _other(runs: tuple[RunConfig, ...], name: str, usual: Any) -> list[str]:
    return sorted({str(getattr(run, name)) for run in runs if getattr(run, name) != usual})


def _renamed(plan: ExperimentPlan) -> list[str]:
    """Where a column's heading is no longer the paper's, which of its columns the reported numbers are of."""
    if plan.experiment.name not in reported_tables():
        return []
    pairs = {}
    for planned in plan.planned_cells:
        for ours, theirs in zip(planned.cell.headings(), planned.paper.headings(), strict=True):
            if ours != theirs:
                shown = slice(1) if ours[1] == theirs[1] else slice(2)  # the name too, unless it is only the metric's
                pairs[" ".join(ours[shown]).strip()] = " ".join(theirs[shown]).strip()
    return [f"Reported numbers beside {ours} are the paper's for {theirs}." for ours, theirs in pairs.items()]
