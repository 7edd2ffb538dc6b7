# SPDX-License-Identifier: Apache-2.0
"""Figures of runs: accuracy and forgetting as classes arrive, accuracy against cost, the sizes of tasks."""

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
from onea.research.report.aggregate import Group, Setting, curve, over_seeds
from onea.research.report.records import finished, labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


WIDTH = 8.6
NARROW = 5.5  # inches; below, the methods are named under the figure instead of beside their lines
MOST_BESIDE = 10  # methods; beyond, names beside the lines would not fit
LONGEST_BESIDE = 38  # letters; beyond, a name would take the lines' room
MARKERS = "os^DvPX"
FILLS = ("full", "none", "bottom")
LINES = ("-", "--", ":")
MOST_NAMES = 20  # tasks; beyond, numbers replace names
LETTER = 0.075  # inches that a letter of a tick label takes
LONGEST_NAME = 14


def accuracy_curves(
    records: Sequence[Record], width: float = WIDTH, bands: Sequence[Sequence[float] | None] | None = None
) -> Figure:
    """A_t after every task, one line a method, above the sizes of the tasks.

    Args:
        records: runs on the same stream; the first one is emphasised.
        width: inches; a narrow figure, for small screens, names the methods underneath.
        bands: half the height of the band around each line at each task; None for a line without a band.
    """
    sizes = _common_sizes(records)
    with style.theme():
        listed = width < NARROW or len(records) > MOST_BESIDE or max(map(len, _line_names(records))) > LONGEST_BESIDE
        columns, room = legend_columns(_line_names(records), width)
        figure = style.new_figure(width, 4.9 + room if listed else 4.9)
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4.2, 1))
        for index, record in reversed(list(enumerate(records))):  # the first one is drawn last, over the others
            _line(top, record["metrics"]["A"], index)
            if bands and (half := bands[index]):
                _band(top, record["metrics"]["A"], half, index)
        _accuracy_axis(top, records)
        if listed:
            _legend(figure, top, records, columns)
        else:
            _name_ends(top, records)
        size_bars(bottom, sizes, width)
        name_tasks(bottom, records[0], width - 1.0 if width < NARROW else width - 2.2)
    return figure


