# SPDX-License-Identifier: Apache-2.0
"""The picture of an evaluation: which class is taken for which."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from onea.model.evaluation import Evaluation
from onea.presentation import style
from onea.presentation.style import blues, round_numbers
from onea.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NAMES, _LONGEST = 100, 32


def confusion_picture(found: Evaluation) -> Figure:
    """Per cent of each class's images (row) that are answered with the column's class, classes in natural order."""
    from matplotlib.colors import PowerNorm

    count = len(found.classes)
    share = 100 * found.confusion / np.maximum(1, found.confusion.sum(1) + found.unknown_of)[:, None]
    side = min(16.0, max(4.6, 2.2 + 0.16 * count))
    with style.themed():
        figure = style.blank(side, side)
        axes = figure.subplots()
        image = axes.imshow(share, cmap=blues(), norm=PowerNorm(0.5, 0, 100))  # or single mistakes would be invisible
        if count <= _MOST_NAMES:
            names = [printable(name) for name in found.classes]
            names = [name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…" for name in names]
            size = style.TICK_SIZE if count <= 30 else 6.0
            axes.set_xticks(range(count), names, rotation=90, fontsize=size, parse_math=False)
            axes.set_yticks(range(count), names, fontsize=size, parse_math=False)
        else:
            shown = round_numbers(count, 9)
            for setter in (axes.set_xticks, axes.set_yticks):
                setter([n - 1 for n in shown], [str(n) for n in shown])
        if count <= 12:
            for i, j in np.argwhere(found.confusion):
                ink = "white" if share[i, j] > 40 else style.INK
                axes.text(j, i, str(found.confusion[i, j]), ha="center", va="center", color=ink, fontsize=8)
        axes.set_xlabel("answer")
        axes.set_ylabel("class of the images")
        axes.tick_params(length=0)
        axes.spines[:].set_color(style.GRID)
        axes.spines[:].set_visible(True)
        axes.set_title(f"{100 * found.accuracy:.1f} % of {found.images:,} images correct")
        bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, aspect=30, format="%d %%")
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
    return figure
