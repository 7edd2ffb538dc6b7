# SPDX-License-Identifier: Apache-2.0
"""Figures of runs: accuracy and forgetting over the tasks, accuracy against cost, the sizes of the tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any

from onea.errors import OneaError
from onea.presentation import style
from onea.presentation.tables import Value
from onea.research.record import Record
from onea.research.record_metrics import metric
from onea.research.report.aggregate import Setting, curve, over_seeds
from onea.research.report.records import finished, labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


WIDTH = 8.6  # inches, as all lengths here
NARROW = 5.5  # below this width, for phones, a legend replaces the names at the ends of the lines
MAX_END_NAMES = 10  # lines with names at their ends
MAX_END_NAME_LENGTH = 38  # characters
MARKERS = "os^DvPX"
FILLS = ("full", "none", "bottom")
LINES = ("-", "--", ":")
MAX_NAMED_TASKS = 20  # tasks with names; more have numbers
LETTER = 0.075  # width of a letter in a tick label
MAX_NAME_LENGTH = 14  # characters of a task's name


def accuracy_curves(
    records: Sequence[Record], width: float = WIDTH, bands: Sequence[Sequence[float] | None] | None = None
) -> Figure:
    """A_t after each task, one line per record, above the sizes of the tasks.

    Args:
        records: runs on the same stream; the first one is emphasised.
        width: inches; a narrow figure has a legend below.
        bands: half the height of the band around each line at each task; None for a line without a band.
    """
    sizes = _common_sizes(records)
    names = _line_names(records)
    with style.theme():
        has_legend = width < NARROW or len(records) > MAX_END_NAMES or max(map(len, names)) > MAX_END_NAME_LENGTH
        columns, legend_height = legend_columns(names, width)
        figure = style.new_figure(width, 4.9 + legend_height if has_legend else 4.9)
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4.2, 1))
        for index, record in reversed(list(enumerate(records))):  # the first one is drawn last, over the others
            _line(top, record["metrics"]["A"], index)
            if bands and (half := bands[index]):
                _band(top, record["metrics"]["A"], half, index)
        _accuracy_axis(top, records)
        if has_legend:
            lines = {line.get_gid(): line for line in top.lines}
            _legend(figure, columns, [lines[f"method-{index}"] for index in range(len(names))], names)
        else:
            _name_ends(top, records, names)
        size_bars(bottom, sizes, width)
        name_tasks(bottom, records[0], width - 1.0 if width < NARROW else width - 2.2)
    return figure


def panels(count: int, across: int, width: float, height: float, extra: float = 0.0) -> tuple[Figure, Any]:
    """A figure and its panels in rows of ``across``; ``height`` is per row, ``extra`` is added once."""
    rows = -(-count // across)
    figure = style.new_figure(width, height * rows + extra)
    grid = figure.subplots(rows, across, squeeze=False).flatten()
    for axes in grid[count:]:
        axes.set_axis_off()
    return figure, grid[:count]


def legend_columns(names: Sequence[str], width: float) -> tuple[int, float]:
    """Columns of a legend below a figure of this width, and the extra height for more than three rows."""
    columns = max(1, int(width / (0.45 + LETTER * max(map(len, names)))))
    return columns, 0.22 * max(0, -(-len(names) // columns) - 3)


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Move values by as little as possible until neighbours are a gap apart, in the same order.

    >>> spread([50.0, 80.0, 51.0], 4.0)
    [48.5, 80.0, 52.5]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    groups: list[list[float]] = []  # centre and size of each group of values that touch
    for i in order:
        groups.append([values[i], 1])
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < gap * (groups[-1][1] + groups[-2][1]) / 2:
            (low, below), (high, above) = groups[-2], groups.pop()
            groups[-1] = [(low * below + high * above) / (below + above), below + above]
    moved = [centre + gap * (i - (count - 1) / 2) for centre, count in groups for i in range(int(count))]
    return [value for _, value in sorted(zip(order, moved, strict=True))]


def task_names(record: Record) -> list[str]:
    """The names of the tasks, or their numbers if they have no names."""
    names = record["stream"].get("names") or []
    return [str(name) for name in names] or [str(t + 1) for t in range(len(record["stream"]["sizes"]))]


def _common_sizes(records: Sequence[Record]) -> list[float]:
    if not records:
        raise OneaError("There are no records to draw; give at least one.")
    streams = {tuple(record["stream"]["sizes"]) for record in records}
    if len(streams) > 1:
        raise OneaError("The records come from streams with different task sizes; draw one figure per stream.")
    return list(streams.pop())


def _line(axes: Any, accuracies: Sequence[float], index: int) -> None:
    first = index == 0
    axes.plot(
        range(1, len(accuracies) + 1),
        accuracies,
        color=_colour(index),
        marker=MARKERS[index % len(MARKERS)],
        markersize=(6.5 if first else 5.5) if len(accuracies) <= MAX_NAMED_TASKS else (4 if first else 3),
        markeredgecolor="white",
        markeredgewidth=0.8 if len(accuracies) <= MAX_NAMED_TASKS else 0,
        linewidth=2.6 if first else 1.5,
        linestyle=LINES[index // len(style.PALETTE) % len(LINES)],  # colours repeat
        clip_on=False,
        gid=f"method-{index}",
    )


def _band(axes: Any, accuracies: Sequence[float], half: Sequence[float], index: int) -> None:
    low, high = ([a + sign * h for a, h in zip(accuracies, half, strict=True)] for sign in (-1, 1))
    tasks = range(1, len(accuracies) + 1)
    axes.fill_between(tasks, low, high, color=_colour(index), alpha=0.16, linewidth=0, gid=f"band-{index}")


def _colour(index: int) -> str:
    return style.PALETTE[index % len(style.PALETTE)]


def _accuracy_axis(axes: Any, records: Sequence[Record]) -> None:
    accuracies = [value for record in records for value in record["metrics"]["A"]]
    lowest, highest = min(accuracies), max(accuracies)
    axes.set_ylim(max(0.0, 10 * ((lowest - 3) // 10)), min(100.0, 10 * ((highest + 12) // 10)))
    axes.grid(axis="y")
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("accuracy ($A_t$), %")
    axes.set_title("Accuracy over all classes seen so far")


def _legend(figure: Figure, columns: int, *handles_and_texts: Any) -> None:
    legend = figure.legend(*handles_and_texts, loc="outside lower left", ncols=columns)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _name_ends(axes: Any, records: Sequence[Record], names: Sequence[str]) -> None:
    """Names at the ends of the lines, moved apart if they would overlap."""
    low, high = axes.get_ylim()
    ends = [record["metrics"]["A"][-1] for record in records]
    heights = spread(ends, 0.062 * (high - low))
    right = len(records[0]["stream"]["sizes"])
    for index, (record, name, height) in enumerate(zip(records, names, heights, strict=True)):
        done = len(record["metrics"]["A"])
        if done < right:  # connects the early end of an unfinished run with its name
            axes.plot([done, right], [ends[index], height], color=_colour(index), linewidth=0.8, linestyle=":")
        axes.annotate(
            name,
            (right, height),
            (10, 0),
            textcoords="offset points",
            va="center",
            color=_colour(index),
            fontweight="bold" if index == 0 else "normal",
            annotation_clip=False,
            parse_math=False,
        )


def _line_names(records: Sequence[Record]) -> list[str]:
    """Each record's name and last accuracy."""
    names = []
    for name, record in zip(labels(records), records, strict=True):
        accuracies, tasks = record["metrics"]["A"], len(record["stream"]["sizes"])
        progress = "" if finished(record) else f" ({len(accuracies)} of {tasks} tasks)"
        names.append(f"{name}  {accuracies[-1]:.1f}{progress}")
    return names


