# SPDX-License-Identifier: Apache-2.0
"""Figures: confusion matrix, open-set recognition, learning curves, and photos that may be mislabelled."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onea.data.dataset import Pixels
from onea.model.evaluation.check import SHARES, Advice, Check, ClassCheck, Suspect
from onea.model.evaluation.confusions import GOOD_ACCURACY
from onea.model.evaluation.evaluation import Evaluation
from onea.model.evaluation.metrics import OpenSet
from onea.presentation import style
from onea.presentation.style import blues, tick_positions
from onea.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_NAMES, _MAX_NAME_LENGTH = 100, 32  # with more classes, the axes have numbers


def confusion_picture(evaluation: Evaluation) -> Figure:
    """The confusion matrix: per cent of the images of each class (row) by predicted class (column)."""
    from matplotlib.colors import PowerNorm

    count = len(evaluation.classes)
    share = 100 * evaluation.confusion / np.maximum(1, evaluation.confusion.sum(1) + evaluation.unknown_counts)[:, None]
    side = min(16.0, max(4.6, 2.2 + 0.16 * count))
    with style.theme():
        figure = style.new_figure(side, side)
        axes = figure.subplots()
        image = axes.imshow(
            share, cmap=blues(), norm=PowerNorm(0.5, 0, 100)
        )  # a linear scale would hide single mistakes
        if count <= _MAX_NAMES:
            names = [_shorten(name, _MAX_NAME_LENGTH) for name in evaluation.classes]
            size = style.TICK_SIZE if count <= 30 else 6.0
            axes.set_xticks(range(count), names, rotation=90, fontsize=size, parse_math=False)
            axes.set_yticks(range(count), names, fontsize=size, parse_math=False)
        else:
            shown = tick_positions(count, 9)
            for setter in (axes.set_xticks, axes.set_yticks):
                setter([n - 1 for n in shown], [str(n) for n in shown])
        if count <= 12:
            for i, j in np.argwhere(evaluation.confusion):
                ink = "white" if share[i, j] > 40 else style.INK
                axes.text(j, i, str(evaluation.confusion[i, j]), ha="center", va="center", color=ink, fontsize=8)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        axes.tick_params(length=0)
        axes.spines[:].set_color(style.GRID)
        axes.spines[:].set_visible(True)
        axes.set_title(f"{100 * evaluation.accuracy:.1f} % of {evaluation.images:,} images correct")
        bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, aspect=30, format="%d %%")
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
    return figure


_WIDTH, _HEIGHT = 4.6, 7.2  # inches; narrow enough for a phone and for a printed column
_KNOWN, _UNKNOWN = style.PALETTE[0], style.PALETTE[1]
_MAX_BINS = 30
_TAIL = 0.5  # per cent of the images at either end, which are counted in the outermost bins
_MAX_DISTANCE = 2  # below the known images, in multiples of their range; lower values are in the outermost bin
_HEADROOM = 1.45  # of the highest bar: room for the legend


def open_set_picture(results: OpenSet) -> Figure:
    """Histograms of the familiarity of known and unknown images, and the open-set curve with the model's threshold."""
    with style.theme():
        figure = style.new_figure(_WIDTH, _HEIGHT)
        above, below = figure.subplots(2, 1, height_ratios=(1, 1.25))
        _histograms(above, results)
        _open_set_curve(below, results)
    return figure


def _histograms(axes: Any, results: OpenSet) -> None:
    values = [part.double().numpy() for part in (results.known, results.unknown)]
    edges = _edges(*values)
    shares = [100 * np.histogram(part.clip(edges[0], edges[-1]), edges)[0] / len(part) for part in values]
    names = [f"{name} ({len(part):,})" for name, part in zip(("known", "unknown"), values, strict=True)]
    axes.stairs(shares[0], edges, fill=True, color=style.tint(_KNOWN, 0.45), label=names[0])
    axes.stairs(shares[1], edges, color=_UNKNOWN, linewidth=2, label=names[1])
    if results.has_threshold:
        line = {"color": style.INK, "linestyle": "--", "linewidth": 1.2}
        threshold = np.clip(results.threshold, edges[0], edges[-1])
        axes.axvline(threshold, ymax=1 / _HEADROOM, label="the model's threshold", **line)
    axes.set_ylim(0, _HEADROOM * max(map(np.max, shares)))
    axes.locator_params(axis="y", nbins=5, integer=True)
    axes.set_xlabel("familiarity (outliers are in the outermost bars)")
    axes.set_ylabel("% of the images")
    axes.set_title(f"Familiarity: AUROC {100 * results.auroc:.1f} %")
    axes.legend(loc="upper left", ncols=2)


