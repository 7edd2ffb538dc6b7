# SPDX-License-Identifier: Apache-2.0
"""The files of an experiment: its table as Markdown, LaTeX and CSV, its pictures, and an HTML page of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onea.files import write_text
from onea.presentation import style, tables
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
from onea.research.paper.experiments import LONG_TAIL_FACTOR, PAPER_STREAMS
from onea.research.record import Record
from onea.research.record_metrics import Metric, forgetting_curve, metric
from onea.research.report.aggregate import summarise
from onea.research.report.curves import (
    NARROW,
    WIDTH,
    Point,
    accuracy_curves,
    cost_scatter,
    forgetting_curves,
    panels,
)
from onea.research.report.experiment_page import experiment_page
from onea.research.report.html import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from onea.research.paper.plan import ExperimentPlan, PlannedCell
    from onea.research.runs.config import RunConfig

Draw = Callable[..., "Figure"]
Records = Mapping[str, Record]  # by ``RunConfig.key()``
_OURS = METHODS["One-A"]
_SETTINGS = ("learning_rate", "weight_decay", "batch_size", "epochs", "rank")
# Standard pictures of a page that a kind of figure makes redundant.
_REPLACED_PICTURES = {"curves": ("curves",), "directions": ("updates",), "alignment": ("bases",)}


def write_experiment(plan: ExperimentPlan, records: Records, folder: Path) -> tuple[Table | None, list[Path]]:
    """Write the results of all finished runs; returns the table, if there is one, and the files."""
    experiment = plan.experiment
    table = None if experiment.kind == "streams" else grid_table(plan, records)
    drawn = pictures(plan, table, records)
    texts = {ending: render(table) for ending, render in tables.FORMATS.items()} if table else {}
    images = [style.save(picture.draw(), folder / f"{picture.name}.png") for picture in drawn]
    texts["html"] = page(plan, table, drawn, records)
    files = [folder / f"{experiment.name}.{ending}" for ending in texts]
    for file, text in zip(files, texts.values(), strict=True):
        write_text(file, text)
    return table, [*files[:-1], *images, files[-1]]


def page(plan: ExperimentPlan, table: Table | None, drawn: list[Picture], records: Records) -> str:
    """The HTML page; its notes begin with the differences from the paper's setting."""
    experiment = plan.experiment
    number = experiment.heading.split(":")[0]
    return experiment_page(
        experiment.heading,
        detailed_records(plan, records),
        [replace(table, notes=())] if table else [],
        table.notes if table else (),
        drawn,
        leave_out=_REPLACED_PICTURES.get(experiment.kind, ()) if drawn else (),
        closing=f"{number} of “One Adapter for All” (arXiv 2603.10237, {experiment.label}); "
        f"reproduced by `onea paper {experiment.alias}`.",
        runs=len(records),
    )


def detailed_records(plan: ExperimentPlan, records: Records) -> list[Record]:
    """The finished runs that the page shows in detail, titled by their rows; the full One-A comes first.

    For a heat map, these are the best and the worst run of each panel.
    """
    groups: dict[str, list[Record]] = {}
    for planned in sorted(plan.planned_cells, key=lambda planned: not _is_full_one_a_run(planned.runs[0])):
        group = planned.cell.headings()[0][0]
        for run in planned.runs:
            record = records.get(run.key(), {})
            if record.get("status") == "finished":
                groups.setdefault(group, []).append(record | {"title": planned.cell.row, "group": group})
    if plan.experiment.kind == "heatmap":
        by_accuracy = (sorted(group, key=lambda record: -record["metrics"]["A_T"]) for group in groups.values())
        return [record for group in by_accuracy for record in (group[0], *group[1:][-1:])]
    return [record for group in groups.values() for record in group]


def _is_full_one_a_run(run: RunConfig) -> bool:
    """Whether a run is One-A as published, at any scale."""
    return run.method == _OURS and all(name.endswith("epochs") for name in run.options)


def grid_table(plan: ExperimentPlan, records: Records) -> Table:
    """The table of an experiment; missing and unfinished runs are gaps.

    Args:
        plan: the runs.
        records: records of runs by ``RunConfig.key()``.
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
    places = {heading: index for index, heading in enumerate(columns)}
    return Table.from_values(
        title=experiment.heading,
        rows=tuple(dict.fromkeys(planned.cell.row for planned in plan.planned_cells)),
        columns=tuple(columns.values()),
        values={(row, places[heading]): value for (row, heading), value in values.items()},
        notes=notes(plan),
    )


def notes(plan: ExperimentPlan) -> tuple[str, ...]:
    """The notes of an experiment; first the differences from the paper's setting."""
    changes, experiment = plan.changes, plan.experiment
    lines = []
    if different := _differences(plan):
        context = " The reported numbers are for context only." if experiment.name in reported_tables() else ""
        lines.append(f"Not the paper's setting: {'; '.join(different)}.{context}")
    if changes.scale != 1:
        lines.append(f"Scale {changes.scale:g}: a factor on images per class and epochs.")
    if changes.seeds is not None and changes.seeds < experiment.seeds:
        lines.append(f"Seeds: {changes.seeds} of {experiment.seeds}.")
    return (*lines, *_renamed(plan), *experiment.notes)


