# SPDX-License-Identifier: Apache-2.0
"""Figures of accuracy matrices, of the singular directions of a merge, and of the options of the gate."""

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
from onea.research.report.curves import LETTER, MAX_NAMED_TASKS, NARROW, WIDTH, panels, short, task_names
from onea.research.report.records import finished, labels, run_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_CELLS = 12  # tasks of a matrix with numbers in its cells
MIN_RANGE = 2.0  # percentage points: about twice the difference between runs of one configuration
TITLES = {"down": "down-projection", "up": "up-projection"}


def _heat_map(axes: Any, table: Any, low: float, high: float, **options: Any) -> Any:
    """Draw a matrix in shades of blue, without frame or ticks; None and NaN are blank."""
    import numpy as np

    table = np.ma.masked_invalid(np.array(table, dtype=np.float64))
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
    """Accuracy of each task (row) after each task (column), among all classes seen so far."""
    matrix = record["metrics"]["matrix"]
    steps = len(matrix)
    with style.theme():
        figure = style.new_figure(width, min(1.6 + 0.42 * steps, 0.9 * width) if steps > 1 else 2.4)
        axes = figure.subplots()
        image = _heat_map(axes, matrix, 0, 100, aspect="auto")
        if steps <= MAX_CELLS:
            for y, row in enumerate(matrix):
                for x, value in enumerate(row):
                    if value is not None:
                        _write_cell(axes, x, y, f"{value:.0f}", width, dark=value > 62)
        _matrix_axes(axes, record, steps, width)
        if steps > MAX_CELLS:
            _colour_bar(figure, image, axes, fraction=0.05, aspect=30, format="%d %%")
    return figure


def matrix_panels(records: Sequence[Record], width: float = WIDTH) -> Figure:
    """Accuracy of each task (row) after each task (column): one panel per record, all with the same colours."""
    across = min(len(records), 1 if width < NARROW else 3)
    panel_width = min(width / across, 3.6)
    with style.theme():
        figure, grid = panels(len(records), across, width, 0.95 * panel_width, extra=0.5)
        for axes, record in zip(grid, records, strict=True):
            matrix = record["metrics"]["matrix"]
            steps = len(matrix)
            image = _heat_map(axes, matrix, 0, 100)
            ticks = style.tick_positions(steps, 6)
            for set_ticks in (axes.set_xticks, axes.set_yticks):
                set_ticks([t - 1 for t in ticks], [str(t) for t in ticks])
            columns = int((panel_width - 0.5) / LETTER / 1.25)
            lines = wrap(run_title(record), columns, max_lines=3, placeholder=" …")
            axes.set_title("\n".join(lines), parse_math=False, fontsize=9.5)
        figure.supxlabel("after learning task", fontsize=style.LABEL_SIZE)
        figure.supylabel("test images of task", fontsize=style.LABEL_SIZE)
        _colour_bar(figure, image, grid, fraction=0.03, aspect=30, format="%d %%")
    return figure


def _write_cell(axes: Any, x: int, y: int, text: str, width: float, *, dark: bool) -> None:
    ink, size = "white" if dark else style.INK, 7.0 if width < NARROW else 8.5
    axes.text(x, y, text, ha="center", va="center", color=ink, fontsize=size)


def _matrix_axes(axes: Any, record: Record, steps: int, width: float) -> None:
    names = [short(name) for name in task_names(record)[:steps]]
    sizes = record["stream"]["sizes"]
    if steps <= MAX_NAMED_TASKS:
        rows = [f"{name}  +{n}" for name, n in zip(names, sizes, strict=False)]
        axes.set_yticks(range(steps), rows, parse_math=False)
        upright = max(map(len, names)) * LETTER * steps <= width - 2.4
        turn = {} if upright else {"rotation": 50, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(steps), names, parse_math=False, **turn)
    else:
        shown = style.tick_positions(steps, 9)
        for set_ticks in (axes.set_xticks, axes.set_yticks):
            set_ticks([t - 1 for t in shown], [str(t) for t in shown])
    axes.set_xlabel("after learning task")
    axes.set_ylabel("test images of task")
    axes.set_title(f"{labels([record])[0]}: accuracy of each task, %", parse_math=False)
    if steps <= MAX_CELLS:
        for set_ticks in (axes.set_xticks, axes.set_yticks):
            set_ticks([t + 0.5 for t in range(steps - 1)], minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)


# analysis of a merge


def parse_numbers(text: str) -> list[float]:
    """Parse a series of numbers of a record.

    >>> parse_numbers("1 0.5 1e-05")
    [1.0, 0.5, 1e-05]
    """
    return [float(word) for word in text.split()]


