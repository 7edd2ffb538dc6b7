# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG inside a page: text stays text, and colours are the page's, so that they follow it into the dark.

A chart is drawn twice, for a desk and for a phone, and style.css shows the one that fits: shrinking the first to the
second would make its words too small to read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import hypot, log10

WIDE, NARROW = 680, 350  # pixels that a page has for a chart
PICTURE = 460  # of a picture that is one file, for both
LINE = 14  # between two lines of text
LIGHT = (
    "--ink: #1d2530; --soft: #5b6570; --line: #d5dae0; --a: #0072b2; --b: #b84d00; --c: #00795a; --rest: #98a1ab; "
    "--paper: #ffffff;"
)
DARK = (
    "--ink: #e8ebef; --soft: #aab3bf; --line: #3a4152; --a: #62b5ec; --b: #ff9d57; --c: #3fcea4; --rest: #7f8997; "
    "--paper: #1e2129;"
)
RULES = """
.drawn text { fill: var(--ink); }
.drawn text.soft, .drawn text.rest { fill: var(--soft); }
.drawn text.head { font-weight: 700; font-size: 14px; }
.drawn text.strong, .drawn text.end, .drawn text.a, .drawn text.b, .drawn text.c { font-weight: 600; }
.drawn polyline { fill: none; stroke: var(--soft); stroke-width: 1; }
.drawn .grid, .drawn .leader, .drawn .faint { stroke: var(--line); }
.drawn .bound { stroke: var(--soft); stroke-dasharray: 4 3; }
.drawn .band { stroke: var(--line); stroke-width: 9; stroke-linecap: round; }
.drawn .curve { stroke-width: 2.4; stroke-linejoin: round; }
.drawn .bar { stroke-width: 2; stroke: var(--rest); }
.drawn .column { stroke-width: 18; }
.drawn polyline.a { stroke: var(--a); } .drawn polyline.b { stroke: var(--b); } .drawn polyline.c { stroke: var(--c); }
.drawn polyline.ink { stroke: var(--ink); }
.drawn text.a, .drawn path.a { fill: var(--a); } .drawn text.b, .drawn path.b { fill: var(--b); }
.drawn text.c, .drawn path.c { fill: var(--c); } .drawn path.rest { fill: var(--rest); }
.drawn .dot { fill: var(--rest); stroke: var(--paper); stroke-width: 1; }
.drawn .dot.a { fill: var(--a); } .drawn .dot.b { fill: var(--b); } .drawn .dot.c { fill: var(--c); }
.drawn .dot.hollow { fill: var(--paper); stroke: var(--ink); stroke-width: 1.6; }
.drawn rect { fill: var(--a); stroke: none; }
.drawn rect.page { fill: var(--paper); }
.drawn rect.box { fill: none; stroke: var(--a); stroke-width: 1.4; } .drawn rect.box.b { stroke: var(--b); }
"""
_SITE = """
.md-typeset figure.chart { width: 100%; margin: 1.2em 0; display: block; }
.md-typeset figure.chart figcaption { max-width: none; font-style: normal; text-align: left; }
.md-typeset figure.chart svg { max-width: 100%; height: auto; font-size: 12px; overflow: visible; }
.md-typeset figure.chart text { paint-order: stroke; stroke: var(--paper); stroke-width: 3px; stroke-linejoin: round; }
.md-typeset figure.chart svg.narrow { display: none; }
.md-typeset figure.chart .thin { stroke: var(--rest); stroke-opacity: 0.7; }
.md-typeset figure.chart .dot.hollow.rest { stroke: var(--rest); }
@media (max-width: 38em) {
  .md-typeset figure.chart svg.wide { display: none; }
  .md-typeset figure.chart svg.narrow { display: inline; }
}
"""


def stylesheet() -> str:
    """How drawings look on the site, whose readers may switch its colours."""
    schemes = "".join(
        f'[data-md-color-scheme="{name}"] svg.drawn {{ {colours} }}\n'
        for name, colours in (("default", LIGHT), ("slate", DARK))
    )
    return schemes + RULES + _SITE


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

    def arrow(self, start: tuple[float, float], stop: tuple[float, float], look: str = "") -> None:
        """A line with a tip."""
        dx, dy = stop[0] - start[0], stop[1] - start[1]
        length = hypot(dx, dy) or 1.0
        dx, dy = 8 * dx / length, 8 * dy / length
        foot = (stop[0] - dx, stop[1] - dy)
        self.line([start, foot], f"bar {look}")
        tip = f"M{stop[0]:.1f} {stop[1]:.1f}L{foot[0] - dy / 2:.1f} {foot[1] + dx / 2:.1f}"
        self._marks.append(f'<path class="{look}" d="{tip}L{foot[0] + dy / 2:.1f} {foot[1] - dx / 2:.1f}Z"/>')

    def rect(self, x: float, y: float, width: float, height: float, look: str = "", opacity: float = 1) -> None:
        """A rectangle; its opacity may stand for a number."""
        self._grow(y + height)
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._marks.append(f'<rect class="{look}" {place} opacity="{opacity:.2f}"/>')

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
        return f'<svg class="drawn {kind}" {size} role="img" aria-label="{escape(label)}">{"".join(self._marks)}</svg>'

    def file(self, label: str) -> str:
        """The same as a file of its own, which follows the system into the dark."""
        height = self.height + 8
        size = f'width="{self.width:g}" viewBox="0 0 {self.width:g} {height:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" {size}'
        dark = f"@media (prefers-color-scheme: dark) {{ .drawn {{ {DARK} }} }}"
        style = f"<style>.drawn {{ {LIGHT} }}\n{dark}{RULES}</style>"
        page = f'<rect class="page" width="{self.width:g}" height="{height:.0f}"/>'
        words = 'role="img" font-family="system-ui, sans-serif" font-size="13"'
        marks = "\n".join(self._marks)
        return f"{head} {words}>\n<title>{escape(label)}</title>\n{style}\n{page}\n{marks}\n</svg>\n"

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
