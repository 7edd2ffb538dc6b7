# SPDX-License-Identifier: Apache-2.0
"""The history of a model as a picture.

It is drawn after every update, with Pillow, because importing matplotlib takes half a second: a quarter of the time to
learn one more class.
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

MAX_UPDATES = 60  # the newest updates are shown
SIZE = (1184, 672)
_SCALE = 2  # drawn larger and reduced for antialiasing
_LEFT, _RIGHT, _HEIGHT = 70, 1164, 246  # of both panels
_TOPS = 56, 362
_TEXT, _DOT, _LINE = 19, 7, 3
_TICKS, _MIN_STEPS = 5, 4  # about this number of lines on a scale; room for at least this number of updates


class _Measure(NamedTuple):
    """An accuracy on held-out images: its fields in an update, and its horizontal offset, colour and name."""

    accuracy: str
    images: str
    offset: float
    colour: str
    name: str


_MEASURES = (
    _Measure("held_out_accuracy", "held_out", -0.12, PALETTE[2], "of the update"),
    _Measure("overall_accuracy", "overall_images", 0.12, PALETTE[1], "of all classes"),
)


def history_picture(updates: Sequence[Update]) -> bytes:
    """A PNG with two panels over the updates: new and known classes; held-out accuracy."""
    shown = updates[-MAX_UPDATES:]
    canvas = _Canvas(max(len(shown), _MIN_STEPS))
    _draw_classes(canvas, shown)
    _draw_accuracies(canvas, shown)
    for step, update in enumerate(shown):
        if len(shown) <= 20 or step % 5 == 0:
            canvas.text((canvas.x(step), _TOPS[1] + _HEIGHT + 8), str(update["version"]), "ma")
    canvas.text(((_LEFT + _RIGHT) / 2, SIZE[1] - 30), "version", "ma")
    return canvas.png()


def _draw_classes(canvas: _Canvas, updates: Sequence[Update]) -> None:
    panel = _Panel(_TOPS[0], ticks(max((update["known"] for update in updates), default=0)))
    canvas.frame(panel, "classes", [("new", PALETTE[0]), ("known", PALETTE[1])])
    for step, update in enumerate(updates):
        if update.get("new_classes"):
            corners = (canvas.x(step - 0.4), panel.y(update["new_classes"]), canvas.x(step + 0.4))
            canvas.rectangle((*corners, panel.y(0)), PALETTE[0])
    points = [(canvas.x(step), panel.y(update["known"])) for step, update in enumerate(updates)]
    canvas.line(points, PALETTE[1])
    for point in points:
        canvas.dot(point, PALETTE[1])


def _draw_accuracies(canvas: _Canvas, updates: Sequence[Update]) -> None:
    panel = _Panel(_TOPS[1], range(0, 101, 20))
    shown = [measure for measure in _MEASURES if any(update.get(measure.accuracy) is not None for update in updates)]
    canvas.frame(panel, "held-out accuracy, %", [(measure.name, measure.colour) for measure in shown])
    for measure in shown:
        for step, update in enumerate(updates):
            accuracy = update.get(measure.accuracy)
            if accuracy is None:
                continue
            # Dots with confidence intervals; between accuracies on few photos, lines would mislead.
            low, high = wilson_interval(round(accuracy * update[measure.images]), update[measure.images])
            x = canvas.x(step + measure.offset)
            canvas.line([(x, panel.y(100 * low)), (x, panel.y(100 * high))], measure.colour)
            canvas.dot((x, panel.y(100 * accuracy)), measure.colour)


def ticks(maximum: int) -> range:
    """A few round numbers from zero to at least ``maximum``.

    >>> [list(ticks(maximum)) for maximum in (0, 3, 21)]
    [[0, 1], [0, 1, 2, 3], [0, 5, 10, 15, 20, 25]]
    """
    min_step = max(maximum, 1) / _TICKS
    magnitude = 10 ** max(0, math.floor(math.log10(min_step)))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= min_step)
    return range(0, step * math.ceil(max(maximum, 1) / step) + 1, step)


@dataclass(frozen=True)
class _Panel:
    """A panel with its vertical scale.

    Attributes:
        top: in pixels.
        ticks: ticks of the scale, from zero.
    """

    top: float
    ticks: range

    def y(self, value: float) -> float:
        """The vertical position of a value."""
        return self.top + _HEIGHT * (1 - value / self.ticks[-1])


class _Canvas:
    """A canvas with coordinates in pixels of the finished picture."""

    def __init__(self, steps: int):
        self._image = Image.new("RGB", (SIZE[0] * _SCALE, SIZE[1] * _SCALE), "white")
        self._draw = ImageDraw.Draw(self._image)
        self._font = ImageFont.load_default(_TEXT * _SCALE)
        self._step = (_RIGHT - _LEFT) / steps
        self._radius = min(_DOT, 0.28 * self._step)  # so that neighbouring dots do not touch

    def x(self, step: float) -> float:
        """The horizontal position of an update, counted from zero."""
        return _LEFT + (step + 0.5) * self._step

    def frame(self, panel: _Panel, title: str, names: Sequence[tuple[str, str]]) -> None:
        """Draw the scale of a panel, its title and its legend."""
        for tick in panel.ticks:
            self.line([(_LEFT, panel.y(tick)), (_RIGHT, panel.y(tick))], GRID if tick else MUTED, 1)
            self.text((_LEFT - 10, panel.y(tick)), str(tick), "rm")
        x, y = _LEFT + 4.0, panel.top - 26
        x += self.text((x, y), title, "lm") + 34
        for name, colour in names:
            self.dot((x, y), colour)
            x += 16 + self.text((x + 16, y), name, "lm") + 34

    def text(self, point: tuple[float, float], text: str, anchor: str) -> float:
        """Draw a text; return its width."""
        self._draw.text(_scaled(point), text, INK, self._font, anchor)
        return self._draw.textlength(text, self._font) / _SCALE

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: int = _LINE) -> None:
        """Draw a line through points."""
        if len(points) > 1:
            self._draw.line([_scaled(point) for point in points], colour, width * _SCALE, joint="curve")

    def dot(self, point: tuple[float, float], colour: str) -> None:
        """Draw a dot around a point."""
        self._draw.circle(_scaled(point), self._radius * _SCALE, colour)

    def rectangle(self, corners: tuple[float, float, float, float], colour: str) -> None:
        """Fill a rectangle: left, top, right, bottom."""
        left, top, right, bottom = corners
        self._draw.rectangle([_scaled((left, top)), _scaled((right, bottom))], colour)

    def png(self) -> bytes:
        """The finished picture."""
        content = BytesIO()
        self._image.reduce(_SCALE).save(content, "PNG")
        return content.getvalue()


def _scaled(point: tuple[float, float]) -> tuple[float, float]:
    return point[0] * _SCALE, point[1] * _SCALE
