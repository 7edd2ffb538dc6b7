# SPDX-License-Identifier: Apache-2.0
"""Figures of matrices: accuracy of each task after each task, singular directions of a merge, options of the gate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from onea.errors import OneaError
from onea.presentation import style
from onea.presentation.tables import Value
from onea.research.record import Record
from onea.research.report.aggregate import summarise
from onea.research.report.curves import LETTER, MOST_NAMES, NARROW, WIDTH, panels, short, task_names
from onea.research.report.records import finished, labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CELLS = 12  # tasks; beyond, the matrix has no room for numbers
LEAST_RANGE = 2.0  # points; runs of one configuration differ by about half of that
TITLES = {"down": "down-projection", "up": "up-projection"}


def _heat_map(axes: Any, table: Any, low: float, high: float, **options: Any) -> Any:
    """A matrix in shades of blue, without frame and ticks."""
    image = axes.imshow(table, cmap=style.blues(), vmin=low, vmax=high, **options)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image


def _colour_bar(figure: Figure, image: Any, axes: Any, **options: Any) -> Any:
    bar = figure.colorbar(image, ax=axes, pad=0.02, **options)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    return bar


# accuracy matrices


def accuracy_matrix(record: Record, width: float = 7.4) -> Figure:
    """Accuracy of each task (row) after each task (column), among all classes seen by then."""
    matrix = record["metrics"]["matrix"]
    steps = len(matrix)
    with style.theme():
        figure = style.new_figure(width, min(1.6 + 0.42 * steps, 0.9 * width) if steps > 1 else 2.4)
        axes = figure.subplots()
        image = _heat_map(axes, filled(matrix), 0, 100, aspect="auto")
        if steps <= MOST_CELLS:
            _write_cells(axes, matrix, 7.0 if width < NARROW else 8.5)
        _matrix_axes(axes, record, steps, width)
        if steps > MOST_CELLS:
            _colour_bar(figure, image, axes, fraction=0.05, aspect=30, format="%d %%")
    return figure


def matrix_panels(records: Sequence[Record], width: float = WIDTH) -> Figure:
    """Accuracy of each task (row) after each task (column): a panel for each record, all in one scale."""
    across = min(len(records), 1 if width < NARROW else 3)
    each = min(width / across, 3.6)
    with style.theme():
        figure, every = panels(len(records), across, width, 0.95 * each, extra=0.5)
        for axes, record in zip(every, records, strict=True):
            matrix = record["metrics"]["matrix"]
            steps = len(matrix)
            image = _heat_map(axes, filled(matrix), 0, 100)
            ticks = style.round_numbers(steps, 6)
            axes.set_xticks([t - 1 for t in ticks], [str(t) for t in ticks])
            axes.set_yticks([t - 1 for t in ticks], [str(t) for t in ticks])
            name = str(record.get("title") or record["config"]["method"])
            lines = wrap(name, int((each - 0.5) / LETTER / 1.25), max_lines=3, placeholder=" …")
            axes.set_title("\n".join(lines), parse_math=False, fontsize=9.5)
        figure.supxlabel("after learning task", fontsize=style.LABEL_SIZE)
        figure.supylabel("test images of task", fontsize=style.LABEL_SIZE)
        _colour_bar(figure, image, every, fraction=0.03, aspect=30, format="%d %%")
    return figure


def filled(matrix: Sequence[Sequence[float | None]]) -> Any:
    """A matrix to draw, blank where a task had not arrived."""
    import numpy as np

    return np.ma.masked_invalid(np.array(matrix, dtype=np.float64))  # None becomes NaN: the task had not arrived


def _write_cells(axes: Any, matrix: Sequence[Sequence[float | None]], size: float) -> None:
    for j, row in enumerate(matrix):
        for k, value in enumerate(row):
            if value is not None:
                ink = "white" if value > 62 else style.INK
                axes.text(k, j, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=size)


def _matrix_axes(axes: Any, record: Record, steps: int, width: float) -> None:
    names = [short(name) for name in task_names(record)[:steps]]
    sizes = record["stream"]["sizes"]
    if steps <= MOST_NAMES:
        rows = [f"{name}  +{n}" for name, n in zip(names, sizes, strict=False)]
        axes.set_yticks(range(steps), rows, parse_math=False)
        upright = max(map(len, names)) * LETTER * steps <= width - 2.4
        turn = {} if upright else {"rotation": 50, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(steps), names, parse_math=False, **turn)
    else:
        shown = style.round_numbers(steps, 9)
        for setter in (axes.set_xticks, axes.set_yticks):
            setter([t - 1 for t in shown], [str(t) for t in shown])
    axes.set_xlabel("after learning task")
    axes.set_ylabel("test images of task")
    axes.set_title(f"{labels([record])[0]}: accuracy of each task, %", parse_math=False)
    if steps <= MOST_CELLS:
        axes.set_xticks([t + 0.5 for t in range(steps - 1)], minor=True)
        axes.set_yticks([t + 0.5 for t in range(steps - 1)], minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)


# what a merge did


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
    with style.theme():
        figure, every = _panel_of_each(analysis, width, 3.2)
        for axes, kind in zip(every, analysis, strict=True):
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
    with style.theme():
        figure, every = _panel_of_each(analysis, width, 3.9)
        for axes, kind in zip(every, analysis, strict=True):
            table, count = square(analysis[kind]["overlap"]), analysis[kind]["directions"]
            edges = (0.5, count + 0.5)
            _name(axes, f"Basis, {TITLES.get(kind, kind)}", "direction after the merge", "direction before")
            image = _heat_map(axes, table, 0, 1, extent=(*edges, *reversed(edges)))
        _colour_bar(figure, image, every, fraction=0.05, aspect=24).set_label("overlap (1: unchanged)")
        _whose(figure, record, name, "")
    return figure


def spectra_and_gates(record: Record, width: float = WIDTH, task: int | None = None) -> Figure:
    """Normalised singular values of the base and their gates, a line a layer, dark to light from first to last."""
    name, analysis = analysed_merge(record, task)
    rows = (("value", "Spectrum", "singular value / largest"), ("gate", "Gates", "gate (0: held back)"))
    with style.theme():
        count, narrow = len(analysis), width < NARROW
        figure = style.new_figure(width, 2.5 * len(rows) * count if narrow else 2.9 * len(rows))
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


def _panel_of_each(analysis: dict[str, Any], width: float, height: float) -> tuple[Figure, Any]:
    """A panel for each kind of matrix: side by side, or one above the other on a narrow screen."""
    return panels(len(analysis), 1 if width < NARROW else len(analysis), width, height)


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
    bar = _colour_bar(figure, scale, every, fraction=0.03, aspect=34)
    bar.set_ticks(range(1, len(layers) + 1), labels=[str(layer) for layer in layers], minor=False)
    bar.minorticks_off()
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


# the options of the gate


def by_options(records: Sequence[Record], names: Sequence[str]) -> dict[tuple[Any, ...], Value]:
    """A_T over seeds for every combination of some options that occurs in finished runs."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for record in records:
        options = record.get("options", {})
        if finished(record) and all(name in options for name in names):
            found[tuple(options[name] for name in names)].append(record["metrics"]["A_T"])
    return {key: summarise(found[key]) for key in sorted(found)}


