# SPDX-License-Identifier: Apache-2.0
"""Charts as inline SVG, with text and with the light or dark colours of the page.

Each chart is drawn for desktops and for phones, and the style sheet shows one of them: a wide chart would be illegible
on a phone. The charts of the results page are made from the committed records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import hypot, log10

from results import DATA, HIGHLIGHTED, JOINT, Mean, Runs, mean, runs

from onea.research.report.curves import spread

WIDE, NARROW = 680, 350  # pixels: widths of charts for desktops and phones
PICTURE = 460  # width of picture files, for both
LINE = 14  # line height of text
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
    """The style sheet of charts on the site, for both of its colour schemes."""
    schemes = "".join(
        f'[data-md-color-scheme="{name}"] svg.drawn {{ {colours} }}\n'
        for name, colours in (("default", LIGHT), ("slate", DARK))
    )
    return schemes + RULES + _SITE


class Canvas:
    """SVG marks in drawing order; the style sheet defines their classes."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.height = 0.0
        self._marks: list[str] = []

    @property
    def narrow(self) -> bool:
        """Whether the canvas is for a phone."""
        return self.width < WIDE

    def line(self, points: Sequence[tuple[float, float]], css_class: str = "axis") -> None:
        """A line through points."""
        self._grow(max(y for _, y in points))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._marks.append(f'<polyline class="{css_class}" points="{path}"/>')

    def dot(self, x: float, y: float, css_class: str = "", radius: float = 4, note: str = "") -> None:
        """A point with a tooltip."""
        self._grow(y + radius)
        title = f"<title>{escape(note)}</title>" if note else ""
        self._marks.append(f'<circle class="dot {css_class}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{title}</circle>')

    def arrow(self, start: tuple[float, float], stop: tuple[float, float], css_class: str = "") -> None:
        """A line with a tip."""
        dx, dy = stop[0] - start[0], stop[1] - start[1]
        length = hypot(dx, dy) or 1.0
        dx, dy = 8 * dx / length, 8 * dy / length
        foot = (stop[0] - dx, stop[1] - dy)
        self.line([start, foot], f"bar {css_class}")
        tip = f"M{stop[0]:.1f} {stop[1]:.1f}L{foot[0] - dy / 2:.1f} {foot[1] + dx / 2:.1f}"
        self._marks.append(f'<path class="{css_class}" d="{tip}L{foot[0] + dy / 2:.1f} {foot[1] - dx / 2:.1f}Z"/>')

    def rect(self, x: float, y: float, width: float, height: float, css_class: str = "", opacity: float = 1) -> None:
        """A rectangle."""
        self._grow(y + height)
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._marks.append(f'<rect class="{css_class}" {place} opacity="{opacity:.2f}"/>')

    def text(self, x: float, y: float, words: str, css_class: str = "", anchor: str = "start") -> None:
        """Text, positioned by its base line."""
        self._grow(y + 3)
        self._marks.append(
            f'<text class="{css_class}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def svg(self, label: str) -> str:
        """The SVG for a page; the label is its text alternative."""
        size = f'viewBox="0 0 {self.width:g} {self.height + 4:.0f}" width="{self.width:g}"'
        kind = "narrow" if self.narrow else "wide"
        return f'<svg class="drawn {kind}" {size} role="img" aria-label="{escape(label)}">{"".join(self._marks)}</svg>'

    def file(self, label: str) -> str:
        """The SVG as a file, with the light or dark colours of the system."""
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
    """A chart in both widths, with a caption."""
    drawn = []
    for width in (WIDE, NARROW):
        canvas = Canvas(width)
        draw(canvas)
        drawn.append(canvas.svg(label))
    return f'<figure class="chart" data-search-exclude>{"".join(drawn)}<figcaption>{caption}</figcaption></figure>'


def linear(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """A linear scale: the pixel of each value, from ``low`` at ``start`` to ``high`` at ``stop``."""
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def logarithmic(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """A logarithmic scale."""
    inside = linear(log10(low), log10(high), start, stop)
    return lambda value: inside(log10(value))


def apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions of labels, moved by as little as possible until they do not overlap, within limits.

    >>> apart([10, 12, 50], 10, 0, 100)
    [6.0, 16.0, 50.0]
    """
    moved = spread(places, gap)
    shift = max(0.0, low - min(moved)) if moved else 0.0
    shift = shift or (min(0.0, high - max(moved)) if moved else 0.0)
    return [place + shift for place in moved]


# charts of the results page

_COLOUR_CLASSES = dict(zip(HIGHLIGHTED, ("a", "b", "c"), strict=True))
ROW = 18.2  # height of a row of dots
_SIZES = ((1, 1), (2, 5), (6, 20), (21, 40))  # classes of a task


def colour_class(key: str) -> str:
    """The CSS class of a method's colour; all but three are grey."""
    return _COLOUR_CLASSES.get(key, "rest")


def _for_each_dataset(draw: Callable[[Canvas, str, float], None]) -> Callable[[Canvas], None]:
    """One chart per dataset, below each other."""

    def both(canvas: Canvas) -> None:
        top = 0.0
        for data, title in DATA.items():
            canvas.text(0, top + 14, title, "head")
            draw(canvas, data, top)
            top = canvas.height + 18

    return both


def accuracy_by_task() -> str:
    """Small multiples: accuracy after each task."""
    caption = (
        "Accuracy over all classes seen so far, after each task: one method in each panel, all others in grey, joint "
        "training dashed. Mean over n seeds; the number is A_T. All panels of a dataset have the same axis."
    )
    return figure(_for_each_dataset(_accuracy_by_task), "Accuracy after each task, a panel for each method.", caption)


def _accuracy_by_task(canvas: Canvas, data: str, top: float) -> None:
    top += 24
    shown = [key for key in runs(data) if key != JOINT]
    columns = 2 if canvas.narrow else 4
    width, height = (canvas.width - 14 * (columns - 1)) / columns, 92.0
    lines = {key: method.curve() for key, method in runs(data).items()}
    if JOINT in lines and not runs(data)[JOINT].has_updates:  # a level, because all classes came at once
        lines[JOINT] *= max(map(len, lines.values()))
    floor = min(map(min, lines.values()))
    for number, key in enumerate(shown):
        left = (number % columns) * (width + 14)
        start = top + (number // columns) * (height + 40) + 16
        x = linear(0, len(lines[key]) - 1, left, left + width)
        y = linear(floor, 100, start + height, start)
        for other, line in lines.items():
            if other != key:
                canvas.line([(x(i), y(v)) for i, v in enumerate(line)], "bound" if other == JOINT else "faint")
        kind = colour_class(key) if key in HIGHLIGHTED else "ink"
        canvas.line([(x(i), y(v)) for i, v in enumerate(lines[key])], f"curve {kind}")
        canvas.text(left, start - 4, runs(data)[key].title, f"{kind} strong")
        canvas.text(left, start + height + 13, f"n = {len(runs(data)[key].seeds)}", "soft")
        canvas.text(left + width, start + height + 13, f"{lines[key][-1]:.1f}", f"{kind} end", "end")
        canvas.line([(left, start + height), (left + width, start + height)])


@dataclass(frozen=True)
class DotRow:
    """A row of dots: a name, and for each dot its mean and its CSS class."""

    name: str
    marks: Sequence[tuple[Mean, str]]


@dataclass(frozen=True)
class Panel:
    """A part of a canvas."""

    left: float
    top: float
    width: float


def dots(
    canvas: Canvas, rows: Sequence[DotRow], place: Panel, unit: str, span: tuple[float, float] | None = None
) -> None:
    """Means with intervals, one row per name; the axis begins at zero or below."""
    ends = [
        end for row in rows for point, _ in row.marks for end in (point.value, point.low, point.high) if end is not None
    ]
    low, high = span or (min(0.0, *ends), max(0.0, *ends))
    low -= 0 if span else 0.03 * (high - low) * (low < 0)  # space between the leftmost dot and the names
    names, right = place.left + 8 + max((len(row.name) for row in rows), default=0) * 6.4, place.left + place.width
    x, top = linear(low, high, names + 8, right - 12), place.top
    bottom = top + ROW * len(rows) + 6
    max_ticks = 4 if canvas.narrow or span else 8
    step = next(step for step in (0.5, 1, 2, 5, 10, 20, 50) if (high - low) / step <= max_ticks + 1)
    for number in range(int(low / step) - 1, int(high / step) + 2):
        if low <= number * step <= high:
            canvas.line([(x(number * step), top), (x(number * step), bottom)], "axis" if number == 0 else "grid")
            canvas.text(x(number * step), bottom + 14, f"{number * step:g}".replace("-", "−"), "soft", "middle")
    canvas.text(right, bottom + 29, unit, "soft", "end")
    for index, row in enumerate(rows):
        y = top + ROW * (index + 0.6)
        kind = row.marks[0][1]
        canvas.text(
            names, y + 4, row.name, kind if kind in _COLOUR_CLASSES.values() and len(row.marks) == 1 else "", "end"
        )
        for point, css_class in row.marks:
            if point.low is not None and point.high is not None:
                canvas.line([(x(max(point.low, low)), y), (x(min(point.high, high)), y)], f"bar {css_class}")
            canvas.dot(x(point.value), y, css_class, note=f"{row.name}: {point.text()}, n = {point.count}")


def forgetting() -> str:
    """F of each method, with confidence intervals."""

    def draw(canvas: Canvas, data: str, top: float) -> None:
        with_updates = [item for item in runs(data).items() if item[1].has_updates]
        methods = sorted(with_updates, key=lambda item: item[1].of("F").value)
        rows = [
            DotRow(f"{method.title} ({len(method.seeds)})", [(method.of("F"), colour_class(key))])
            for key, method in methods
        ]
        dots(canvas, rows, Panel(0, top + 24, canvas.width), "forgetting (F), points")

    caption = (
        "Forgetting F: how many points the accuracy of a task has fallen from its best, mean over tasks; lower is "
        "better. In brackets the number of seeds; bars are 95 % confidence intervals."
    )
    return figure(_for_each_dataset(draw), "Forgetting of each method on two datasets.", caption)


def accuracy_by_size() -> str:
    """Final accuracy by the size of the task in which a class arrived."""

    def draw(canvas: Canvas, data: str, top: float) -> None:
        columns, y = 1 if canvas.narrow else 2, top + 22
        width = canvas.width / columns
        for number, (low, high) in enumerate(_SIZES):
            if number and number % columns == 0:
                y = canvas.height + 8
            left = number % columns * width
            words = f"in a task of {low} to {high}" if low < high else "alone"
            canvas.text(left, y + 12, f"classes that arrived {words}", "strong")
            means = {key: _of_size(method, low, high) for key, method in runs(data).items()}
            rows = [
                DotRow(runs(data)[key].title, [(point, colour_class(key))]) for key, point in means.items() if point
            ]
            dots(canvas, rows, Panel(left, y + 18, width), "accuracy at the end, %", (0, 100))

    label = "Accuracy at the end by the size of the task in which a class arrived."
    caption = (
        "Accuracy after the last task over the classes that arrived alone, in small and in large tasks. Bars: 95 % "
        "confidence intervals; few classes arrive alone, so theirs are wide."
    )
    return figure(_for_each_dataset(draw), label, caption)


def _of_size(method: Runs, low: int, high: int) -> Mean | None:
    """Final accuracy over the classes of tasks with ``low`` to ``high`` classes; None without such tasks."""
    values = []
    for record in method.seeds.values():
        ends = zip((row[-1] for row in record["metrics"]["matrix"]), record["stream"]["sizes"], strict=True)
        if inside := [(end, size) for end, size in ends if low <= size <= high]:
            values.append(sum(end * size for end, size in inside) / sum(size for _, size in inside))
    return mean(values) if values else None


_MIN_GFLOP = 2.1  # at the left end of the axis


def accuracy_by_cost() -> str:
    """Accuracy against operations per image."""
    label = "Accuracy after the last task against operations per image, for every method on two datasets."
    caption = (
        "Accuracy after the last task (A_T) against operations for one prediction, after the last task. Up and left is "
        "better. Bars: 95 % confidence intervals. Hollow: one seed. Methods of about the same cost stand side by side. "
        "Dashed: joint training, which sees all images at once."
    )
    return figure(_for_each_dataset(_accuracy_by_cost), label, caption)


def _accuracy_by_cost(canvas: Canvas, data: str, top: float) -> None:
    joint = runs(data)[JOINT].of("A_T").value if JOINT in runs(data) else None
    costs = {key: each.cost("gflops") for key, each in runs(data).items() if key != JOINT}
    points = {key: (cost, runs(data)[key].of("A_T")) for key, cost in costs.items() if cost}
    if not points:
        return
    cheap = [name for name, (cost, _) in points.items() if cost < 3.5]
    costly = [name for name in points if name not in cheap]
    low = min(each.value if each.low is None else each.low for _, each in points.values()) - 3
    high = max(joint or 0.0, *(each.high or each.value for _, each in points.values()))
    left, end, column = (136.0, 234.0, 240.0) if canvas.narrow else (200.0, 490.0, 520.0)
    start, stop = top + 40, top + 40 + (300 if canvas.narrow else 330)
    x = logarithmic(_MIN_GFLOP, 60, left, end)
    y = linear(low, high + 2, stop, start)
    canvas.text(0, top + 30, "A_T, %", "soft")
    for value in range(10 * (int(low) // 10 + 1), int(high) + 1, 10):
        canvas.line([(22, y(value)), (canvas.width, y(value))], "grid")
        canvas.text(0, y(value) + 4, str(value), "soft")
    if joint:
        canvas.line([(22, y(joint)), (canvas.width, y(joint))], "bound")
        canvas.text(canvas.width, y(joint) - 5, f"joint training {joint:.1f}", "soft", "end")
    for value in (3, 5, 10, 20, 50):
        canvas.line([(x(value), stop), (x(value), stop + 4)])
        canvas.text(x(value), stop + 17, str(value), "soft", "middle")
    canvas.line([(x(_MIN_GFLOP), stop), (x(60), stop)])
    canvas.text(x(60) + 8, stop + 17, "GFLOP per image", "soft")
    at = _side_by_side({key: x(cost) for key, (cost, _) in points.items()})
    for names, side in ((cheap, "end"), (costly, "start")):
        places = apart([y(points[name][1].value) for name in names], LINE - 1, start + 6, stop - 4)
        for name, place in sorted(zip(names, places, strict=True), key=lambda item: item[0] in HIGHLIGHTED):
            cost, each = points[name]
            kind, here = colour_class(name), y(each.value)
            beside = x(_MIN_GFLOP) - 4 if side == "end" else column
            canvas.line([(at[name], here), (beside, place)], "leader")
            if each.low is not None and each.high is not None:
                bar = "thin" if kind == "rest" else f"bar {kind}"
                canvas.line([(at[name], y(each.low)), (at[name], y(each.high))], bar)
            note = f"{runs(data)[name].title}: {each.text()} %, {cost:.2f} GFLOP, n = {each.count}"
            canvas.dot(at[name], here, kind if each.count > 1 else f"hollow {kind}", note=note)
            words = runs(data)[name].title
            words += f" {each.value:.1f}" if kind != "rest" else ""
            canvas.text(beside + (-3 if side == "end" else 3), place + 4, words, kind, side)


def _side_by_side(places: dict[str, float], gap: float = 6.0) -> dict[str, float]:
    """Positions of vertical bars, moved apart if they would overlap.

    >>> _side_by_side({"a": 50.0, "b": 50.5, "c": 90.0})
    {'a': 47.0, 'b': 53.0, 'c': 90.0}
    """
    clusters: list[list[str]] = []
    for key in sorted(places, key=lambda key: places[key]):
        if clusters and places[key] - places[clusters[-1][-1]] < gap:
            clusters[-1].append(key)
        else:
            clusters.append([key])
    first = {key: (places[keys[0]] - gap * (len(keys) - 1) / 2, keys) for keys in clusters for key in keys}
    return {key: start + gap * keys.index(key) for key, (start, keys) in first.items()}


CHARTS: dict[str, Callable[..., str]] = {
    "chart-cost": accuracy_by_cost,
    "chart-tasks": accuracy_by_task,
    "chart-sizes": accuracy_by_size,
    "chart-forgetting": forgetting,
}
