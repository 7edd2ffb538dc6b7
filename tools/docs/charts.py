# SPDX-License-Identifier: Apache-2.0
"""The charts of the results page, from the committed records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import evidence
from evidence import DATA, HIGHLIGHTED, JOINT, ONE_A, SEQUENTIAL, Mean, Runs, main_runs
from svg import Canvas, figure, linear

from onea.research.record import Record

_LOOK = dict(zip(HIGHLIGHTED, ("a", "b", "c"), strict=True))
ROW = 18.2  # of dots
_MOST = 9  # methods in a panel of them
_SIZES = ((1, 1), (2, 5), (6, 20), (21, 40))  # classes of a task


def look(method: str) -> str:
    """The colour class of a method; all but three are grey."""
    return _LOOK.get(method, "rest")


def joint_seeds() -> str:
    """How many seeds joint training has, the fewer of the two streams."""
    count = min(len(main_runs(data)[JOINT].records) for data in DATA)
    return f"{count} seed{'s' if count > 1 else ''}"


def curves() -> str:
    """Small multiples: accuracy after each task."""

    def draw(canvas: Canvas) -> None:
        top = 0.0
        for data in DATA:
            canvas.text(0, top + 14, DATA[data], "head")
            _curves(canvas, data, top + 24)
            top = canvas.height + 18

    floors = " and ".join(f"{_floor(data):.0f} % ({name})" for data, name in DATA.items())
    label = "Accuracy over all classes seen after each task, a panel for each method, on two datasets."
    caption = (
        "Accuracy over all classes seen so far, after each task: one method a panel, all others in grey, joint "
        f"training dashed. Mean over n seeds; the number is A_T. All panels of a dataset reach from {floors} to 100 %. "
        f"Joint training is of {joint_seeds()}, so early tasks may lie above it. The twelve most accurate methods are "
        "shown."
    )
    return figure(draw, label, caption)


def _floor(data: str) -> float:
    """Where the axis of the curves begins."""
    return min(min(runs.curve()) for name, runs in main_runs(data).items() if name != SEQUENTIAL)


def _curves(canvas: Canvas, data: str, top: float) -> None:
    runs = main_runs(data)
    shown = [name for name in runs if name not in (JOINT, SEQUENTIAL)][:12]
    columns = 2 if canvas.narrow else 4
    width, height = (canvas.width - 14 * (columns - 1)) / columns, 92.0
    lines = {name: each.curve() for name, each in runs.items() if name != SEQUENTIAL}
    floor = _floor(data)
    for number, name in enumerate(shown):
        left = (number % columns) * (width + 14)
        start = top + (number // columns) * (height + 40) + 16
        x = linear(0, len(lines[name]) - 1, left, left + width)
        y = linear(floor, 100, start + height, start)
        for other, line in lines.items():
            if other != name:
                canvas.line([(x(i), y(v)) for i, v in enumerate(line)], "bound" if other == JOINT else "faint")
        kind = look(name) if name in HIGHLIGHTED else "ink"
        canvas.line([(x(i), y(v)) for i, v in enumerate(lines[name])], f"curve {kind}")
        count = len(runs[name].records)
        title = runs[name].title.replace("Running mean, shared start", "Mean, shared start")
        canvas.text(left, start - 4, title, f"{kind} strong")
        canvas.text(left + width, start - 4, f"n = {count}", "soft", "end")
        canvas.text(left + width, start + height + 13, f"{lines[name][-1]:.1f}", f"{kind} end", "end")
        canvas.line([(left, start + height), (left + width, start + height)])


@dataclass(frozen=True)
class DotRow:
    """A row of dots: a name, and for each a mean and its look."""

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
    """Means with intervals, a row for each name; the axis begins at zero or below."""
    ends = [
        end for row in rows for mean, _ in row.marks for end in (mean.value, mean.low, mean.high) if end is not None
    ]
    low, high = span or (min(0.0, *ends), max(0.0, *ends))
    low -= 0 if span else 0.03 * (high - low) * (low < 0)  # the leftmost dot stands clear of the names
    names, right = place.left + 8 + max((len(row.name) for row in rows), default=0) * 6.4, place.left + place.width
    x, top = linear(low, high, names + 8, right - 12), place.top
    bottom = top + ROW * len(rows) + 6
    most = 4 if canvas.narrow or span else 8
    step = next(step for step in (0.5, 1, 2, 5, 10, 20, 50) if (high - low) / step <= most + 1)
    for number in range(int(low / step) - 1, int(high / step) + 2):
        if low <= number * step <= high:
            canvas.line([(x(number * step), top), (x(number * step), bottom)], "axis" if number == 0 else "grid")
            canvas.text(x(number * step), bottom + 14, f"{number * step:g}".replace("-", "−"), "soft", "middle")
    canvas.text(right, bottom + 29, unit, "soft", "end")
    for index, row in enumerate(rows):
        here = top + ROW * (index + 0.6)
        kind = row.marks[0][1]
        canvas.text(names, here + 4, row.name, kind if kind in _LOOK.values() and len(row.marks) == 1 else "", "end")
        for mean, look_of in row.marks:
            if mean.low is not None and mean.high is not None:
                canvas.line([(x(max(mean.low, low)), here), (x(min(mean.high, high)), here)], f"bar {look_of}")
            canvas.dot(x(mean.value), here, look_of, note=f"{row.name}: {mean.text()}, n = {mean.count}")


def forgetting() -> str:
    """F of each method, with intervals."""

    def draw(canvas: Canvas) -> None:
        top = 0.0
        for data in DATA:
            canvas.text(0, top + 14, DATA[data], "head")
            found = sorted(main_runs(data).items(), key=lambda item: item[1].of("F").value)
            rows = [DotRow(_counted(each), [(each.of("F"), look(name))]) for name, each in found if name != SEQUENTIAL]
            dots(canvas, rows, Panel(0, top + 24, canvas.width), "points forgotten (F), fewer are better")
            top = canvas.height + 18

    lost = " and ".join(f"{main_runs(data)[SEQUENTIAL].of('F').value:.0f}" for data in DATA)
    label = "Forgetting of each method on two datasets."
    caption = (
        "Forgetting F: how many points a task has lost since its best, mean over tasks. In brackets the number of "
        "seeds; bars are 95 % intervals. F rewards what never learned much: methods that train once and then stand "
        f"still have little to lose. Sequential fine-tuning ({lost}) is left out."
    )
    return figure(draw, label, caption)


def _counted(runs: Runs) -> str:
    return f"{runs.title} ({len(runs.records)})"


def by_size() -> str:
    """Accuracy at the end by the size of the task a class came in."""

    def shown(data: str) -> list[Runs]:
        whole = [runs for runs in main_runs(data).values() if len(runs.records) >= 5 and runs.method != SEQUENTIAL]
        return [runs for place, runs in enumerate(whole) if place < _MOST or runs.method in HIGHLIGHTED]

    def of(runs: Runs, low: int, high: int) -> Mean | None:
        found = [value for record in runs.records if (value := _of_size(record, low, high)) is not None]
        return evidence.mean(found) if found else None

    def draw(canvas: Canvas) -> None:
        top, columns = 0.0, 1 if canvas.narrow else 2
        width = canvas.width / columns
        for data in DATA:
            canvas.text(0, top + 14, DATA[data], "head")
            for number, (low, high) in enumerate(_SIZES):
                if number % columns == 0:
                    here = canvas.height + 8
                left = number % columns * width
                words = f"in a task of {low} to {high}" if low < high else "alone"
                canvas.text(left, here + 12, f"classes that arrived {words}", "strong")
                found = [(runs, of(runs, low, high)) for runs in shown(data)]
                rows = [DotRow(runs.title, [(mean, look(runs.method))]) for runs, mean in found if mean]
                dots(canvas, rows, Panel(left, here + 18, width), "right at the end, %", (0, 100))
            top = canvas.height + 18

    label = "Accuracy at the end by the size of the task in which a class arrived."
    caption = (
        "Accuracy after the last task over the classes that arrived alone, in small and in large tasks, for the most "
        "accurate methods with five seeds. Bars: 95 % intervals; few classes arrive alone: theirs are wide. By how "
        "many points classes of tasks of 21 to 40 are answered better than those of tasks of 1 to 5: "
        f"{_by_size_in_words()}."
    )
    return figure(draw, label, caption)


def _of_size(record: Record, low: int, high: int) -> float | None:
    """Right at the end, in percent, over the classes that arrived in tasks of such a size; None if there is none."""
    ends = [row[-1] for row in record["metrics"]["matrix"]]
    tasks = zip(ends, record["stream"]["sizes"], strict=True)
    inside = [(end, size) for end, size in tasks if low <= size <= high]
    return sum(end * size for end, size in inside) / sum(size for _, size in inside) if inside else None


def _by_size_in_words() -> str:
    """How much better classes of large tasks are known than those of small ones, paired by seed."""
    told = []
    for data, name in DATA.items():
        for method in (evidence.PLUS, ONE_A):
            runs = main_runs(data)[method]
            pairs = [(_of_size(record, 21, 40), _of_size(record, 1, 5)) for record in runs.records]
            gaps = [large - small for large, small in pairs if large is not None and small is not None]
            words = f"{runs.title} {evidence.mean(gaps).text()}"
            told.append(words if method == ONE_A else f"{name}, {words}")
    return f"{', '.join(told[:2])}; {', '.join(told[2:])}"


def components() -> str:
    """One-A's parts, switched on one after the other: here and in the paper, as gains."""
    counts = {evidence.difference(*_step(tasks, name)).count for tasks in (10, 20) for name in STEPS}
    caption = (
        f"What each part adds to A_T, here (filled, {' to '.join(map(str, sorted(counts)))} seeds, bars: 95 % "
        "intervals of the paired difference) and in the paper (hollow, another network, no deviation printed)."
    )
    return figure(_components, "What each part of One-A adds, in the paper and here.", caption)