def colour_range(cells: Sequence[Value]) -> tuple[float, float]:
    """The values of the palest and of the darkest colour: what is drawn, and at least four deviations or two points.

    So a map of nothing but noise looks even.

    >>> colour_range([Value(mean=70.7), Value(mean=71.1)]), colour_range([Value(mean=60.0), Value(mean=80.0)])
    ((69.9, 71.9), (60.0, 80.0))
    """
    means = [cell.mean for cell in cells if cell.mean is not None]
    noise = max([LEAST_RANGE, *(4 * cell.std for cell in cells if cell.std is not None)])
    low, high = min(means), max(means)
    short = max(0.0, noise - (high - low)) / 2
    return round(low - short, 9), round(high + short, 9)


def gate_heat_map(records: Sequence[Record], width: float = 7.4) -> Figure:
    """A_T over the gate's sharpness (columns) and quantile (rows); what has not been run stays blank."""
    cells = by_options(records, ("kappa", "quantile"))
    if not cells:
        raise OneaError("No finished record has the options kappa and quantile; run one-a with several of them.")
    kappas, quantiles = (sorted({key[place] for key in cells}) for place in (0, 1))
    means = {key: cell.mean for key, cell in cells.items() if cell.mean is not None}
    low, high = colour_range(list(cells.values()))
    table = [[means.get((kappa, quantile), float("nan")) for kappa in kappas] for quantile in quantiles]
    with style.theme():
        figure = style.new_figure(width, 1.5 + 0.62 * len(quantiles))
        axes = figure.subplots()
        image = _heat_map(axes, table, low - 0.15 * (high - low + 0.1), high + 0.1, aspect="auto")
        for (kappa, quantile), cell in cells.items():
            _write(axes, kappas.index(kappa), quantiles.index(quantile), cell, (low, high), width)
        for kappa in kappas:
            for quantile in quantiles:
                if (kappa, quantile) not in cells:
                    place = (kappas.index(kappa), quantiles.index(quantile))
                    axes.text(*place, "not run", ha="center", va="center", color=style.MUTED, fontsize=7)
        axes.set_xticks(range(len(kappas)), [f"{kappa:g}" for kappa in kappas])
        axes.set_yticks(range(len(quantiles)), [f"{quantile:g}" for quantile in quantiles])
        axes.set(xlabel="kappa: sharpness of the gate", ylabel="quantile q")
        axes.set_title("$A_T$ over the gate's parameters")
        _colour_bar(figure, image, axes, fraction=0.05, format="%.1f")
    return figure


def _write(axes: Any, x: int, y: int, cell: Value, ends: tuple[float, float], width: float) -> None:
    low, high = ends
    dark = cell.mean is not None and cell.mean > low + 0.7 * (high - low)
    spread_text = f"\n± {cell.std:.2f}" if cell.std is not None else ""
    size = 7.0 if width < NARROW else 8.5
    ink = "white" if dark else style.INK
    axes.text(x, y, f"{cell.mean:.2f}{spread_text}", ha="center", va="center", color=ink, fontsize=size)
