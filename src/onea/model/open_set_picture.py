# SPDX-License-Identifier: Apache-2.0
"""The picture of an evaluation with unknown images: how familiar they look, and what each threshold would give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onea.model.open_set import OpenSet
from onea.presentation import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 4.6, 7.2  # inches; narrow, so that its letters can be read on a phone and in a column of print
_KNOWN, _UNKNOWN = style.PALETTE[0], style.PALETTE[1]
_MOST_BINS = 30
_TAIL = 0.5  # percent of the images at either end, which share the outermost bins
_REACH = 2  # times the width of the known images: unknown ones that lie farther off share the outermost bin too
_HEADROOM = 1.45  # of the highest bar: room for the legend


def open_set_picture(found: OpenSet) -> Figure:
    """Above, how familiar known and unknown images look; below, the open-set curve with the model's own threshold."""
    with style.themed():
        figure = style.blank(_WIDTH, _HEIGHT)
        above, below = figure.subplots(2, 1, height_ratios=(1, 1.25))
        _histograms(above, found)
        _curve(below, found)
    return figure


def _histograms(axes: Any, found: OpenSet) -> None:
    sides = [side.double().numpy() for side in (found.known, found.unknown)]
    edges = _edges(*sides)
    shares = [100 * np.histogram(side.clip(edges[0], edges[-1]), edges)[0] / len(side) for side in sides]
    names = [f"{name} ({len(side):,})" for name, side in zip(("known", "unknown"), sides, strict=True)]
    axes.stairs(shares[0], edges, fill=True, color=style.tint(_KNOWN, 0.45), label=names[0])
    axes.stairs(shares[1], edges, color=_UNKNOWN, linewidth=2, label=names[1])
    if found.answers_unknown:
        look = {"color": style.INK, "linestyle": "--", "linewidth": 1.2}
        threshold = np.clip(found.threshold, edges[0], edges[-1])
        axes.axvline(threshold, ymax=1 / _HEADROOM, label="the model's threshold", **look)
    axes.set_ylim(0, _HEADROOM * max(map(np.max, shares)))
    axes.locator_params(axis="y", nbins=5, integer=True)
    axes.set_xlabel("familiarity (what lies beyond is in the outermost bars)")
    axes.set_ylabel("% of the images")
    axes.set_title(f"How familiar images look: AUROC {100 * found.auroc:.1f} %")
    axes.legend(loc="upper left", ncols=2)


def _edges(known: npt.NDArray[np.float64], unknown: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Edges of bins in which both sides can be seen, however far apart they lie."""
    both = np.concatenate([known, unknown])
    low, high = np.percentile(both, [_TAIL, 100 - _TAIL])
    lowest, highest = np.percentile(known, [_TAIL, 100 - _TAIL])
    if highest > lowest:
        low = max(low, lowest - _REACH * (highest - lowest))
    bins = min(_MOST_BINS, 8 + 2 * int(min(len(known), len(unknown)) ** 0.5))  # of few images many would be a comb
    return np.linspace(low, high if high > low else low + 1, bins + 1)


def _curve(axes: Any, found: OpenSet) -> None:
    curve = found.curve
    positives, correct = (100 * line.numpy() for line in (curve.false_positives, curve.correct))
    axes.fill_between(positives, correct, color=_KNOWN, alpha=0.12, linewidth=0)
    axes.plot(positives, correct, color=_KNOWN, linewidth=2.2, clip_on=False)
    if found.answers_unknown:
        taken, accuracy = 100 * (1 - found.caught), 100 * found.correct
        told = f"the model's threshold: {accuracy:.1f} % correct,\n{100 - taken:.1f} % of unknown images caught"
        look = {"color": style.INK, "markersize": 9, "markeredgecolor": "white"}
        axes.plot([taken], [accuracy], "o", label=told, clip_on=False, zorder=3, **look)
        axes.legend(loc="lower right", handletextpad=0.3)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100)
    axes.grid()
    axes.set_xlabel("% of unknown images taken for known")
    axes.set_ylabel("% of known images correct")
    axes.set_title(f"Open-set accuracy: area {100 * curve.area:.1f} %")
