# SPDX-License-Identifier: Apache-2.0
"""The picture of an evaluation: which class is taken for which."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onea.data.dataset import Pixels
from onea.model.evaluation.check import SHARES, Advice, Check, ClassCheck, Suspect
from onea.model.evaluation.confusions import GOOD
from onea.model.evaluation.evaluation import Evaluation
from onea.model.evaluation.metrics import OpenSet
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
    with style.theme():
        figure = style.new_figure(side, side)
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


_WIDTH, _HEIGHT = 4.6, 7.2  # inches; narrow, so that its letters can be read on a phone and in a column of print
_KNOWN, _UNKNOWN = style.PALETTE[0], style.PALETTE[1]
_MOST_BINS = 30
_TAIL = 0.5  # percent of the images at either end, which share the outermost bins
_REACH = 2  # times the width of the known images: unknown ones that lie farther off share the outermost bin too
_HEADROOM = 1.45  # of the highest bar: room for the legend


def open_set_picture(found: OpenSet) -> Figure:
    """Above, how familiar known and unknown images look; below, the open-set curve with the model's own threshold."""
    with style.theme():
        figure = style.new_figure(_WIDTH, _HEIGHT)
        above, below = figure.subplots(2, 1, height_ratios=(1, 1.25))
        _histograms(above, found)
        _open_set_curve(below, found)
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


def _open_set_curve(axes: Any, found: OpenSet) -> None:
    curve = found.curve
    positives, correct = (100 * line.numpy() for line in (curve.fpr, curve.ccr))
    axes.fill_between(positives, correct, color=_KNOWN, alpha=0.12, linewidth=0)
    axes.plot(positives, correct, color=_KNOWN, linewidth=2.2, clip_on=False)
    if found.answers_unknown:
        taken, accuracy = 100 * (1 - found.unknown_rejected), 100 * found.correct
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


MOST_CURVES, MOST_PHOTOS = 16, 24
PHOTO_SIDE = 224  # pixels of a photo on the sheet
_COLUMNS, _PHOTO_COLUMNS = 4, 6
_COLOURS: dict[Advice, str] = {
    "few photos": style.PALETTE[3],
    "more photos would help": style.PALETTE[0],
    "too like another class": style.PALETTE[1],
    "taught enough": style.PALETTE[2],
}


def curves_picture(found: Check) -> Figure | None:
    """Held-out photos that are correct by the share of a class's photos used, for the neediest classes with a curve."""
    shown = [one for one in found.classes if one.curve][:MOST_CURVES]
    if not shown:
        return None
    columns = min(_COLUMNS, len(shown))
    lines = -(-len(shown) // columns)
    with style.theme():
        figure = style.new_figure(max(4.4, 2.5 * columns), 0.9 + 2.05 * lines)
        places = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        for axes in places.flat[len(shown) :]:
            axes.set_visible(False)
        for number, (axes, one) in enumerate(zip(places.flat, shown, strict=False)):
            _learning_curve(axes, one)
            if number + columns >= len(shown):
                axes.tick_params(labelbottom=True)
        figure.supxlabel("% of the class's photos used", fontsize=style.LABEL_SIZE)
        figure.supylabel("% of its held-out photos correct", fontsize=style.LABEL_SIZE)
        rest = sum(1 for one in found.classes if one.curve) - len(shown)
        title = f"The {len(shown)} neediest classes" if rest else "Learning curves"
        figure.suptitle(title, x=0.01, ha="left", fontsize=style.TITLE_SIZE, fontweight="bold")
    return figure


def suspects_picture(suspects: Sequence[Suspect], photos: Pixels) -> Figure | None:
    """The photos ``uint8 [N, 3, side, side]`` of suspects, each with the class it was given and the likelier one."""
    if not suspects:
        return None
    columns = min(_PHOTO_COLUMNS, len(suspects))
    lines = -(-len(suspects) // columns)
    with style.theme():
        figure = style.new_figure(max(4.0, 1.95 * columns), 0.5 + 2.7 * lines)
        places = figure.subplots(lines, columns, squeeze=False)
        for axes in places.flat:
            axes.axis("off")
        for rank, (axes, one, photo) in enumerate(zip(places.flat, suspects, photos, strict=False), 1):
            axes.imshow(photo.transpose(1, 2, 0))
            axes.set_title(f"{rank}. suspicion {one.ratio:.1f}", fontsize=8, fontweight="normal", pad=4)
            given, likelier = _lines(f"named {one.given}"), _lines(f"looks like {one.likelier}")
            _under(axes, 0, given, style.PALETTE[1])
            _under(axes, len(given), likelier, style.PALETTE[0])
        title = "Photos that may have the wrong name, the most suspicious first"
        figure.suptitle(title, x=0.01, ha="left", fontsize=style.TITLE_SIZE, fontweight="bold")
    return figure


def _learning_curve(axes: Any, one: ClassCheck) -> None:
    assert one.curve
    colour = _COLOURS[one.advice]
    share, right = [100 * value for value in SHARES], [100 * value for value in one.curve]
    axes.axhline(100 * GOOD, color=style.MUTED, linewidth=0.8, linestyle=(0, (2, 3)))
    axes.plot(share, right, color=colour, marker="o", markersize=4, linewidth=1.8, clip_on=False)
    above = right[-1] < 80
    axes.annotate(
        f"{right[-1]:.0f}",
        (share[-1], right[-1]),
        (0, 6 if above else -6),
        textcoords="offset points",
        ha="center",
        va="bottom" if above else "top",
        color=colour,
        fontsize=style.TICK_SIZE,
        fontweight="bold",
    )
    axes.set_xlim(18, 107)
    axes.set_ylim(0, 102)
    axes.set_xticks(share, [f"{value:.0f}" for value in share])
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.grid(axis="y")
    axes.tick_params(length=0)
    axes.set_title(f"{_short(one.name, 27)}\n", fontsize=8.5, parse_math=False, pad=4)
    axes.text(0, 1.03, f"{one.photos} photos: {one.advice}", transform=axes.transAxes, fontsize=7.5, color=colour)


def _lines(text: str) -> list[str]:
    """A text on at most two lines that fit under a photo; a name breaks after its hyphens."""
    lines = textwrap.wrap(printable(text), 27)
    return lines if len(lines) < 3 else [lines[0], _short("".join(lines[1:]), 27)]


def _under(axes: Any, skipped: int, lines: Sequence[str], colour: str) -> None:
    """Lines under a photo, below so many others."""
    place = {"xy": (0, 0), "xycoords": "axes fraction", "xytext": (0, -4 - 10 * skipped), "textcoords": "offset points"}
    axes.annotate("\n".join(lines), **place, fontsize=7.5, color=colour, va="top", linespacing=1.15, parse_math=False)


def _short(name: str, longest: int) -> str:
    shown = printable(name)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"
