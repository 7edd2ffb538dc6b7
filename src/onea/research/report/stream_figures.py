# SPDX-License-Identifier: Apache-2.0
"""Pictures of a stream: how it is made, its sizes from head to tail, and how it differs from a long-tailed one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onea.presentation import style
from onea.research.report.curves import NARROW, WIDTH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from onea.research.streams import Stream

EVERY_TICK = 20  # up to this many bars, each has its number below it
MOST_LABELS = 60  # beyond this many bars, counts over them cannot be read


def generation_figure(stream: Stream, width: float = WIDTH) -> Figure:
    """Left the sizes from head to tail, right the order of arrival; a task keeps its colour. One above the other where
    the width, in inches, is a phone's.
    """
    head_to_tail = _by_size(stream.sizes)
    colour_of = dict(zip(head_to_tail, style.shades(stream.tasks), strict=True))
    with style.theme():
        each, narrow = _panel_width(stream.sizes), width < NARROW
        figure = style.new_figure(max(width, each), 5.8) if narrow else style.new_figure(2 * each, 3.4)
        left, right = figure.subplots(*((2, 1) if narrow else (1, 2)), sharey=True)
        _task_bars(left, [stream.sizes[t] for t in head_to_tail], [colour_of[t] for t in head_to_tail])
        _task_bars(right, stream.sizes, [colour_of[t] for t in range(stream.tasks)])
        _label(left, "Allocation, head to tail", "Rank by size", "Classes")
        _label(right, "Order of arrival", "Task", "")
    return figure


def descending_figure(stream: Stream, width: float = WIDTH) -> Figure:
    """The sizes of this stream's tasks, largest first."""
    sizes = sorted(stream.sizes, reverse=True)
    with style.theme():
        figure = style.new_figure(max(min(width, 5.2), 1.1 * _panel_width(sizes)), 3.4)
        axes = figure.subplots()
        _task_bars(axes, sizes, style.shades(len(sizes)))
        title = (
            f"{_count(stream.classes, 'class', 'classes')} in {_count(stream.tasks, 'task', 'tasks')}, largest first"
        )
        _label(axes, title, "Task", "Classes")
    return figure


def comparison_figure(stream: Stream, n_max: int = 500, mu: float = 0.1, width: float = WIDTH) -> Figure:
    """Long-tailed class-incremental learning above, this stream below: classes per task left, images per class right.

    Args:
        stream: its sizes fill the lower left; the lower right is flat unless the stream is long-tailed itself.
        n_max: training images of the commonest class.
        mu: the rarest class's share of those, in the long-tailed row.
        width: inches; on a phone all panels stand one above the other.
    """
    from onea.research.streams import balanced, long_tailed

    even = balanced(stream.classes, stream.tasks)
    tail = long_tailed(n_max, stream.classes, mu)
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
    """Write all three figures into a folder, which is made where it is missing, and return their paths."""
    figures = {
        "generation.png": generation_figure(stream),
        "descending.png": descending_figure(stream),
        "si-cil-vs-long-tailed.png": comparison_figure(stream, n_max, mu),
    }
    return [style.save(figure, folder / name) for name, figure in figures.items()]


def _by_size(sizes: Sequence[int]) -> list[int]:
    """Tasks from the largest to the smallest; equal ones in order of arrival."""
    return sorted(range(len(sizes)), key=lambda t: -sizes[t])


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _uneven(numbers: Sequence[int]) -> bool:
    return max(numbers) - min(numbers) > 1  # a remainder alone makes neighbours differ by one


def _panel_width(sizes: Sequence[int]) -> float:
    """Inches that leave room for the count over every bar, within what a page can take."""
    each = 0.05 + 0.05 * len(str(max(sizes)))
    if len(sizes) <= EVERY_TICK:
        each = max(each, 0.22)  # every bar has its number below it as well
    return min(max(3.7, 0.8 + each * len(sizes)), 10.0)


def _comparison_row(row: Sequence[Any], name: str, sizes: Sequence[int], images: Sequence[int], colour: str) -> None:
    left, right = row
    _task_bars(left, sizes, [colour] * len(sizes))
    _class_bars(right, sizes, images, colour)
    _label(left, f"{name}: {'uneven' if _uneven(sizes) else 'equal'} tasks", "", "Classes per task")
    _label(right, f"{name}: {'uneven' if _uneven(images) else 'equal'} classes", "", "Training images per class")


def _task_bars(axes: Any, sizes: Sequence[int], colours: Sequence[Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    tasks = range(1, len(sizes) + 1)
    bars = axes.bar(tasks, sizes, width=0.78, color=colours)
    if len(sizes) <= MOST_LABELS:
        counts = axes.bar_label(bars, labels=[str(n) for n in sizes], padding=1.5)
        for count in counts:
            count.set(fontsize=8.5 if len(sizes) <= EVERY_TICK else 7, path_effects=[_halo()])
    margin = 0.7 if len(sizes) > 3 else 1.6  # one or two bars must not fill the whole panel
    axes.set_xlim(1 - margin, len(sizes) + margin)
    axes.set_ylim(0, _head_room(axes, sizes))
    axes.set_xticks(_ticks(len(sizes)))
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.grid(axis="y")


def _class_bars(axes: Any, sizes: Sequence[int], images: Sequence[int], colour: str) -> None:
    """Images of each class under one outline, in bands that change shade where a new task starts."""
    edges = [c + 0.5 for c in range(len(images) + 1)]
    odd = [task % 2 for task, size in enumerate(sizes) for _ in range(size)]
    for shade, parity in ((0.28, 0), (0.5, 1)):
        band = [n if task == parity else 0 for n, task in zip(images, odd, strict=True)]
        axes.stairs(band, edges, fill=True, color=style.tint(colour, shade), linewidth=0)
    axes.stairs(images, edges, baseline=None, color=colour, linewidth=1.8)
    _end_counts(axes, edges, images)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, _head_room(axes, images))
    axes.set_xticks(_ticks(len(images), most=8))
    axes.grid(axis="y")


def _end_counts(axes: Any, edges: Sequence[float], images: Sequence[int]) -> None:
    """Write out the first class's images and, where there is another class, the last one's."""
    ends = ((edges[0], images[0], 4, "left"), (edges[-1], images[-1], 0, "right"))
    for x, count, shift, side in ends[: len(images)]:
        axes.annotate(str(count), (x, count), (shift, 5), textcoords="offset points", ha=side, fontsize=8.5)


def _head_room(axes: Any, heights: Sequence[int]) -> float:
    """The top of an axis with space for the counts; where axes are shared, the tallest panel decides."""
    drawn = axes.get_ylim()[1] if len(axes.get_shared_y_axes().get_siblings(axes)) > 1 else 0.0
    return float(max(drawn, 1.14 * max(heights)))


def _halo() -> Any:
    """A white rim that keeps a number legible where it meets a grid line."""
    from matplotlib.patheffects import withStroke

    return withStroke(linewidth=2.2, foreground="white")


def _ticks(count: int, most: int = EVERY_TICK) -> list[int]:
    """The first, the last and round numbers between, few enough to be read apart.

    >>> _ticks(10)
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    >>> _ticks(40)
    [1, 5, 10, 15, 20, 25, 30, 35, 40]
    >>> _ticks(101)
    [1, 20, 40, 60, 80, 101]
    """
    if count <= most:
        return list(range(1, count + 1))
    step = next(s * 10**e for e in range(1, 9) for s in (0.5, 1, 2) if count / (s * 10**e) <= 8)
    between = [n for n in range(int(step), count, int(step)) if n - 1 > step / 2 and count - n > step / 2]
    return [1, *between, count]


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