def parse_matrix(text: str) -> list[list[float]]:
    """Parse a square matrix of a record.

    >>> parse_matrix("1 0 0 1")
    [[1.0, 0.0], [0.0, 1.0]]
    """
    flat = parse_numbers(text)
    side = round(len(flat) ** 0.5)
    return [flat[start : start + side] for start in range(0, len(flat), side)]


def has_analysis(record: Record) -> bool:
    """Whether a record has the analysis of at least one merge."""
    return bool(_merges(record))


def analysed_merge(record: Record, task: int | None = None) -> tuple[str, dict[str, Any]]:
    """The name of a task and the analysis of its merge.

    Args:
        record: record of a run that stores the analysis of its merges.
        task: index of the task; by default the last one that was merged.
    """
    merges = _merges(record)
    if not merges or (task is not None and task not in merges):
        which = "" if task is None else f" for task {task + 1}"
        raise OneaError(f"The record of {record['config']['method']} has no merge analysis{which}; run it again.")
    task = max(merges) if task is None else task
    return str(record["tasks"][task]["name"]), merges[task]


def update_strength(record: Record, width: float = WIDTH, task: int | None = None) -> Figure:
    """Norm of the update along each singular direction of the base, by layer (thin) and as their mean (thick)."""
    name, analysis = analysed_merge(record, task)
    with style.theme():
        figure, grid = _panel_per_kind(analysis, width, 3.2)
        for axes, (kind, entry) in zip(grid, analysis.items(), strict=True):
            lines = _layer_lines(axes, entry, "update", linewidth=0.9, alpha=0.45)
            mean = [sum(step) / len(step) for step in zip(*lines, strict=True)]
            centres = _block_centres(entry["directions"], len(mean))
            axes.plot(centres, mean, color=style.PALETTE[1], linewidth=2.6, gid=f"mean-{kind}")
            _name_axes(axes, "Update", kind, "singular direction of the base", "update norm")
            axes.set_ylim(bottom=0)
        _describe(figure, record, name, "; thick: mean over layers")
    return figure


def basis_alignment(record: Record, width: float = WIDTH, task: int | None = None) -> Figure:
    """Overlap of each base direction (row) with each direction after the merge (column), mean over layers."""
    name, analysis = analysed_merge(record, task)
    with style.theme():
        figure, grid = _panel_per_kind(analysis, width, 3.9)
        for axes, (kind, entry) in zip(grid, analysis.items(), strict=True):
            edges = (0.5, entry["directions"] + 0.5)
            _name_axes(axes, "Basis", kind, "direction after the merge", "direction before")
            image = _heat_map(axes, parse_matrix(entry["overlap"]), 0, 1, extent=(*edges, *reversed(edges)))
        _colour_bar(figure, image, grid, fraction=0.05, aspect=24).set_label("overlap (1: unchanged)")
        _describe(figure, record, name)
    return figure


def spectra_and_gates(record: Record, width: float = WIDTH, task: int | None = None) -> Figure:
    """Normalised singular values of the base and their gates, one line per layer, from dark (first) to light (last)."""
    name, analysis = analysed_merge(record, task)
    rows = (("value", "Spectrum", "singular value / largest"), ("gate", "Gates", "gate (0: closed)"))
    with style.theme():
        count, narrow = len(analysis), width < NARROW
        figure = style.new_figure(width, 2.5 * len(rows) * count if narrow else 2.9 * len(rows))
        shape = (len(rows) * count, 1) if narrow else (len(rows), count)
        grid = figure.subplots(*shape, squeeze=False).reshape(len(rows), count)
        for (key, title, label), row in zip(rows, grid, strict=True):
            for axes, (kind, entry) in zip(row, analysis.items(), strict=True):
                _layer_lines(axes, entry, key, linewidth=1.5)
                axes.set_ylim(0, 1.03)
                _name_axes(axes, title, kind, "singular direction of the base", label)
        _layer_scale(figure, grid, [layer["layer"] + 1 for layer in next(iter(analysis.values()))["layers"]])
        _describe(figure, record, name)
    return figure


def _merges(record: Record) -> dict[int, dict[str, Any]]:
    merges = {index: (task.get("merge") or {}).get("analysis") for index, task in enumerate(record["tasks"])}
    return {index: analysis for index, analysis in merges.items() if analysis}


def _panel_per_kind(analysis: dict[str, Any], width: float, height: float) -> tuple[Figure, Any]:
    """One panel for each kind of matrix, side by side, or above each other in a narrow figure."""
    return panels(len(analysis), 1 if width < NARROW else len(analysis), width, height)