STEPS: dict[str, tuple[str, str]] = {
    "alignment (equal weights)": ("none", "ASA"),
    "weighing by classes": ("none", "GW"),
    "alignment (with weights)": ("GW", "ASA + GW"),
    "gating": ("ASA + GW", "ASA + GW + DG"),
}


def paper_gain(first: str, second: str, tasks: int) -> float:
    """By how much the second row of the paper's Table 3 exceeds the first on CIFAR-100."""
    from onea.research.paper.reported import number, reported

    a, b = (number(reported("table3", row, f"CIFAR100 / T={tasks}") or "").value for row in (first, second))
    return b - a


def _step(tasks: int, name: str) -> tuple[Runs, Runs]:
    """One-A without a part and with it."""
    first, second = STEPS[name]
    return evidence.parts(tasks, first), evidence.parts(tasks, second)


def _components(canvas: Canvas) -> None:
    top = 0.0
    for tasks in (10, 20):
        canvas.text(0, top + 14, f"CIFAR-100, {tasks} tasks", "head")
        rows = []
        for name, (first, second) in STEPS.items():
            ours = evidence.difference(*_step(tasks, name))
            theirs = Mean(paper_gain(first, second, tasks), None, None, 1)
            rows.append(DotRow(name, [(ours, "b"), (theirs, "hollow")]))
        dots(canvas, rows, Panel(0, top + 24, canvas.width), "points of A_T added")
        top = canvas.height + 18


