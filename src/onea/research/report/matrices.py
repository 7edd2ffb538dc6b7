# SPDX-License-Identifier: Apache-2.0
"""Pictures of accuracy matrices: which task lost how much when."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from onea.presentation import style
from onea.research.record import Record
from onea.research.report.curves import LETTER, MOST_NAMES, NARROW, WIDTH, short, task_names
from onea.research.report.tables import labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CELLS = 12  # tasks; beyond, the matrix has no room for numbers


def accuracy_matrix(record: Record, width: float = 7.4) -> Figure:
    """How well each task (row) is recognised after each step (column), among all classes seen by then."""
    matrix = record["metrics"]["matrix"]
    steps = len(matrix)
    with style.themed():
        figure = style.blank(width, min(1.6 + 0.42 * steps, 0.9 * width) if steps > 1 else 2.4)
        axes = figure.subplots()
        image = axes.imshow(filled(matrix), cmap=style.blues(), vmin=0, vmax=100, aspect="auto")
        if steps <= MOST_CELLS:
            _write_cells(axes, matrix, 7.0 if width < NARROW else 8.5)
        _matrix_axes(axes, record, steps, width)
        if steps > MOST_CELLS:
            bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, aspect=30, format="%d %%")
            bar.outline.set_visible(False)
            bar.ax.tick_params(length=0)
    return figure


def matrix_panels(records: Sequence[Record], width: float = WIDTH) -> Figure:
    """Percent right of each task (row) after each task (column): a panel for each record, all in one scale."""
    across = min(len(records), 1 if width < NARROW else 3)
    down = -(-len(records) // across)
    each = min(width / across, 3.6)
    with style.themed():
        figure = style.blank(width, 0.5 + 0.95 * each * down)
        panels = figure.subplots(down, across, squeeze=False).flatten()
        for axes, record in zip(panels, records, strict=False):
            matrix = record["metrics"]["matrix"]
            steps = len(matrix)
            image = axes.imshow(filled(matrix), cmap=style.blues(), vmin=0, vmax=100)
            ticks = style.round_numbers(steps, 6)
            axes.set_xticks([t - 1 for t in ticks], [str(t) for t in ticks])
            axes.set_yticks([t - 1 for t in ticks], [str(t) for t in ticks])
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            name = str(record.get("title") or record["config"]["method"])
            lines = wrap(name, int((each - 0.5) / LETTER / 1.25), max_lines=3, placeholder=" …")
            axes.set_title("\n".join(lines), parse_math=False, fontsize=9.5)
        for axes in panels[len(records) :]:
            axes.set_axis_off()
        figure.supxlabel("after learning task", fontsize=style.LABEL_SIZE)
        figure.supylabel("test images of task", fontsize=style.LABEL_SIZE)
        bar = figure.colorbar(image, ax=panels, fraction=0.03, pad=0.02, aspect=30, format="%d %%")
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
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
    axes.tick_params(length=0)
    axes.set_title(f"{labels([record])[0]}: % right of each task", parse_math=False)
    axes.spines[:].set_visible(False)
    if steps <= MOST_CELLS:
        axes.set_xticks([t + 0.5 for t in range(steps - 1)], minor=True)
        axes.set_yticks([t + 0.5 for t in range(steps - 1)], minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)