def _block_centres(directions: int, points: int) -> list[float]:
    """Positions of the points of a series among the directions, from 1; a point may be the mean of a block.

    >>> _block_centres(4, 4), _block_centres(4, 2)
    ([1.0, 2.0, 3.0, 4.0], [1.5, 3.5])
    """
    edges = [directions * index // points for index in range(points + 1)]
    return [(start + stop + 1) / 2 for start, stop in pairwise(edges)]


def _layer_lines(axes: Any, entry: dict[str, Any], key: str, **options: Any) -> list[list[float]]:
    """Draw a line for each layer; returns their values."""
    lines = [parse_numbers(layer[key]) for layer in entry["layers"]]
    for line, colour in zip(lines, style.shades(len(lines)), strict=True):
        axes.plot(_block_centres(entry["directions"], len(line)), line, color=colour, **options)
    return lines


def _layer_scale(figure: Figure, grid: Any, layers: Sequence[int]) -> None:
    """A colour bar of the layers."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    norm = BoundaryNorm([n + 0.5 for n in range(len(layers) + 1)], len(layers))
    scale = ScalarMappable(norm, ListedColormap(style.shades(len(layers))))
    bar = _colour_bar(figure, scale, list(grid.flat), fraction=0.03, aspect=34)
    bar.set_ticks(range(1, len(layers) + 1), labels=[str(layer) for layer in layers], minor=False)
    bar.minorticks_off()
    bar.set_label("layer")


def _name_axes(axes: Any, title: str, kind: str, x: str, y: str) -> None:
    axes.set(title=f"{title}, {TITLES.get(kind, kind)}", xlabel=x, ylabel=y)
    axes.grid(axis="y")


def _describe(figure: Figure, record: Record, task: str, more: str = "") -> None:
    text = f"{run_title(record)}, merge of {task}{more}"
    figure.supxlabel(text, fontsize=style.TICK_SIZE, color=style.MUTED, parse_math=False)


# the options of the gate


def accuracy_by_options(records: Sequence[Record], names: Sequence[str]) -> dict[tuple[Any, ...], Value]:
    """A_T over seeds for each combination of values of these options in finished runs."""
    accuracies: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for record in records:
        options = record.get("options", {})
        if finished(record) and all(name in options for name in names):
            accuracies[tuple(options[name] for name in names)].append(record["metrics"]["A_T"])
    return {key: summarise(accuracies[key]) for key in sorted(accuracies)}


def colour_range(cells: Sequence[Value]) -> tuple[float, float]:
    """The values of the lightest and darkest colours: at least four standard deviations or two points apart.

    Differences within the noise then have similar colours.

    >>> colour_range([Value(mean=70.7), Value(mean=71.1)]), colour_range([Value(mean=60.0), Value(mean=80.0)])
    ((69.9, 71.9), (60.0, 80.0))
    """
    means = [cell.mean for cell in cells if cell.mean is not None]
    noise = max([MIN_RANGE, *(4 * cell.std for cell in cells if cell.std is not None)])
    low, high = min(means), max(means)
    margin = max(0.0, noise - (high - low)) / 2
    return round(low - margin, 9), round(high + margin, 9)


def gate_heat_map(records: Sequence[Record], width: float = 7.4) -> Figure:
    """A_T over the gate's sharpness (columns) and quantile (rows); combinations without a run are blank."""
    cells = accuracy_by_options(records, ("kappa", "quantile"))
    if not cells:
        raise OneaError("No finished record has the options kappa and quantile; run one-a with several of them.")
    kappas, quantiles = (sorted({key[position] for key in cells}) for position in (0, 1))
    table = [[cells.get((kappa, quantile), Value()) for kappa in kappas] for quantile in quantiles]
    low, high = colour_range(list(cells.values()))
    with style.theme():
        figure = style.new_figure(width, 1.5 + 0.62 * len(quantiles))
        axes = figure.subplots()
        means = [[cell.mean for cell in row] for row in table]
        image = _heat_map(axes, means, low - 0.15 * (high - low + 0.1), high + 0.1, aspect="auto")
        for y, row in enumerate(table):
            for x, cell in enumerate(row):
                if cell.mean is None:
                    axes.text(x, y, "not run", ha="center", va="center", color=style.MUTED, fontsize=7)
                else:
                    dark = cell.mean > low + 0.7 * (high - low)
                    _write_cell(axes, x, y, cell.text(2).replace(" ±", "\n±"), width, dark=dark)
        axes.set_xticks(range(len(kappas)), [f"{kappa:g}" for kappa in kappas])
        axes.set_yticks(range(len(quantiles)), [f"{quantile:g}" for quantile in quantiles])
        axes.set(xlabel="kappa: sharpness of the gate", ylabel="quantile q")
        axes.set_title("$A_T$ over the gate's parameters")
        _colour_bar(figure, image, axes, fraction=0.05, format="%.1f")
    return figure