def panels(count: int, across: int, width: float, height: float, extra: float = 0.0) -> tuple[Figure, Any]:
    """A figure with so many panels, and the panels; ``height`` is that of a row, ``extra`` is for the whole figure."""
    down = -(-count // across)
    figure = style.new_figure(width, height * down + extra)
    every = figure.subplots(down, across, squeeze=False).flatten()
    for axes in every[count:]:
        axes.set_axis_off()
    return figure, every[:count]


def legend_columns(names: Sequence[str], width: float) -> tuple[int, float]:
    """Columns of a legend under a figure of this width, and the inches to add to it when the rows are many."""
    columns = max(1, int(width / (0.45 + LETTER * max(map(len, names)))))
    return columns, 0.22 * max(0, -(-len(names) // columns) - 3)


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Move values apart as little as possible until neighbours are a gap apart; their order stays.

    >>> spread([50.0, 80.0, 51.0], 4.0)
    [48.5, 80.0, 52.5]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    groups: list[list[float]] = []  # of values that touch: the centre of the group, and how many it holds
    for i in order:
        groups.append([values[i], 1])
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < gap * (groups[-1][1] + groups[-2][1]) / 2:
            (low, below), (high, above) = groups[-2], groups.pop()
            groups[-1] = [(low * below + high * above) / (below + above), below + above]
    placed = [centre + gap * (i - (count - 1) / 2) for centre, count in groups for i in range(int(count))]
    return [place for _, place in sorted(zip(order, placed, strict=True))]


def task_names(record: Record) -> list[str]:
    """The tasks' names, or their numbers where a stream names none."""
    names = record["stream"].get("names") or []
    return [str(name) for name in names] or [str(t + 1) for t in range(len(record["stream"]["sizes"]))]


def _common_sizes(records: Sequence[Record]) -> list[float]:
    if not records:
        raise OneaError("There is no record to draw; give at least one.")
    streams = {tuple(record["stream"]["sizes"]) for record in records}
    if len(streams) > 1:
        raise OneaError("The records come from streams of different task sizes; draw one figure per stream.")
    return list(streams.pop())


def _line(axes: Any, accuracies: Sequence[float], index: int) -> None:
    first = index == 0
    axes.plot(
        range(1, len(accuracies) + 1),
        accuracies,
        color=_colour(index),
        marker=MARKERS[index % len(MARKERS)],
        markersize=(6.5 if first else 5.5) if len(accuracies) <= MOST_NAMES else (4 if first else 3),
        markeredgecolor="white",
        markeredgewidth=0.8 if len(accuracies) <= MOST_NAMES else 0,
        linewidth=2.6 if first else 1.5,
        linestyle=LINES[index // len(style.PALETTE) % len(LINES)],  # colours start again
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
    every = [value for record in records for value in record["metrics"]["A"]]
    lowest, highest = min(every), max(every)
    axes.set_ylim(max(0.0, 10 * ((lowest - 3) // 10)), min(100.0, 10 * ((highest + 12) // 10)))
    axes.grid(axis="y")
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("accuracy ($A_t$), %")
    axes.set_title("Accuracy over all classes seen so far")


def _legend(figure: Figure, axes: Any, records: Sequence[Record], columns: int) -> None:
    by_id = {line.get_gid(): line for line in axes.lines}
    texts = _line_names(records)
    legend = figure.legend(
        [by_id[f"method-{index}"] for index in range(len(texts))], texts, loc="outside lower left", ncols=columns
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _name_ends(axes: Any, records: Sequence[Record]) -> None:
    """Names beside the ends of the lines, moved apart where they would touch."""
    low, high = axes.get_ylim()
    ends = [record["metrics"]["A"][-1] for record in records]
    places = spread(ends, 0.062 * (high - low))
    right = len(records[0]["stream"]["sizes"])
    for index, (record, text, place) in enumerate(zip(records, _line_names(records), places, strict=True)):
        done = len(record["metrics"]["A"])
        if done < right:  # a run that is still going on ends early; lead the eye from its end to its name
            axes.plot([done, right], [ends[index], place], color=_colour(index), linewidth=0.8, linestyle=":")
        axes.annotate(
            text,
            (right, place),
            (10, 0),
            textcoords="offset points",
            va="center",
            color=_colour(index),
            fontweight="bold" if index == 0 else "normal",
            annotation_clip=False,
            parse_math=False,
        )


def _line_names(records: Sequence[Record]) -> list[str]:
    return [f"{name}  {_last(record)}" for name, record in zip(labels(records), records, strict=True)]


def _last(record: Record) -> str:
    value = f"{record['metrics']['A'][-1]:.1f}"
    done = len(record["metrics"]["A"])
    return value if finished(record) else f"{value} ({done} of {len(record['stream']['sizes'])} tasks)"


def size_bars(axes: Any, sizes: Sequence[float], width: float) -> None:
    """A bar for each task, with its count where there is room in a figure of this width."""
    from matplotlib.ticker import MaxNLocator

    bars = axes.bar(range(1, len(sizes) + 1), sizes, width=0.72, color=style.tint(style.INK, 0.45))
    room = width / len(sizes)
    labels = [f"+{round(n, 1):g}" for n in sizes]
    if room > LETTER * max(map(len, labels)):  # every count fits over its bar
        axes.bar_label(bars, labels=labels, padding=1.5, fontsize=8.5 if room > 0.3 else 6.5)
    axes.set_ylim(0, 1.35 * max(sizes))
    margin = 0.6 if len(sizes) > 3 else 1.6  # one or two bars must not fill the whole panel
    axes.set_xlim(1 - margin, len(sizes) + margin)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))
    axes.set_ylabel("new\nclasses")
    axes.tick_params(axis="x", length=0)


def name_tasks(axes: Any, record: Record, width: float) -> None:
    """Under every bar its task and the classes seen after it; only some numbers where names would collide."""
    names = [short(name) for name in task_names(record)]
    seen = [round(n, 1) for n in accumulate(record["stream"]["sizes"])]
    tasks = range(1, len(names) + 1)
    if len(names) > MOST_NAMES:
        shown = style.round_numbers(len(names), max(3, int(width / 0.75)))
        axes.set_xticks(shown, [f"{t}\n{seen[t - 1]:g}" for t in shown])
        axes.set_xlabel("task (above) and classes seen after it (below)")
    elif max(map(len, names)) * LETTER * len(names) <= width:
        axes.set_xticks(tasks, [f"{name}\n{n:g}" for name, n in zip(names, seen, strict=True)], parse_math=False)
        axes.set_xlabel("task (above) and classes seen after it (below)")
    else:
        axes.set_xticks(tasks, names, rotation=50, ha="right", rotation_mode="anchor", parse_math=False)
        axes.set_xlabel(f"tasks in order of arrival, {seen[-1]:g} classes in all")


def short(name: str) -> str:
    """A name that fits under an axis."""
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


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
    with style.theme():
        figure = style.new_figure(width, 2.6)
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


def forgetting_curves(streams: Mapping[str, Mapping[str, tuple[list[float], float]]], width: float = WIDTH) -> Figure:
    """Mean forgetting after every task from the second on, a panel a stream, a line a row with its mean accuracy.

    Args:
        streams: by stream and row, the curve and the mean accuracy.
        width: inches.
    """
    drawn = {name: lines for name, lines in streams.items() if lines}
    if not drawn:
        raise OneaError("No run of this figure is finished; run it first.")
    from matplotlib.ticker import MaxNLocator

    with style.theme():
        figure, every = panels(len(drawn), 1 if width < NARROW else min(2, len(drawn)), width, 4.0)
        for axes, (name, lines) in zip(every, drawn.items(), strict=True):
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
    """A method in a scatter chart: its cost, and its accuracy over seeds."""

    name: str
    cost: float
    accuracy: Value


def cost_scatter(points: Sequence[Point], what: str, width: float = WIDTH) -> Figure:
    """A_T against a cost of a prediction after the last task, a point for each method."""
    if not points:
        raise OneaError("No finished run has what this figure shows; run it first.")
    costs = [point.cost for point in points]
    with style.theme():
        columns, room = legend_columns([point.name for point in points], width)
        figure = style.new_figure(width, 4.2 + room)
        axes = figure.subplots()
        for index, point in enumerate(points):
            filled = FILLS[index // len(style.PALETTE) % len(FILLS)]  # colours start again
            look: dict[str, Any] = {"color": _colour(index), "marker": MARKERS[index % len(MARKERS)], "capsize": 3}
            look |= {"linestyle": "none", "markersize": 8, "fillstyle": filled, "zorder": 100 - index}
            axes.errorbar(point.cost, point.accuracy.mean or 0.0, yerr=point.accuracy.std, label=point.name, **look)
        if max(costs) > 4 * min(costs):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("{x:g}")
            axes.margins(x=0.12)
        else:
            axes.set_xlim(0, 1.25 * max(costs))  # from zero, or a few percent would look like a gulf
        axes.margins(y=0.12)
        axes.set(xlabel=what, ylabel="$A_T$ (%)")
        axes.grid()
        for text in figure.legend(loc="outside lower left", ncols=columns).get_texts():
            text.set_parse_math(False)
    return figure


def cost_points(setting: Setting) -> list[Point]:
    """The configurations of a setting whose finished runs measured the operations of a prediction, in GFLOPs."""
    points = []
    for group in setting.groups:
        costs = [cost for record in group.done if (cost := metric("gflops").value(record)) is not None]
        if costs:
            points.append(Point(group.name, fmean(costs), over_seeds(group, metric("A_T"))))
    return points