def size_bars(axes: Any, sizes: Sequence[float], width: float) -> None:
    """A bar for each task, with its number of classes if there is room in a figure of this width."""
    from matplotlib.ticker import MaxNLocator

    bars = axes.bar(range(1, len(sizes) + 1), sizes, width=0.72, color=style.tint(style.INK, 0.45))
    room = width / len(sizes)
    counts = [f"+{round(n, 1):g}" for n in sizes]
    if room > LETTER * max(map(len, counts)):
        axes.bar_label(bars, labels=counts, padding=1.5, fontsize=8.5 if room > 0.3 else 6.5)
    axes.set_ylim(0, 1.35 * max(sizes))
    margin = 0.6 if len(sizes) > 3 else 1.6  # keeps one or two bars narrow
    axes.set_xlim(1 - margin, len(sizes) + margin)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))
    axes.set_ylabel("new\nclasses")
    axes.tick_params(axis="x", length=0)


def name_tasks(axes: Any, record: Record, width: float) -> None:
    """Tick labels: each task and the classes seen after it; only some of the numbers if names would overlap."""
    names = [short(name) for name in task_names(record)]
    seen = [round(n, 1) for n in accumulate(record["stream"]["sizes"])]
    tasks = range(1, len(names) + 1)
    if len(names) > MAX_NAMED_TASKS:
        shown = style.tick_positions(len(names), max(3, int(width / 0.75)))
        axes.set_xticks(shown, [f"{t}\n{seen[t - 1]:g}" for t in shown])
        axes.set_xlabel("task (above) and classes seen after it (below)")
    elif max(map(len, names)) * LETTER * len(names) <= width:
        axes.set_xticks(tasks, [f"{name}\n{n:g}" for name, n in zip(names, seen, strict=True)], parse_math=False)
        axes.set_xlabel("task (above) and classes seen after it (below)")
    else:
        axes.set_xticks(tasks, names, rotation=50, ha="right", rotation_mode="anchor", parse_math=False)
        axes.set_xlabel(f"tasks in order of arrival, {seen[-1]:g} classes in all")


