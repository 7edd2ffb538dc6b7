# SPDX-License-Identifier: Apache-2.0
"""Pictures of a merge: how far each singular direction moved, how far the basis turned, spectra and gates by layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from onea.errors import OneaError
from onea.presentation import style
from onea.presentation.style import blues
from onea.research.record import Record
from onea.research.report.curves import NARROW

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 8.6
TITLES = {"down": "down-projection", "up": "up-projection"}


def numbers(text: str) -> list[float]:
    """A series as a record writes it.

    >>> numbers("1 0.5 1e-05")
    [1.0, 0.5, 1e-05]
    """
    return [float(word) for word in text.split()]


def square(text: str) -> list[list[float]]:
    """A square table as a record writes it, row by row.

    >>> square("1 0 0 1")
    [[1.0, 0.0], [0.0, 1.0]]
    """
    flat = numbers(text)
    side = round(len(flat) ** 0.5)
    return [flat[start : start + side] for start in range(0, len(flat), side)]


def has_analysis(record: Record) -> bool:
    """Whether a record holds the analysis of at least one merge."""
    return bool(_merges(record))


def analysed_merge(record: Record, task: int | None = None) -> tuple[str, dict[str, Any]]:
    """The name of a task and the analysis of its merge.

    Args:
        record: of a run that keeps the analysis of its merges.
        task: its number, from 0; by default the last one that was merged.
    """
    found = _merges(record)
    if not found or (task is not None and task not in found):
        which = "no merge" if task is None else f"no merge of task {task + 1}"
        raise OneaError(f"The record of {record['config']['method']} holds the analysis of {which}; run it again.")
    chosen = max(found) if task is None else task
    return str(record["tasks"][chosen]["name"]), found[chosen]


def update_strength(record: Record, width: float = WIDTH, task: int | None = None) -> Figure:
    """How far each singular direction of the base moved in a merge: every layer thin, their mean thick."""
    name, analysis = analysed_merge(record, task)
    with style.themed():
        figure, panels = _panels(analysis, width, 3.2)
        for axes, kind in zip(panels, analysis, strict=True):
            lines = [numbers(layer["update"]) for layer in analysis[kind]["layers"]]
            places = _places(analysis[kind]["directions"], len(lines[0]))
            for line, colour in zip(lines, style.shades(len(lines)), strict=True):
                axes.plot(places, line, color=colour, linewidth=0.9, alpha=0.45)
            mean = [sum(step) / len(step) for step in zip(*lines, strict=True)]
            axes.plot(places, mean, color=style.PALETTE[1], linewidth=2.6, gid=f"mean-{kind}")
            _name(axes, f"Update, {TITLES.get(kind, kind)}", "singular direction of the base", "update norm")
            axes.set_ylim(bottom=0)
        _whose(figure, record, name, "thick: mean over layers")
    return figure


def basis_alignment(record: Record, width: float = WIDTH, task: int | None = None) -> Figure:
    """How much of each base direction (row) lies in each direction after the merge (column), mean over layers."""
    name, analysis = analysed_merge(record, task)
    with style.themed():
        figure, panels = _panels(analysis, width, 3.9)
        for axes, kind in zip(panels, analysis, strict=True):
            table, count = square(analysis[kind]["overlap"]), analysis[kind]["directions"]
            edges = (0.5, count + 0.5)
            image = axes.imshow(table, cmap=blues(), vmin=0, vmax=1, extent=(*edges, *reversed(edges)))
            _name(axes, f"Basis, {TITLES.get(kind, kind)}", "direction after the merge", "direction before")
            axes.grid(False)
            axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=panels, fraction=0.05, pad=0.02, aspect=24)
        bar.outline.set_visible(False)
        bar.set_label("overlap (1: unchanged)")
        _whose(figure, record, name, "")
    return figure


def spectra_and_gates(record: Record, width: float = WIDTH, task: int | None = None) -> Figure:
    """Normalised singular values of the base and their gates, a line a layer, dark to light from first to last."""
    name, analysis = analysed_merge(record, task)
    rows = (("value", "Spectrum", "singular value / largest"), ("gate", "Gates", "gate (0: held back)"))
    with style.themed():
        count, narrow = len(analysis), width < NARROW
        figure = style.blank(width, 2.5 * len(rows) * count if narrow else 2.9 * len(rows))
        shape = (len(rows) * count, 1) if narrow else (len(rows), count)
        grid = figure.subplots(*shape, squeeze=False).reshape(len(rows), count)
        for (key, title, label), line in zip(rows, grid, strict=True):
            for axes, kind in zip(line, analysis, strict=True):
                _layers(axes, analysis[kind], key)
                _name(axes, f"{title}, {TITLES.get(kind, kind)}", "singular direction of the base", label)
        _layer_scale(figure, grid, [layer["layer"] + 1 for layer in next(iter(analysis.values()))["layers"]])
        _whose(figure, record, name, "")
    return figure


def _merges(record: Record) -> dict[int, dict[str, Any]]:
    merges = {index: (task.get("merge") or {}).get("analysis") for index, task in enumerate(record["tasks"])}
    return {index: analysis for index, analysis in merges.items() if analysis}


def _panels(analysis: dict[str, Any], width: float, height: float) -> tuple[Figure, Any]:
    """A panel for each kind of matrix: side by side, or one above the other on a narrow screen."""
    count, narrow = len(analysis), width < NARROW
    figure = style.blank(width, height * count if narrow else height)
    shape = (count, 1) if narrow else (1, count)
    return figure, figure.subplots(*shape, squeeze=False).flatten()


def _places(directions: int, points: int) -> list[float]:
    """Where the points of a series lie among the directions, counted from 1; blocks lie at their centres.

    >>> _places(4, 4), _places(4, 2)
    ([1.0, 2.0, 3.0, 4.0], [1.5, 3.5])
    """
    edges = [directions * index // points for index in range(points + 1)]
    return [(start + stop + 1) / 2 for start, stop in pairwise(edges)]


def _layers(axes: Any, entry: dict[str, Any], key: str) -> None:
    layers = entry["layers"]
    for layer, colour in zip(layers, style.shades(len(layers)), strict=True):
        values = numbers(layer[key])
        axes.plot(_places(entry["directions"], len(values)), values, color=colour, linewidth=1.5)
    axes.set_ylim(0, 1.03)


def _layer_scale(figure: Figure, grid: Any, layers: Sequence[int]) -> None:
    """Which shade is which layer."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    norm = BoundaryNorm([n + 0.5 for n in range(len(layers) + 1)], len(layers))
    scale = ScalarMappable(norm, ListedColormap(style.shades(len(layers))))
    every = [axes for line in grid for axes in line]
    bar = figure.colorbar(scale, ax=every, fraction=0.03, pad=0.02, aspect=34)
    bar.set_ticks(range(1, len(layers) + 1), labels=[str(layer) for layer in layers], minor=False)
    bar.minorticks_off()
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    bar.set_label("layer")


def _name(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y")


def _whose(figure: Figure, record: Record, task: str, more: str) -> None:
    method = record.get("title") or record["config"]["method"]
    text = f"{method}, merge of {task}" + (f"; {more}" if more else "")
    figure.supxlabel(text, fontsize=style.TICK_SIZE, color=style.MUTED, parse_math=False)
