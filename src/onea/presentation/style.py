# SPDX-License-Identifier: Apache-2.0
"""The common style of figures: sizes, colours for colour-blind readers, and saving."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onea.files import write_atomically

if TYPE_CHECKING:  # matplotlib is slow to import, so functions import it when needed
    from matplotlib.figure import Figure

DPI = 160
INK = "#222222"
MUTED = "#6b6b6b"
GRID = "#e3e3e3"

# Okabe and Ito's palette without its yellow, which is too pale on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")

TITLE_SIZE = 11
LABEL_SIZE = 9.5
TICK_SIZE = 8.5

RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": LABEL_SIZE,
    "text.color": INK,
    "axes.titlesize": TITLE_SIZE,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": LABEL_SIZE,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "figure.constrained_layout.use": False,
    "figure.autolayout": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.labelsize": TICK_SIZE,
    "ytick.labelsize": TICK_SIZE,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": TICK_SIZE,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


@contextmanager
def theme() -> Iterator[None]:
    """Use this style while a figure is built, and restore the caller's settings afterwards."""
    import matplotlib

    with matplotlib.rc_context(RC), warnings.catch_warnings():
        # Characters that the font lacks become boxes; the tables have these names in full.
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure with this size in inches and automatic layout, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    FigureCanvasAgg(figure)
    return figure


def shades(count: int) -> list[tuple[float, float, float, float]]:
    """Colours from dark to light along viridis, whose order is visible without colour vision and in print."""
    from matplotlib import colormaps

    lightest = 0.88  # the yellow end is too pale on white
    colours = [colormaps["viridis"](lightest * i / max(count - 1, 1)) for i in range(count)]
    return [(float(r), float(g), float(b), float(a)) for r, g, b, a in colours]


def tint(colour: str, strength: float) -> tuple[float, float, float]:
    """A colour mixed with white: strength 1 is the colour, 0 is white. Unlike transparency, it hides the grid.

    >>> tint("#000000", 0.25)
    (0.75, 0.75, 0.75)
    """
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(colour))
    return red, green, blue


def blues() -> Any:
    """A colour map from white to dark blue; NaN is grey."""
    from matplotlib.colors import LinearSegmentedColormap

    stops: list[Any] = ["#ffffff", tint(PALETTE[0], 0.45), "#00466e"]
    return LinearSegmentedColormap.from_list("onea", stops).with_extremes(bad="#f1f1f1")


def tick_positions(count: int, max_ticks: int) -> list[int]:
    """About ``max_ticks`` tick positions from 1 to ``count``: both ends and round numbers in between.

    >>> tick_positions(40, 9)
    [1, 5, 10, 15, 20, 25, 30, 35, 40]
    >>> tick_positions(200, 5)
    [1, 50, 100, 150, 200]
    """
    step = next(s * 10**e for e in range(9) for s in (1, 2, 5) if count / (s * 10**e) <= max_ticks)
    between = [n for n in range(step, count, step) if n - 1 > step / 2 and count - n > step / 2]
    return sorted({1, *between, count})


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG atomically."""
    content = BytesIO()
    with theme():
        figure.savefig(content, format="png", dpi=DPI, bbox_inches="tight", pad_inches=0.1)
    write_atomically(path, content.getvalue())
    return path