def against_paper() -> str:
    """Each rival's distance to One-A, in the paper and here."""

    def draw(canvas: Canvas) -> None:
        top = 0.0
        for data, column in (("cifar100", "CIFAR100 (T=10) / A_T"), ("cub200", "CUB (T=20) / A_T")):
            canvas.text(0, top + 14, DATA[data], "head")
            rows = [
                DotRow(_counted(main_runs(data)[name]), [(ours, "b"), (Mean(theirs, None, None, 5), "hollow")])
                for name, ours, theirs in distances(data, column)
            ]
            dots(canvas, rows, Panel(0, top + 24, canvas.width), "points of A_T above or below One-A")
            top = canvas.height + 18

    caption = (
        "How far each of the paper's methods is from One-A: here (filled, seeds in brackets, bars: 95 % intervals of "
        "the paired difference) and in the paper's Table 1 (hollow). Left of zero One-A is better."
    )
    return figure(draw, "Distance of each rival to One-A, in the paper and here.", caption)


def distances(data: str, column: str) -> list[tuple[str, Mean, float]]:
    """Rivals of the paper's Table 1: the method, its paired difference to One-A here, and the paper's."""
    from onea.research.paper.names import METHODS
    from onea.research.paper.reported import number, reported_table

    table = reported_table("table1")
    best = number(table.cell("One-A", column) or "").value
    found = [
        (
            METHODS[row],
            evidence.difference(main_runs(data)[ONE_A], main_runs(data)[METHODS[row]]),
            number(table.cell(row, column) or "").value - best,
        )
        for row in table.rows
        if row != "One-A"
    ]
    return sorted(found, key=lambda item: -item[2])


CHARTS: dict[str, Callable[[], str]] = {
    "curves": curves,
    "by-size": by_size,
    "forgetting": forgetting,
    "components": components,
    "against-paper": against_paper,
}
