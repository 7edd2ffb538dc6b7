# SPDX-License-Identifier: Apache-2.0
"""Figures of a stream: how it is generated, its sorted sizes, and a comparison with a long-tailed stream."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onea.presentation import style
from onea.research.report.curves import NARROW, WIDTH
from onea.text import plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from onea.research.streams import Stream

MAX_TICKS = 20  # bars with a number below each
MAX_COUNTS = 60  # bars with a count over each


def generation_figure(stream: Stream, width: float = WIDTH) -> Figure:
    """The sizes sorted from head to tail, and in order of arrival; a task has the same colour in both panels.

    The panels are side by side, or above each other if the width, in inches, is that of a phone.
    """
    head_to_tail = sorted(range(stream.tasks), key=lambda task: -stream.sizes[task])
    colours = dict(zip(head_to_tail, style.shades(stream.tasks), strict=True))
    with style.theme():
        panel, narrow = _panel_width(stream.sizes), width < NARROW
        figure = style.new_figure(max(width, panel), 5.8) if narrow else style.new_figure(2 * panel, 3.4)
        left, right = figure.subplots(*((2, 1) if narrow else (1, 2)), sharey=True)
        _task_bars(left, [stream.sizes[t] for t in head_to_tail], [colours[t] for t in head_to_tail])
        _task_bars(right, stream.sizes, [colours[t] for t in range(stream.tasks)])
        left.set(title="Allocation, head to tail", xlabel="Rank by size", ylabel="Classes")
        right.set(title="Order of arrival", xlabel="Task")
    return figure


def descending_figure(stream: Stream, width: float = WIDTH) -> Figure:
    """The sizes of the tasks, largest first."""
    sizes = sorted(stream.sizes, reverse=True)
    classes, tasks = plural(stream.classes, "class", "classes"), plural(stream.tasks, "task", "tasks")
    with style.theme():
        figure = style.new_figure(max(min(width, 5.2), 1.1 * _panel_width(sizes)), 3.4)
        axes = figure.subplots()
        _task_bars(axes, sizes, style.shades(len(sizes)))
        axes.set(title=f"{classes} in {tasks}, largest first", xlabel="Task", ylabel="Classes")
    return figure


def comparison_figure(stream: Stream, n_max: int = 500, mu: float = 0.1, width: float = WIDTH) -> Figure:
    """A long-tailed stream (above) and this stream (below): classes per task (left), images per class (right).

    Args:
        stream: the stream of the lower row.
        n_max: training images of the most frequent class.
        mu: images of the rarest class in the long-tailed row, as a fraction of ``n_max``.
        width: inches; on a phone all panels are above each other.
    """
    from onea.research.streams import balanced_sizes, long_tail_counts

    even = balanced_sizes(stream.classes, stream.tasks)
    tail = long_tail_counts(n_max, stream.classes, mu)
    samples = stream.samples or (n_max,) * stream.classes
    left, right = _panel_width(stream.sizes), 3.7
    name = "Step-imbalanced" if _uneven(stream.sizes) else "This stream"
    with style.theme():
        if width < NARROW:
            figure = style.new_figure(max(width, left), 10.4)
            grid = figure.subplots(4, 1).reshape(2, 2)
            for upper, lower in zip(*grid, strict=True):
                lower.sharey(upper)
        else:
            figure = style.new_figure(left + right, 5.6)
            grid = figure.subplots(2, 2, sharex="col", sharey="col", width_ratios=(left, right))
        _comparison_row(grid[0], "Long-tailed", even, tail, style.PALETTE[1])
        _comparison_row(grid[1], name, stream.sizes, samples, style.PALETTE[0])
        grid[1][0].set_xlabel("Task")
        grid[1][1].set_xlabel("Class, in order of arrival (bands: tasks)")
    return figure


def draw_stream_figures(stream: Stream, folder: Path, n_max: int = 500, mu: float = 0.1) -> list[Path]:
    """Write all three figures to a folder, which is created if necessary, and return their paths."""
    figures = {
        "generation.png": generation_figure(stream),
        "descending.png": descending_figure(stream),
        "si-cil-vs-long-tailed.png": comparison_figure(stream, n_max, mu),
    }
    return [style.save(figure, folder / name) for name, figure in figures.items()]


def _uneven(numbers: Sequence[int]) -> bool:
    return max(numbers) - min(numbers) > 1  # an even division may leave a difference of one


def _panel_width(sizes: Sequence[int]) -> float:
    """Inches with room for the count over each bar, up to the width of a page."""
    bar = 0.05 + 0.05 * len(str(max(sizes)))
    if len(sizes) <= MAX_TICKS:
        bar = max(bar, 0.22)  # for the number below
    return min(max(3.7, 0.8 + bar * len(sizes)), 10.0)


def _comparison_row(row: Sequence[Any], name: str, sizes: Sequence[int], images: Sequence[int], colour: str) -> None:
    left, right = row
    _task_bars(left, sizes, [colour] * len(sizes))
    _class_bars(right, sizes, images, colour)
    left.set(title=f"{name}: {'uneven' if _uneven(sizes) else 'equal'} tasks", ylabel="Classes per task")
    right.set(title=f"{name}: {'uneven' if _uneven(images) else 'equal'} classes", ylabel="Training images per class")


def _task_bars(axes: Any, sizes: Sequence[int], colours: Sequence[Any]) -> None:
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator

    tasks = range(1, len(sizes) + 1)
    bars = axes.bar(tasks, sizes, width=0.78, color=colours)
    if len(sizes) <= MAX_COUNTS:
        rim = withStroke(linewidth=2.2, foreground="white")  # keeps a count legible over a grid line
        for count in axes.bar_label(bars, labels=[str(n) for n in sizes], padding=1.5):
            count.set(fontsize=8.5 if len(sizes) <= MAX_TICKS else 7, path_effects=[rim])
    margin = 0.7 if len(sizes) > 3 else 1.6  # keeps one or two bars narrow
    axes.set_xlim(1 - margin, len(sizes) + margin)
    axes.set_ylim(0, _head_room(axes, sizes))
    axes.set_xticks(style.tick_positions(len(sizes), len(sizes) if len(sizes) <= MAX_TICKS else 8))
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.grid(axis="y")


def _class_bars(axes: Any, sizes: Sequence[int], images: Sequence[int], colour: str) -> None:
    """The images of each class as one outline; the shade alternates from task to task."""
    edges = [c + 0.5 for c in range(len(images) + 1)]
    odd = [task % 2 for task, size in enumerate(sizes) for _ in range(size)]
    for shade, parity in ((0.28, 0), (0.5, 1)):
        band = [n if task == parity else 0 for n, task in zip(images, odd, strict=True)]
        axes.stairs(band, edges, fill=True, color=style.tint(colour, shade), linewidth=0)
    axes.stairs(images, edges, baseline=None, color=colour, linewidth=1.8)
    ends = ((edges[0], images[0], 4, "left"), (edges[-1], images[-1], 0, "right"))
    for x, count, shift, side in ends[: len(images)]:
        axes.annotate(str(count), (x, count), (shift, 5), textcoords="offset points", ha=side, fontsize=8.5)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, _head_room(axes, images))
    axes.set_xticks(style.tick_positions(len(images), 8))
    axes.grid(axis="y")


def _head_room(axes: Any, heights: Sequence[int]) -> float:
    """The upper limit of an axis with space for the counts; shared axes use the highest bar of all panels."""
    drawn = axes.get_ylim()[1] if len(axes.get_shared_y_axes().get_siblings(axes)) > 1 else 0.0
    return float(max(drawn, 1.14 * max(heights)))