def short(name: str) -> str:
    """A task's name, shortened for an axis."""
    return name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 1] + "…"


def banded_curves(setting: Setting, width: float = WIDTH) -> Figure:
    """A_t over the tasks, mean over seeds, with bands of one standard deviation; the bars are mean task sizes."""
    streams = [record["stream"]["sizes"] for group in setting.groups for record in group.records]
    sizes = [fmean(sizes) for sizes in zip(*streams, strict=True)]
    means: list[Record] = []
    bands = []
    for group in setting.groups:
        values, first = curve(group), group.records[0]
        deviations = [value.std for value in values if value.std is not None]
        bands.append(deviations or None)
        means.append(
            {  # the fields of a record that the curves need
                "title": group.name,
                "config": first["config"],
                "metrics": {"A": [value.mean for value in values]},
                "stream": {"sizes": sizes, "names": first["stream"].get("names") or []},
                "status": "finished" if group.done else "running",
            }
        )
    return accuracy_curves(means, width, bands)


def same_sizes(setting: Setting) -> bool:
    """Whether the sizes of the tasks are the same for all seeds."""
    return len({tuple(r["stream"]["sizes"]) for group in setting.groups for r in group.records}) == 1


def stream_bars(record: Record, width: float = WIDTH) -> Figure:
    """The number of classes in each task of a run."""
    sizes = record["stream"]["sizes"]
    with style.theme():
        figure = style.new_figure(width, 2.6)
        axes = figure.subplots()
        size_bars(axes, sizes, width)
        name_tasks(axes, record, width - 1.0)
        axes.set_title(f"Classes per task, seed {record['config']['seed']}")
        axes.grid(axis="y")
    return figure


def forgetting_curves(streams: Mapping[str, Mapping[str, tuple[list[float], float]]], width: float = WIDTH) -> Figure:
    """Mean forgetting after each task from the second on, one panel per stream.

    Args:
        streams: for each stream and line, the curve and the mean accuracy.
        width: inches.
    """
    if not streams:
        raise OneaError("No run of this figure is finished; run it first.")
    from matplotlib.ticker import MaxNLocator

    with style.theme():
        figure, grid = panels(len(streams), 1 if width < NARROW else min(2, len(streams)), width, 4.0)
        for axes, (name, lines) in zip(grid, streams.items(), strict=True):
            for index, (row, (curve, mean)) in enumerate(lines.items()):
                axes.plot(
                    range(2, len(curve) + 2),
                    curve,
                    color=_colour(index),
                    marker=MARKERS[index % len(MARKERS)],
                    markersize=5,
                    label=f"{row}: mean A {mean:.1f}",
                )
            axes.set(xlabel="task", ylabel="mean forgetting, points")
            axes.set_title(name, parse_math=False)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(axis="y")
            axes.legend()
    return figure


@dataclass(frozen=True)
class Point:
    """A point of a scatter chart: a method's cost, and its accuracy over seeds."""

    name: str
    cost: float
    accuracy: Value


def cost_scatter(points: Sequence[Point], cost: str, width: float = WIDTH) -> Figure:
    """A_T against a cost of inference after the last task, one point per method."""
    if not points:
        raise OneaError("No finished run has the cost that this figure shows; run it first.")
    costs = [point.cost for point in points]
    with style.theme():
        columns, legend_height = legend_columns([point.name for point in points], width)
        figure = style.new_figure(width, 4.2 + legend_height)
        axes = figure.subplots()
        for index, point in enumerate(points):
            axes.errorbar(
                point.cost,
                point.accuracy.mean or 0.0,
                yerr=point.accuracy.std,
                label=point.name,
                color=_colour(index),
                marker=MARKERS[index % len(MARKERS)],
                fillstyle=FILLS[index // len(style.PALETTE) % len(FILLS)],  # colours repeat
                capsize=3,
                linestyle="none",
                markersize=8,
                zorder=100 - index,
            )
        if max(costs) > 4 * min(costs):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("{x:g}")
            axes.margins(x=0.12)
        else:
            axes.set_xlim(0, 1.25 * max(costs))  # from zero, so that small differences are not exaggerated
        axes.margins(y=0.12)
        axes.set(xlabel=cost, ylabel="$A_T$ (%)")
        axes.grid()
        _legend(figure, columns)
    return figure


def cost_points(setting: Setting) -> list[Point]:
    """The configurations of a setting with GFLOPs of inference in their finished runs."""
    points = []
    for group in setting.groups:
        costs = [cost for record in group.done if (cost := metric("gflops").value(record)) is not None]
        if costs:
            points.append(Point(group.name, fmean(costs), over_seeds(group, metric("A_T"))))
    return points