def settings_table(experiment: Experiment) -> Table:
    """The hyper-parameters in the paper, and those of our presets where they differ."""
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
    note = f"Our presets `paper/NAME`, the default on the paper's backbone, {'equal' if same else 'differ from'} these."
    return Table.from_values(experiment.heading, tuple(table.rows), columns, values, (note,))


def _numbers(
    planned: PlannedCell, heading: tuple[str, str], metric: Metric, plan: ExperimentPlan, finished: Records
) -> list[float]:
    """The metric of each finished run; a relative metric is divided by One-A's for the same column and seed."""

    def read(run: RunConfig | None) -> float | None:
        record = finished.get(run.key()) if run else None
        return metric.value(record) if record else None

    numbers = []
    for run in planned.runs:
        value = read(run)
        if value is not None and metric.relative:
            base = read(_one_a_run(plan, heading, run.seed))
            value = value / base if base else None
        if value is not None:
            numbers.append(float(value))
    return numbers


def _one_a_run(plan: ExperimentPlan, heading: tuple[str, str], seed: int) -> RunConfig | None:
    """The run of One-A with this column and seed."""
    runs = (run for planned in plan.planned_cells if heading in planned.cell.headings() for run in planned.runs)
    return next((run for run in runs if run.method == _OURS and run.seed == seed), None)


def _reported(experiment: Experiment, paper: Cell) -> list[str | None]:
    """The paper's numbers in the columns of a cell; None for figures."""
    table = reported_tables().get(experiment.name)
    headings = (" / ".join(filter(None, heading)) for heading in paper.headings())
    return [table.cell(paper.row, heading) if table else None for heading in headings]


def _differences(plan: ExperimentPlan) -> list[str]:
    """The differences from the paper's backbone, data and number of tasks."""
    datasets = plan.experiment.datasets
    backbones = sorted({str(run.backbone) for run in plan.configs} - {BACKBONE})
    different = [f"backbone {name} instead of {BACKBONE_TITLE}" for name in backbones]
    if other_data := sorted({run.data for run in plan.configs if data_name(run.data) not in datasets}):
        titles = ", ".join(DATASETS[name].title for name in datasets)
        different.append(f"data {', '.join(other_data)} instead of {titles}")
    if any(planned.paper.options["tasks"] != planned.cell.options["tasks"] for planned in plan.planned_cells):
        different.append(f"T = {plan.changes.tasks}")
    return different


def _renamed(plan: ExperimentPlan) -> list[str]:
    """A note for each column whose heading differs from the paper's: which column its reported numbers come from."""
    if plan.experiment.name not in reported_tables():
        return []
    renamed = {}
    for planned in plan.planned_cells:
        for heading, paper in zip(planned.cell.headings(), planned.paper.headings(), strict=True):
            if heading != paper:
                shown = slice(1) if heading[1] == paper[1] else slice(2)  # group, and name if it differs
                renamed[" ".join(heading[shown]).strip()] = " ".join(paper[shown]).strip()
    return [f"The reported numbers beside {name} are the paper's for {paper}." for name, paper in renamed.items()]


# pictures


def pictures(plan: ExperimentPlan, table: Table | None, records: Records) -> list[Picture]:
    """The pictures of an experiment; none without finished runs."""
    experiment = plan.experiment
    if experiment.kind == "streams":
        figures = _streams(experiment.alias, plan.changes.tasks)
        return [Picture(title, draw, f"{title}.", name=name) for name, (title, draw) in figures.items()]
    groups = _finished_by_group(plan, records)
    if not groups or table is None or experiment.kind in ("table", "settings"):
        return []
    if (draw := _combined_figure(experiment.kind, table, groups)) is not None:
        panels = [(experiment.title, draw)]
    else:
        panels = [_group_figure(plan, group, list(runs.values()), records) for group, runs in groups.items()]
    names = [experiment.alias] if len(panels) == 1 else [f"{experiment.alias}-{n}" for n in range(1, len(panels) + 1)]
    return [
        Picture(title, draw, f"{title}; its numbers are in the table above.", name=name)
        for name, (title, draw) in zip(names, panels, strict=True)
    ]


def _finished_by_group(plan: ExperimentPlan, records: Records) -> dict[str, dict[str, Record]]:
    """The finished records of the first seed by group and row; One-A first, because curves emphasise it."""
    groups: dict[str, dict[str, Record]] = {
        group: {} for planned in plan.planned_cells for group, _ in planned.cell.headings()
    }
    for planned in sorted(plan.planned_cells, key=lambda planned: planned.cell.row != "One-A"):
        record = records.get(planned.runs[0].key())
        if record is not None and record.get("status") == "finished":
            group, _ = planned.cell.headings()[0]
            groups[group][planned.cell.row] = record | {"title": planned.cell.row}
    return {group: runs for group, runs in groups.items() if runs}


