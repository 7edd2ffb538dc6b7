# SPDX-License-Identifier: Apache-2.0
"""The history of a model as a picture.

It is drawn anew at every update, so it is drawn with Pillow, which is loaded anyway: loading matplotlib takes half a
second, a quarter of what it takes to learn one more class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from onea.metrics import wilson_interval
from onea.model.state import Update
from onea.presentation.style import GRID, INK, MUTED, PALETTE

MOST = 60  # updates that are shown, the newest
SIZE = (1184, 672)
_FINER = 2  # drawn larger and made smaller: Pillow draws edges as steps
_LEFT, _RIGHT, _HEIGHT = 70, 1164, 246  # of both panels
_TOPS = 56, 362
_TEXT, _DOT, _LINE = 19, 7, 3
_TICKS, _FEWEST = 5, 4  # lines of a scale; updates for which there is room at least


class _Measure(NamedTuple):
    """An accuracy on held-out images: its fields in an update, its place beside the middle of a step, and its look."""

    accuracy: str
    images: str
    beside: float
    colour: str
    name: str


_MEASURES = (
    _Measure("held_out_accuracy", "held_out", -0.12, PALETTE[2], "of the update"),
    _Measure("overall_accuracy", "overall_images", 0.12, PALETTE[1], "of all classes"),
)


def history_picture(updates: Sequence[Update]) -> bytes:
    """Two panels over the updates, as PNG: classes that arrived and classes known; held-out images that are correct."""
    shown = updates[-MOST:]
    sheet = _Sheet(max(len(shown), _FEWEST))
    _classes(sheet, shown)
    _held_out(sheet, shown)
    for step, update in enumerate(shown):
        if len(shown) <= 20 or step % 5 == 0:
            sheet.text((sheet.across(step), _TOPS[1] + _HEIGHT + 8), str(update["version"]), "ma")
    sheet.text(((_LEFT + _RIGHT) / 2, SIZE[1] - 30), "version", "ma")
    return sheet.png()


def _classes(sheet: _Sheet, updates: Sequence[Update]) -> None:
    panel = _Panel(_TOPS[0], ticks(max((update["known"] for update in updates), default=0)))
    sheet.frame(panel, "classes", [("new", PALETTE[0]), ("known", PALETTE[1])])
    for step, update in enumerate(updates):
        if update.get("new_classes"):
            corners = (sheet.across(step - 0.4), panel.down(update["new_classes"]), sheet.across(step + 0.4))
            sheet.rectangle((*corners, panel.down(0)), PALETTE[0])
    points = [(sheet.across(step), panel.down(update["known"])) for step, update in enumerate(updates)]
    sheet.line(points, PALETTE[1])
    for point in points:
        sheet.dot(point, PALETTE[1])


def _held_out(sheet: _Sheet, updates: Sequence[Update]) -> None:
    panel = _Panel(_TOPS[1], range(0, 101, 20))
    shown = [each for each in _MEASURES if any(update.get(each.accuracy) is not None for update in updates)]
    sheet.frame(panel, "held-out accuracy, %", [(each.name, each.colour) for each in shown])
    for each in shown:
        for step, update in enumerate(updates):
            accuracy = update.get(each.accuracy)
            if accuracy is None:
                continue
            # Dots with their intervals: of few photos, a line between two of them says nothing.
            low, high = wilson_interval(round(accuracy * update[each.images]), update[each.images])
            place = sheet.across(step + each.beside)
            sheet.line([(place, panel.down(100 * low)), (place, panel.down(100 * high))], each.colour)
            sheet.dot((place, panel.down(100 * accuracy)), each.colour)


def ticks(most: int) -> range:
    """Round numbers from zero to at least the largest one, a handful of them.

    >>> [list(ticks(most)) for most in (0, 3, 21)]
    [[0, 1], [0, 1, 2, 3], [0, 5, 10, 15, 20, 25]]
    """
    rough = max(most, 1) / _TICKS
    magnitude = 10 ** max(0, math.floor(math.log10(rough)))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    return range(0, step * math.ceil(max(most, 1) / step) + 1, step)


@dataclass(frozen=True)
class _Panel:
    """A part of the sheet with a scale of its own.

    Attributes:
        top: where it begins.
        ticks: of its scale, from zero.
    """

    top: float
    ticks: range

    def down(self, value: float) -> float:
        """Where a value stands."""
        return self.top + _HEIGHT * (1 - value / self.ticks[-1])


class _Sheet:
    """White paper, in pixels of the finished picture."""

    def __init__(self, steps: int):
        self._image = Image.new("RGB", (SIZE[0] * _FINER, SIZE[1] * _FINER), "white")
        self._draw = ImageDraw.Draw(self._image)
        self._font = ImageFont.load_default(_TEXT * _FINER)
        self._step = (_RIGHT - _LEFT) / steps
        self._radius = min(_DOT, 0.28 * self._step)  # dots of neighbours stay apart

    def across(self, step: float) -> float:
        """Where an update stands, counted from zero."""
        return _LEFT + (step + 0.5) * self._step

    def frame(self, panel: _Panel, title: str, names: Sequence[tuple[str, str]]) -> None:
        """The axes of a panel with its scale, and above it what it shows, in which colours."""
        for tick in panel.ticks:
            self.line([(_LEFT, panel.down(tick)), (_RIGHT, panel.down(tick))], GRID if tick else MUTED, 1)
            self.text((_LEFT - 10, panel.down(tick)), str(tick), "rm")
        middle, place = panel.top - 26, _LEFT + 4.0
        place += self.text((place, middle), title, "lm") + 34
        for name, colour in names:
            self.dot((place, middle), colour)
            place += 16 + self.text((place + 16, middle), name, "lm") + 34

    def text(self, place: tuple[float, float], words: str, anchor: str) -> float:
        """Write something, and tell how wide it is."""
        self._draw.text(_finer(place), words, INK, self._font, anchor)
        return self._draw.textlength(words, self._font) / _FINER

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: int = _LINE) -> None:
        """Draw a line through points."""
        if len(points) > 1:
            self._draw.line([_finer(point) for point in points], colour, width * _FINER, joint="curve")

    def dot(self, point: tuple[float, float], colour: str) -> None:
        """Draw a dot around a point."""
        self._draw.circle(_finer(point), self._radius * _FINER, colour)

    def rectangle(self, corners: tuple[float, float, float, float], colour: str) -> None:
        """Fill a rectangle: left, top, right, bottom."""
        left, top, right, bottom = corners
        self._draw.rectangle([_finer((left, top)), _finer((right, bottom))], colour)

    def png(self) -> bytes:
        """The finished picture."""
        content = BytesIO()
        self._image.reduce(_FINER).save(content, "PNG")
        return content.getvalue()


def _finer(point: tuple[float, float]) -> tuple[float, float]:
    return point[0] * _FINER, point[1] * _FINER
