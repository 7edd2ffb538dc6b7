# SPDX-License-Identifier: Apache-2.0
"""The pictures of an experiment, from its records and table; what has not been run is left out."""

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

    from onea.presentation.tables import Table
    from onea.research.paper.page import Records
    from onea.research.paper.scale import ExperimentPlan


Draw = Callable[..., "Figure"]


def pictures(plan: ExperimentPlan, table: Table | None, records: Records) -> list[Picture]:
    """Every picture that can be drawn of what is finished."""
    experiment = plan.experiment
    if experiment.kind == "streams":
        drawn = _streams(experiment.alias, plan.changes.tasks)
        return [Picture(title, draw, f"{title}.", name=name) for name, (title, draw) in drawn.items()]
    groups = _groups(plan, records)
    if not groups or table is None or experiment.kind in ("table", "settings"):
        return []
    if experiment.kind in ("bars", "scatter", "forgetting"):
        shown = [(experiment.title, _whole(experiment.kind, table, groups))]
    elif experiment.kind == "heatmap":
        shown = [_heat_map(plan, group, records) for group in groups]
    else:
        shown = [_panel(experiment.kind, group, list(lines.values())) for group, lines in groups.items()]
    names = [experiment.alias] if len(shown) == 1 else [f"{experiment.alias}-{n}" for n in range(1, len(shown) + 1)]
    return [
        Picture(title, draw, f"{title}; its numbers are in the table above.", name=name)
        for name, (title, draw) in zip(names, shown, strict=True)
    ]


def _groups(plan: ExperimentPlan, records: Records) -> dict[str, dict[str, Record]]:
    """By group and row, the finished record of the first seed; One-A first, which curves emphasise."""
    found: dict[str, dict[str, Record]] = {}
    planned_cells = sorted(plan.planned_cells, key=lambda planned: planned.cell.row != "One-A")
    for planned in planned_cells:
        record = records.get(planned.runs[0].key())
        if record is not None and record.get("status") == "finished":
            group, _ = planned.cell.headings()[0]
            found.setdefault(group, {})[planned.cell.row] = record | {"title": planned.cell.row}
    order = dict.fromkeys(group for planned in plan.planned_cells for group, _ in planned.cell.headings())
    return {group: found[group] for group in order if group in found}


def _whole(kind: str, table: Table, groups: dict[str, dict[str, Record]]) -> Draw:
    if kind == "bars":
        return partial(bars, table)
    if kind == "scatter":
        return partial(cost_scatter, _points(table), "milliseconds per image after the last task")
    curves = {
        group: {row: (forgetting_curve(record), float(record["metrics"]["mean_A"])) for row, record in lines.items()}
        for group, lines in groups.items()
    }
    return partial(forgetting_curves, curves)


def _points(table: Table) -> list[Point]:
    """The rows that have been run."""
    place = {column.name: index for index, column in enumerate(table.columns)}
    points = []
    for row in table.rows:
        cost, accuracy = (table.values[row.name, place[name]] for name in ("ms per image", "A_T"))
        if cost.mean is not None and accuracy.mean is not None:
            points.append(Point(row.name, cost.mean, accuracy))
    return points


def _panel(kind: str, group: str, records: list[Record]) -> tuple[str, Draw]:
    from onea.research.report.heat_maps import basis_alignment, update_strength

    if kind == "directions":
        return f"{group}: update of each singular direction in the last merge", partial(update_strength, records[0])
    if kind == "alignment":
        return f"{group}: bases before and after the last merge", partial(basis_alignment, records[0])
    return f"{group}: accuracy after every task", partial(accuracy_curves, records)


def _heat_map(plan: ExperimentPlan, group: str, records: Records) -> tuple[str, Draw]:
    """All seeds of all cells of a group; the figure itself averages over seeds."""
    from onea.research.report.heat_maps import gate_heat_map

    runs = [run for planned in plan.planned_cells if planned.cell.headings()[0][0] == group for run in planned.runs]
    found = [records[run.key()] for run in runs if run.key() in records]
    return f"{group}: A_T over the gate's parameters", partial(gate_heat_map, found)


def _streams(alias: str, tasks: int | None) -> dict[str, tuple[str, Draw]]:
    """Title and drawing by the name of the picture's file."""
    from onea.research.report.stream_figures import comparison_figure, descending_figure, generation_figure
    from onea.research.streams import make_stream

    if alias == "descending-distribution":
        found: dict[str, tuple[str, Draw]] = {}
        for data, usual in PAPER_STREAMS:
            known = DATASETS[data]
            stream = make_stream(classes=known.classes, tasks=tasks or usual, order="descending")
            title = f"{known.title} (T={stream.tasks}): classes of each task"
            found[f"{alias}-{data}"] = title, partial(descending_figure, stream)
        return found
    stream = make_stream(classes=DATASETS["cifar100"].classes, tasks=tasks or 10)
    if alias == "generation":
        return {alias: ("How many classes each task gets, and when it arrives", partial(generation_figure, stream))}
    most = DATASETS["cifar100"].train // DATASETS["cifar100"].classes
    return {
        alias: ("Classes per task and images per class", partial(comparison_figure, stream, most, LONG_TAIL_FACTOR))
    }


def bars(table: Table, width: float = WIDTH) -> Figure:
    """A panel for each column name: a bar for each row and, side by side, each group; a missing bar is not run."""
    names = list(dict.fromkeys(column.name for column in table.columns))
    groups = list(dict.fromkeys(column.group for column in table.columns))
    with style.theme():
        height = 1.2 + 0.32 * len(table.rows) * (0.4 + 0.6 * len(groups))
        figure, every = panels(len(names), 1 if width < NARROW else min(2, len(names)), width, height)
        for axes, name in zip(every, names, strict=True):
            _bar_panel(axes, table, name, groups)
            axes.set_title(name.replace("A_T", "$A_T$"))
        if len(groups) > 1:
            handles, texts = every[0].get_legend_handles_labels()
            figure.legend(handles, texts, loc="outside lower left", ncols=1 if width < NARROW else len(groups))
    return figure


def _bar_panel(axes: Any, table: Table, name: str, groups: Sequence[str]) -> None:
    rows = [row.name for row in reversed(table.rows)]  # horizontal bars are drawn from below
    height = 0.8 / len(groups)
    for order, group in enumerate(groups):
        index = next((i for i, c in enumerate(table.columns) if (c.group, c.name) == (group, name)), None)
        if index is None:
            continue
        values = [table.values[row, index] for row in rows]
        offsets = [y + (len(groups) - 1 - 2 * order) * height / 2 for y in range(len(rows))]
        shown = [(y, value) for y, value in zip(offsets, values, strict=True) if value.mean is not None]
        drawn = axes.barh(
            [y for y, _ in shown],
            [value.mean for _, value in shown],
            0.92 * height,
            xerr=[value.std or 0.0 for _, value in shown] if any(value.std for _, value in shown) else None,
            color=style.PALETTE[order % len(style.PALETTE)],
            label=group,
        )
        digits = table.columns[index].digits
        axes.bar_label(drawn, labels=[f"{value.mean:.{digits}f}" for _, value in shown], padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), rows, parse_math=False)
    axes.margins(x=0.18)
    axes.tick_params(axis="y", length=0)