def _combined_figure(kind: str, table: Table, groups: dict[str, dict[str, Record]]) -> Draw | None:
    """The function that draws all groups in one picture; None for kinds with a picture per group."""
    if kind == "bars":
        return partial(bars, table)
    if kind == "scatter":
        return partial(cost_scatter, _points(table), "milliseconds per image after the last task")
    if kind != "forgetting":
        return None
    curves = {
        group: {row: (forgetting_curve(record), float(record["metrics"]["mean_A"])) for row, record in runs.items()}
        for group, runs in groups.items()
    }
    return partial(forgetting_curves, curves)


def _points(table: Table) -> list[Point]:
    """The rows with a time and an accuracy."""
    columns = {column.name: index for index, column in enumerate(table.columns)}
    points = []
    for row in table.rows:
        cost, accuracy = (table.values[row.name, columns[name]] for name in ("ms per image", "A_T"))
        if cost.mean is not None and accuracy.mean is not None:
            points.append(Point(row.name, cost.mean, accuracy))
    return points


def _group_figure(plan: ExperimentPlan, group: str, runs: list[Record], records: Records) -> tuple[str, Draw]:
    """Title and drawing function of one group."""
    from onea.research.report.heat_maps import basis_alignment, gate_heat_map, update_strength

    match plan.experiment.kind:
        case "directions":
            return f"{group}: update of each singular direction in the last merge", partial(update_strength, runs[0])
        case "alignment":
            return f"{group}: bases before and after the last merge", partial(basis_alignment, runs[0])
        case "heatmap":  # all seeds; the figure shows their means
            in_group = (planned for planned in plan.planned_cells if planned.cell.headings()[0][0] == group)
            all_seeds = [records[run.key()] for planned in in_group for run in planned.runs if run.key() in records]
            return f"{group}: A_T over the gate's parameters", partial(gate_heat_map, all_seeds)
    return f"{group}: accuracy after every task", partial(accuracy_curves, runs)


def _streams(alias: str, tasks: int | None) -> dict[str, tuple[str, Draw]]:
    """Title and drawing function of each figure of streams, by the name of its file."""
    from onea.research.report.stream_figures import comparison_figure, descending_figure, generation_figure
    from onea.research.streams import make_stream

    if alias == "descending-distribution":
        figures: dict[str, tuple[str, Draw]] = {}
        for data, paper_tasks in PAPER_STREAMS:
            known = DATASETS[data]
            stream = make_stream(classes=known.classes, tasks=tasks or paper_tasks, order="descending")
            title = f"{known.title} (T={stream.tasks}): classes of each task"
            figures[f"{alias}-{data}"] = title, partial(descending_figure, stream)
        return figures
    cifar = DATASETS["cifar100"]
    stream = make_stream(classes=cifar.classes, tasks=tasks or 10)
    if alias == "generation":
        return {alias: ("Number of classes in each task, by size and by arrival", partial(generation_figure, stream))}
    draw = partial(comparison_figure, stream, cifar.train // cifar.classes, LONG_TAIL_FACTOR)
    return {alias: ("Classes per task and images per class", draw)}


def bars(table: Table, width: float = WIDTH) -> Figure:
    """Horizontal bars, one panel per column name and one colour per group; missing runs have no bar."""
    names = list(dict.fromkeys(column.name for column in table.columns))
    groups = list(dict.fromkeys(column.group for column in table.columns))
    with style.theme():
        height = 1.2 + 0.32 * len(table.rows) * (0.4 + 0.6 * len(groups))
        figure, grid = panels(len(names), 1 if width < NARROW else min(2, len(names)), width, height)
        for axes, name in zip(grid, names, strict=True):
            _bar_panel(axes, table, name, groups)
            axes.set_title(name.replace("A_T", "$A_T$"))
        if len(groups) > 1:
            handles, texts = grid[0].get_legend_handles_labels()
            figure.legend(handles, texts, loc="outside lower left", ncols=1 if width < NARROW else len(groups))
    return figure


def _bar_panel(axes: Any, table: Table, name: str, groups: Sequence[str]) -> None:
    rows = [row.name for row in reversed(table.rows)]  # horizontal bars are drawn upwards
    height = 0.8 / len(groups)
    for index, column in enumerate(table.columns):
        if column.name != name:
            continue
        order = groups.index(column.group)
        values = {y: table.values[row, index] for y, row in enumerate(rows)}
        shown = {y: value for y, value in values.items() if value.mean is not None}
        drawn = axes.barh(
            [y + (len(groups) - 1 - 2 * order) * height / 2 for y in shown],
            [value.mean for value in shown.values()],
            0.92 * height,
            xerr=[value.std or 0.0 for value in shown.values()] if any(v.std for v in shown.values()) else None,
            color=style.PALETTE[order % len(style.PALETTE)],
            label=column.group,
        )
        texts = [f"{value.mean:.{column.digits}f}" for value in shown.values()]
        axes.bar_label(drawn, labels=texts, padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), rows, parse_math=False)
    axes.margins(x=0.18)
    axes.tick_params(axis="y", length=0)
