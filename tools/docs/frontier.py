# SPDX-License-Identifier: Apache-2.0
"""The first chart of the results page: accuracy against the cost of an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from charts import joint_seeds, look
from evidence import DATA, HIGHLIGHTED, JOINT, SEQUENTIAL, Mean, main_runs
from svg import LINE, Canvas, apart, figure, linear, logarithmic

_DOT, _LINE = 5.0, 2.5  # pixels between dots, and between lines, that would cover each other
_FROM = 2.1  # GFLOP where the axis begins: left of it are names, clear of dots that stand side by side
Bar = tuple[float, float, float, float]  # where a mark stands, its dot, its upper and its lower end, in pixels


def frontier() -> str:
    """Accuracy against operations per image."""

    def draw(canvas: Canvas) -> None:
        top = 0.0
        for data in DATA:
            _frontier(canvas, data, top)
            top = canvas.height + 18

    label = "Accuracy after the last task against operations per image, for every method on two datasets."
    caption = (
        "Accuracy after the last task (A_T) against operations for one answer, after the last task. Up and left is "
        "better. Bars: 95 % intervals. Hollow: one seed. Methods that cost about the same stand side by side. Dashed: "
        f"joint training, which sees all images at once ({joint_seeds()}). Sequential fine-tuning lies far below and "
        "is left out."
    )
    return figure(draw, label, caption)


def _frontier(canvas: Canvas, data: str, top: float) -> None:
    runs = {name: each for name, each in main_runs(data).items() if name not in (JOINT, SEQUENTIAL)}
    joint = main_runs(data)[JOINT].of("A_T").value
    points = {name: (each.cost("gflops"), each.of("A_T")) for name, each in runs.items()}
    cheap = [name for name, (cost, _) in points.items() if cost < 3.5]
    costly = [name for name in points if name not in cheap]
    low = min(mean.value if mean.low is None else mean.low for _, mean in points.values()) - 3
    high = max(joint, *(mean.high or mean.value for _, mean in points.values()))
    left, end, column = (136.0, 234.0, 240.0) if canvas.narrow else (200.0, 490.0, 520.0)
    start, stop = top + 40, top + 40 + (300 if canvas.narrow else 330)
    x = logarithmic(_FROM, 60, left, end)
    y = linear(low, high + 2, stop, start)
    canvas.text(0, top + 14, DATA[data], "head")
    canvas.text(0, top + 30, "A_T, %", "soft")
    for value in range(10 * (int(low) // 10 + 1), int(high) + 1, 10):
        canvas.line([(22, y(value)), (canvas.width, y(value))], "grid")
        canvas.text(0, y(value) + 4, str(value), "soft")
    canvas.line([(22, y(joint)), (canvas.width, y(joint))], "bound")
    canvas.text(canvas.width, y(joint) - 5, f"joint training {joint:.1f}", "soft", "end")
    for value in (3, 5, 10, 20, 50):
        canvas.line([(x(value), stop), (x(value), stop + 4)])
        canvas.text(x(value), stop + 17, str(value), "soft", "middle")
    canvas.line([(x(_FROM), stop), (x(60), stop)])
    canvas.text(x(60) + 8, stop + 17, "GFLOP per image", "soft")
    order = sorted(points, key=lambda name: (name not in HIGHLIGHTED, points[name][1].count < 2))
    bars = [(x(points[name][0]), y(points[name][1].value), *_ends(points[name][1], y)) for name in order]
    at = dict(zip(order, side_by_side(bars), strict=True))
    for names, side in ((cheap, "end"), (costly, "start")):
        places = apart([y(points[name][1].value) for name in names], LINE - 1, start + 6, stop - 4)
        for name, place in sorted(zip(names, places, strict=True), key=lambda item: item[0] in HIGHLIGHTED):
            cost, mean = points[name]
            kind, here = look(name), y(mean.value)
            beside = x(_FROM) - 4 if side == "end" else column
            canvas.line([(at[name], here), (beside, place)], "leader")
            if mean.low is not None and mean.high is not None:
                bar = "thin" if kind == "rest" else f"bar {kind}"
                canvas.line([(at[name], y(mean.low)), (at[name], y(mean.high))], bar)
            note = f"{runs[name].title}: {mean.text()} %, {cost:.2f} GFLOP, n = {mean.count}"
            canvas.dot(at[name], here, kind if mean.count > 1 else f"hollow {kind}", note=note)
            words = runs[name].title.replace("Running mean, shared start", "Mean, shared start")
            words += f" {mean.value:.1f}" if kind != "rest" else ""
            canvas.text(beside + (-3 if side == "end" else 3), place + 4, words, kind, side)


def _ends(mean: Mean, y: Callable[[float], float]) -> tuple[float, float]:
    """The upper and the lower end of a mark: of its interval, or of its dot."""
    low, high = (mean.value if end is None else end for end in (mean.low, mean.high))
    return min(y(high), y(mean.value) - _DOT / 2), max(y(low), y(mean.value) + _DOT / 2)


def side_by_side(bars: Sequence[Bar]) -> list[float]:
    """Where upright bars stand that do not cover each other, the first ones where they belong; a dot without a bar may
    stand on the bars of others.

    >>> side_by_side([(50.0, 15.0, 10.0, 20.0), (50.0, 25.0, 15.0, 30.0), (50.0, 17.0, 14.0, 19.0)])
    [50.0, 52.5, 55.0]
    """
    placed: list[Bar] = []
    for x, dot, top, bottom in bars:
        for number in count():
            here = x + _LINE * ((number + 1) // 2) * (1 if number % 2 else -1)
            if not any(
                (abs(here - other) < _LINE and top <= down and bottom >= up and min(bottom - top, down - up) > _DOT)
                or (abs(here - other) < _DOT and abs(dot - point) < _DOT)
                for other, point, up, down in placed
            ):
                placed.append((here, dot, top, bottom))
                break
    return [x for x, *_ in placed]
