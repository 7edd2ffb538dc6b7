# SPDX-License-Identifier: Apache-2.0
"""The pictures of an experiment, from its finished runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from onea.presentation import style
from onea.presentation.tables import Table
from onea.research.paper.experiment import DATASETS
from onea.research.paper.experiments import LONG_TAIL_FACTOR, PAPER_STREAMS
from onea.research.record import Record
from onea.research.record_metrics import forgetting_curve
from onea.research.report.curves import (
    NARROW,
    WIDTH,
    Point,
    accuracy_curves,
    cost_scatter,
    forgetting_curves,
    panels,
)
from onea.research.report.html import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from onea.research.paper.page import Records
    from onea.research.paper.plan import ExperimentPlan


Draw = Callable[..., "Figure"]


def pictures(plan: ExperimentPlan, table: Table | None, records: Records) -> list[Picture]:
    """The pictures of an experiment; none without finished runs."""
    experiment = plan.experiment
    if experiment.kind == "streams":
        figures = _streams(experiment.alias, plan.changes.tasks)
        return [Picture(title, draw, f"{title}.", name=name) for name, (title, draw) in figures.items()]
    groups = _finished_by_group(plan, records)
    if not groups or table is None or experiment.kind in ("table", "settings"):
        return []
    if (draw := _of_all_groups(experiment.kind, table, groups)) is not None:
        panels = [(experiment.title, draw)]
    else:
        panels = [_of_group(plan, group, list(runs.values()), records) for group, runs in groups.items()]
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


def _of_all_groups(kind: str, table: Table, groups: dict[str, dict[str, Record]]) -> Draw | None:
    """The function that draws all groups in one picture, for kinds that have one."""
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


def _of_group(plan: ExperimentPlan, group: str, runs: list[Record], records: Records) -> tuple[str, Draw]:
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
        return {alias: ("How many classes each task gets, and when it arrives", partial(generation_figure, stream))}
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
