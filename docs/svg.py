# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG inside a page: text stays text, and colours are the page's, so that they follow it into the dark.

A chart is drawn twice, for a desk and for a phone, and style.css shows the one that fits: shrinking the first to the
second would make its words too small to read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import log10

WIDE, NARROW = 680, 350  # pixels that a page has for a chart
LINE = 14  # between two lines of text


class Canvas:
    """Marks in the order in which they are drawn; classes of style.css say how they look."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.height = 0.0
        self._marks: list[str] = []

    @property
    def narrow(self) -> bool:
        """Whether it is for a phone."""
        return self.width < WIDE

    def line(self, points: Sequence[tuple[float, float]], look: str = "axis") -> None:
        """A line through points."""
        self._grow(max(y for _, y in points))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._marks.append(f'<polyline class="{look}" points="{path}"/>')

    def dot(self, x: float, y: float, look: str = "", radius: float = 4, note: str = "") -> None:
        """A point; the note is shown where a mouse rests on it."""
        self._grow(y + radius)
        told = f"<title>{escape(note)}</title>" if note else ""
        self._marks.append(f'<circle class="dot {look}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{told}</circle>')

    def text(self, x: float, y: float, words: str, look: str = "", anchor: str = "start") -> None:
        """Words on their base line."""
        self._grow(y + 3)
        self._marks.append(
            f'<text class="{look}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def svg(self, label: str) -> str:
        """All of it; the label is for those who do not see it."""
        size = f'viewBox="0 0 {self.width:g} {self.height + 4:.0f}" width="{self.width:g}"'
        kind = "narrow" if self.narrow else "wide"
        return f'<svg class="chart {kind}" {size} role="img" aria-label="{escape(label)}">{"".join(self._marks)}</svg>'

    def _grow(self, y: float) -> None:
        self.height = max(self.height, y)


def figure(draw: Callable[[Canvas], None], label: str, caption: str) -> str:
    """A chart for either width, with what it shows in words."""
    drawn = []
    for width in (WIDE, NARROW):
        canvas = Canvas(width)
        draw(canvas)
        drawn.append(canvas.svg(label))
    return f'<figure class="chart" data-search-exclude>{"".join(drawn)}<figcaption>{caption}</figcaption></figure>'


def linear(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """Where a value lies between two pixels."""
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def logarithmic(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """The same where equal factors have equal lengths."""
    inside = linear(log10(low), log10(high), start, stop)
    return lambda value: inside(log10(value))


def apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels, as near as possible to where they belong, in the same order and not over each other.

    >>> apart([10, 12, 50], 10, 0, 100)
    [6.0, 16.0, 50.0]
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    blocks: list[tuple[float, list[int]]] = []  # where each block of touching labels has its middle
    for index in order:
        block = (float(places[index]), [index])
        while blocks and _first(block, gap) - _last(blocks[-1], gap) < gap:
            _, before = blocks.pop()
            inside = [*before, *block[1]]
            block = (sum(places[i] for i in inside) / len(inside), inside)
        blocks.append(block)
    found = [0.0] * len(places)
    for middle, inside in blocks:
        for number, index in enumerate(inside):
            found[index] = middle + (number - (len(inside) - 1) / 2) * gap
    shift = max(0.0, low - min(found)) if found else 0.0
    shift = shift or (min(0.0, high - max(found)) if found else 0.0)
    return [place + shift for place in found]


def _first(block: tuple[float, list[int]], gap: float) -> float:
    return block[0] - (len(block[1]) - 1) / 2 * gap


def _last(block: tuple[float, list[int]], gap: float) -> float:
    return block[0] + (len(block[1]) - 1) / 2 * gap
