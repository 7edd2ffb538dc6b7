# SPDX-License-Identifier: Apache-2.0
"""Pictures of a setting: curves with their spread over seeds, and the stream."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from onea.record import Record
from onea.report import style
from onea.report.aggregate import Group, Setting, curve
from onea.report.curves import WIDTH, accuracy_curves, name_tasks, size_bars
from onea.report.tables import finished

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def banded_curves(setting: Setting, width: float = WIDTH) -> Figure:
    """A_t over the tasks, mean over seeds, in a band of one deviation to each side; bars: mean size of the tasks."""
    lines = [curve(group) for group in setting.groups]
    sizes = _mean_sizes(setting)
    means = [_mean_record(group, line.mean, sizes) for group, line in zip(setting.groups, lines, strict=True)]
    return accuracy_curves(means, width, [line.std for line in lines])


def same_sizes(setting: Setting) -> bool:
    """Whether the tasks come in the same order of sizes for every seed."""
    return len({tuple(r["stream"]["sizes"]) for group in setting.groups for r in group.records}) == 1


def stream_bars(record: Record, width: float = WIDTH) -> Figure:
    """How many classes each task of a run brings."""
    sizes = record["stream"]["sizes"]
    with style.themed():
        figure = style.blank(width, 2.6)
        axes = figure.subplots()
        size_bars(axes, sizes, width)
        name_tasks(axes, record, width - 1.0)
        axes.set_title(f"Classes per task, seed {record['config']['seed']}")
        axes.grid(axis="y")
    return figure


def _mean_sizes(setting: Setting) -> list[float]:
    streams = [record["stream"]["sizes"] for group in setting.groups for record in group.records]
    return [fmean(sizes) for sizes in zip(*streams, strict=True)]


def _mean_record(group: Group, mean: Sequence[float], sizes: Sequence[float]) -> Record:
    """What the curves need of a record, with means in place of one run's numbers."""
    first = group.records[0]
    done = all(map(finished, group.records)) or bool(group.done)
    return {
        "title": group.name,
        "config": first["config"],
        "metrics": {"A": list(mean)},
        "stream": {"sizes": list(sizes), "names": first["stream"].get("names") or []},
        "status": "finished" if done else "running",
    }
