# SPDX-License-Identifier: Apache-2.0
"""The pictures of an experiment, from its records and table; what has not been run is left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from onea.paper.names import DATASETS
from onea.paper.render import Records
from onea.paper.tables import LONG_TAIL_FACTOR, PAPER_STREAMS
from onea.record import Record
from onea.record_metrics import forgetting_curve
from onea.report.page import Picture
from onea.report.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from onea.paper.scale import Plan

Draw = Callable[..., "Figure"]


def pictures(plan: Plan, table: Table | None, records: Records) -> list[Picture]:
    """Every picture that can be drawn of what is finished."""
    experiment = plan.experiment
    if experiment.kind == "streams":
        drawn = _streams(experiment.alias, plan.changes.tasks)
        return [Picture(title, draw, f"{title}.", name=name) for name, (title, draw) in drawn.items()]
    panels = _panels(plan, records)
    if not panels or table is None or experiment.kind in ("table", "settings"):
        return []
    if experiment.kind in ("bars", "scatter", "forgetting"):
        shown = [(experiment.title, _whole(experiment.kind, table, panels))]
    elif experiment.kind == "heatmap":
        shown = [_heat_map(plan, group, records) for group in panels]
    else:
        shown = [_panel(experiment.kind, group, list(lines.values())) for group, lines in panels.items()]
    names = [experiment.alias] if len(shown) == 1 else [f"{experiment.alias}-{n}" for n in range(1, len(shown) + 1)]
    return [
        Picture(title, draw, f"{title}; its numbers are in the table above.", name=name)
        for name, (title, draw) in zip(names, shown, strict=True)
    ]


def _panels(plan: Plan, records: Records) -> dict[str, dict[str, Record]]:
    """By group and row, the finished record of the first seed; One-A first, which curves emphasise."""
    found: dict[str, dict[str, Record]] = {}
    places = sorted(plan.places, key=lambda place: place.cell.row != "One-A")
    for place in places:
        record = records.get(place.runs[0].key())
        if record is not None and record.get("status") == "finished":
            group, _ = place.cell.headings()[0]
            found.setdefault(group, {})[place.cell.row] = record | {"title": place.cell.row}
    order = dict.fromkeys(group for place in plan.places for group, _ in place.cell.headings())
    return {group: found[group] for group in order if group in found}


def _whole(kind: str, table: Table, panels: dict[str, dict[str, Record]]) -> Draw:
    from onea.paper.drawings import accuracy_against_time, bars, forgetting_curves

    if kind == "bars":
        return partial(bars, table)
    if kind == "scatter":
        return partial(accuracy_against_time, table)
    curves = {
        group: {row: (forgetting_curve(record), float(record["metrics"]["mean_A"])) for row, record in lines.items()}
        for group, lines in panels.items()
    }
    return partial(forgetting_curves, curves)


def _panel(kind: str, group: str, records: list[Record]) -> tuple[str, Draw]:
    from onea.report.analysis_figures import basis_alignment, update_strength
    from onea.report.curves import accuracy_curves

    if kind == "directions":
        return f"{group}: update of each singular direction in the last merge", partial(update_strength, records[0])
    if kind == "alignment":
        return f"{group}: bases before and after the last merge", partial(basis_alignment, records[0])
    return f"{group}: accuracy after every task", partial(accuracy_curves, records)


def _heat_map(plan: Plan, group: str, records: Records) -> tuple[str, Draw]:
    """All seeds of all cells of a group; the figure itself averages over seeds."""
    from onea.report.sensitivity_figures import gate_heat_map

    runs = [run for place in plan.places if place.cell.headings()[0][0] == group for run in place.runs]
    found = [records[run.key()] for run in runs if run.key() in records]
    return f"{group}: A_T over the gate's parameters", partial(gate_heat_map, found)


def _streams(alias: str, tasks: int | None) -> dict[str, tuple[str, Draw]]:
    """Title and drawing by the name of the picture's file."""
    from onea.report.stream_figures import comparison_figure, descending_figure, generation_figure
    from onea.streams import make_stream

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