def _edges(known: npt.NDArray[np.float64], unknown: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Edges of the bins; both histograms stay visible, even if the familiarity of unknown images is very low."""
    both = np.concatenate([known, unknown])
    low, high = np.percentile(both, [_TAIL, 100 - _TAIL])
    lowest, highest = np.percentile(known, [_TAIL, 100 - _TAIL])
    if highest > lowest:
        low = max(low, lowest - _MAX_DISTANCE * (highest - lowest))
    bins = min(_MAX_BINS, 8 + 2 * int(min(len(known), len(unknown)) ** 0.5))  # fewer bins for few images
    return np.linspace(low, high if high > low else low + 1, bins + 1)


def _open_set_curve(axes: Any, results: OpenSet) -> None:
    curve = results.curve
    fpr, ccr = 100 * curve.fpr.numpy(), 100 * curve.ccr.numpy()
    axes.fill_between(fpr, ccr, color=_KNOWN, alpha=0.12, linewidth=0)
    axes.plot(fpr, ccr, color=_KNOWN, linewidth=2.2, clip_on=False)
    if results.has_threshold:
        accepted, accuracy = 100 * (1 - results.unknown_rejected), 100 * results.accuracy
        label = f"the model's threshold: {accuracy:.1f} % correct,\n{100 - accepted:.1f} % of unknown images rejected"
        marker = {"color": style.INK, "markersize": 9, "markeredgecolor": "white"}
        axes.plot([accepted], [accuracy], "o", label=label, clip_on=False, zorder=3, **marker)
        axes.legend(loc="lower right", handletextpad=0.3)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100)
    axes.grid()
    axes.set_xlabel("% of unknown images accepted as known")
    axes.set_ylabel("% of known images correct")
    axes.set_title(f"Open-set accuracy: area {100 * curve.area:.1f} %")


MAX_CURVES, MAX_PHOTOS = 16, 24
PHOTO_SIDE = 224  # pixels of a photo on the sheet
_COLUMNS, _PHOTO_COLUMNS = 4, 6
_COLOURS: dict[Advice, str] = {
    "few photos": style.PALETTE[3],
    "more photos would help": style.PALETTE[0],
    "too similar to another class": style.PALETTE[1],
    "taught enough": style.PALETTE[2],
}


def curves_picture(check: Check) -> Figure | None:
    """Learning curves of the classes with the most urgent advice; None if no class has one."""
    measured = [result for result in check.classes if result.curve]
    shown = measured[:MAX_CURVES]
    if not shown:
        return None
    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    with style.theme():
        figure = style.new_figure(max(4.4, 2.5 * columns), 0.9 + 2.05 * rows)
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes in panels.flat[len(shown) :]:
            axes.set_visible(False)
        for number, (axes, result) in enumerate(zip(panels.flat, shown, strict=False)):
            _learning_curve(axes, result)
            if number + columns >= len(shown):
                axes.tick_params(labelbottom=True)
        figure.supxlabel("% of the class's photos used", fontsize=style.LABEL_SIZE)
        figure.supylabel("% of its held-out photos correct", fontsize=style.LABEL_SIZE)
        title = "Learning curves" if shown == measured else f"Learning curves: the {len(shown)} most urgent classes"
        figure.suptitle(title, x=0.01, ha="left", fontsize=style.TITLE_SIZE, fontweight="bold")
    return figure


def suspects_picture(suspects: Sequence[Suspect], photos: Pixels) -> Figure | None:
    """The photos ``uint8 [N, 3, side, side]`` of suspects, each with its label and the likelier class."""
    if not suspects:
        return None
    columns = min(_PHOTO_COLUMNS, len(suspects))
    rows = -(-len(suspects) // columns)
    with style.theme():
        figure = style.new_figure(max(4.0, 1.95 * columns), 0.5 + 2.7 * rows)
        panels = figure.subplots(rows, columns, squeeze=False)
        for axes in panels.flat:
            axes.axis("off")
        for rank, (axes, suspect, photo) in enumerate(zip(panels.flat, suspects, photos, strict=False), 1):
            axes.imshow(photo.transpose(1, 2, 0))
            axes.set_title(f"{rank}. suspicion {suspect.ratio:.1f}", fontsize=8, fontweight="normal", pad=4)
            label, likelier = _wrap(f"labelled {suspect.given}"), _wrap(f"looks like {suspect.likelier}")
            _caption(axes, 0, label, style.PALETTE[1])
            _caption(axes, len(label), likelier, style.PALETTE[0])
        title = "Photos that may be mislabelled, the most suspicious first"
        figure.suptitle(title, x=0.01, ha="left", fontsize=style.TITLE_SIZE, fontweight="bold")
    return figure


def _learning_curve(axes: Any, result: ClassCheck) -> None:
    assert result.curve
    colour = _COLOURS[result.advice]
    shares, accuracies = [100 * value for value in SHARES], [100 * value for value in result.curve]
    axes.axhline(100 * GOOD_ACCURACY, color=style.MUTED, linewidth=0.8, linestyle=(0, (2, 3)))
    axes.plot(shares, accuracies, color=colour, marker="o", markersize=4, linewidth=1.8, clip_on=False)
    above = accuracies[-1] < 80
    axes.annotate(
        f"{accuracies[-1]:.0f}",
        (shares[-1], accuracies[-1]),
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
    axes.set_xticks(shares, [f"{value:.0f}" for value in shares])
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.grid(axis="y")
    axes.tick_params(length=0)
    axes.set_title(f"{_shorten(result.name, 27)}\n", fontsize=8.5, parse_math=False, pad=4)
    axes.text(0, 1.03, f"{result.photos} photos: {result.advice}", transform=axes.transAxes, fontsize=7.5, color=colour)


def _wrap(text: str) -> list[str]:
    """Wrap a text to at most two lines, to stand under a photo; names break after hyphens."""
    lines = textwrap.wrap(printable(text), 27)
    return lines if len(lines) < 3 else [lines[0], _shorten("".join(lines[1:]), 27)]


def _caption(axes: Any, first: int, lines: Sequence[str], colour: str) -> None:
    """Write lines under a photo; ``first`` is the number of the first one, from 0."""
    position = {
        "xy": (0, 0),
        "xycoords": "axes fraction",
        "xytext": (0, -4 - 10 * first),
        "textcoords": "offset points",
    }
    axes.annotate(
        "\n".join(lines), **position, fontsize=7.5, color=colour, va="top", linespacing=1.15, parse_math=False
    )


def _shorten(name: str, max_length: int) -> str:
    name = printable(name)
    return name if len(name) <= max_length else name[: max_length - 1] + "…"
