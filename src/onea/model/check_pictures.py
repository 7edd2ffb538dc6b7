# SPDX-License-Identifier: Apache-2.0
"""Pictures of a check: learning curves of the neediest classes, and a sheet of the most suspicious photos."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onea.data.dataset import Pixels
from onea.model.check import Advice, Check, ClassCheck, Suspect
from onea.model.learning_curve import SHARES
from onea.model.mistakes import GOOD
from onea.presentation import style
from onea.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    with style.themed():
        figure = style.blank(max(4.4, 2.5 * columns), 0.9 + 2.05 * lines)
        places = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        for axes in places.flat[len(shown) :]:
            axes.set_visible(False)
        for number, (axes, one) in enumerate(zip(places.flat, shown, strict=False)):
            _curve(axes, one)
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
    with style.themed():
        figure = style.blank(max(4.0, 1.95 * columns), 0.5 + 2.7 * lines)
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


def _curve(axes: Any, one: ClassCheck) -> None:
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
