# SPDX-License-Identifier: Apache-2.0
"""The figures of concepts.md, one-a-plus.md and grocery.md, from committed files and the program's own code.

Nothing is trained.

python tools/docs/pictures.py
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import drawings
from charts import ROW, DotRow, Panel, dots
from evidence import JOINT, MOS, ONE_A, PLUS, Mean, main_runs
from svg import PICTURE, Canvas, apart, linear

from onea.metrics import wilson_interval
from onea.research.record import Record
from onea.research.report.analysis_figures import analysed_merge, numbers

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs/pictures"
CARRIED = ROOT / "benchmarks/merging/carried_statistics.csv"
GROCERY = ROOT / "benchmarks/models/grocery-example.json"
WORST = 20  # products of the example that are shown
BIG_TASK = 4  # the fifth task, 36 classes: larger than all before it together
KINDS = {"down": "down-projection", "up": "up-projection"}


def records(data: str, *methods: str) -> list[Record]:
    """Seed 1 of methods on one of the main streams, as the results show it, with their names as papers write them."""
    from onea.research.methods import method_class

    return [main_runs(data)[name].seeds[1] | {"title": method_class(name).title} for name in methods]


def frame(canvas: Canvas, place: tuple[float, float, float, float], ticks: Sequence[float], unit: str = "") -> Any:
    """Lines across a panel (left, top, right, bottom) at some values; returns where a value lies."""
    left, top, right, bottom = place
    y = linear(ticks[0], ticks[-1], bottom, top)
    for value in ticks:
        canvas.line([(left, y(value)), (right, y(value))], "axis" if value == ticks[0] else "grid")
        canvas.text(left - 6, y(value) + 4, f"{value:g}{unit}", "soft", "end")
    return y


def curves(records: Sequence[Record], title: str, label: str) -> tuple[Canvas, str]:
    """Accuracy after each task, each line named where it ends; the first stands out."""
    canvas, tasks = Canvas(PICTURE), len(records[0]["metrics"]["A"])
    canvas.text(0, 16, title, "head")
    low = 10 * int(min(min(record["metrics"]["A"]) for record in records) // 10)
    y = frame(canvas, (34, 36, PICTURE - 130, 280), range(low, 101, 10))
    x = linear(1, tasks, 44, PICTURE - 134)
    looks = dict(zip((str(record["title"]) for record in records), ("a", "rest", "c", "b"), strict=False))
    ends = apart([y(record["metrics"]["A"][-1]) for record in records], 17, 36, 280)
    for record, end in zip(records, ends, strict=True):
        line, look = record["metrics"]["A"], looks[record["title"]]
        canvas.line([(x(task + 1), y(value)) for task, value in enumerate(line)], f"curve {look}")
        words = f"{record['title'].split(' (')[0]} {line[-1]:.1f}"
        canvas.text(PICTURE - 126, end + 4, words, look if look != "rest" else "soft")
    for task in range(1, tasks + 1, 1 if tasks <= 10 else 3):
        canvas.text(x(task), 297, str(task), "soft", "middle")
    canvas.text(PICTURE - 130, 314, "tasks learned", "soft", "end")
    return canvas, label


def weights(run: Record) -> tuple[Canvas, str]:
    """Which side was the base in each merge, and the smaller side's share."""
    canvas, sizes = Canvas(PICTURE), run["stream"]["sizes"]
    canvas.text(0, 16, "Share of the smaller side in each merge", "head")
    y = frame(canvas, (34, 44, PICTURE, 220), (0, 0.1, 0.2, 0.3, 0.4, 0.5))
    x = linear(1.5, len(sizes) + 0.5, 40, PICTURE - 6)
    for index, task in enumerate(run["tasks"]):
        if merge := task.get("merge"):
            look = "a" if merge["base"] == "accumulated" else "b"
            share = float(merge["align_share"])
            canvas.line([(x(index + 1), y(0)), (x(index + 1), y(share))], f"column {look}")
            canvas.text(x(index + 1), y(share) - 5, f"{share:.2f}", look, "middle")
            canvas.text(x(index + 1), 237, f"{sum(sizes[:index])}+{sizes[index]}", "soft", "middle")
    canvas.text(PICTURE, 254, "classes known + new", "soft", "end")
    canvas.text(40, 276, "blue: what is known is the base", "a")
    canvas.text(40, 293, "orange: the new task is the base", "b")
    return canvas, "The smaller side's share in each merge of One-A on CIFAR-100."


def layers(run: Record, what: str, title: str, label: str) -> tuple[Canvas, str]:
    """A number for each direction of the base in the merge of the big task: layers thin, their mean thick."""
    _, analysis = analysed_merge(run, BIG_TASK)
    canvas, half = Canvas(PICTURE), PICTURE / 2
    canvas.text(0, 16, title, "head")
    found = {kind: [numbers(layer[what]) for layer in analysis[kind]["layers"]] for kind in analysis}
    most = max(value for lines in found.values() for line in lines for value in line)
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5) if most / step <= 4)
    ticks = [round(step * count, 2) for count in range(ceil(most / step) + 1)]
    for number, (kind, lines) in enumerate(found.items()):
        left = number * half + 38
        y = frame(canvas, (left, 52, left + half - 48, 190), ticks)
        x = linear(0, len(lines[0]) - 1, left + 2, left + half - 50)
        for line in lines:
            canvas.line([(x(place), y(value)) for place, value in enumerate(line)], "faint")
        mean = [fmean(step) for step in zip(*lines, strict=True)]
        canvas.line([(x(place), y(value)) for place, value in enumerate(mean)], "curve b")
        canvas.text(left - 32, 40, KINDS.get(kind, kind), "strong")
    canvas.text(38, 210, "directions of the base, strong to weak", "soft")
    canvas.text(38, 227, "thin: one layer each, thick: their mean", "b")
    return canvas, label


def matrix(run: Record) -> tuple[Canvas, str]:
    """How well each task is known after each step."""
    canvas, rows = Canvas(PICTURE), run["metrics"]["matrix"]
    side = (PICTURE - 86) / len(rows)
    canvas.text(0, 16, "Right answers, %, by task and moment", "head")
    for row, line in enumerate(rows):
        top = 44 + row * side
        canvas.text(78, top + side / 2 + 4, f"{run['stream']['sizes'][row]} classes", "soft", "end")
        canvas.text(86 + (row + 0.5) * side, 38, str(row + 1), "soft", "middle")
        for step, value in enumerate(line):
            if value is not None and step >= row:
                canvas.rect(86 + step * side, top, side - 1, side - 1, opacity=0.75 * value / 100)
                canvas.text(86 + (step + 0.5) * side, top + side / 2 + 4, f"{value:.0f}", anchor="middle")
    canvas.text(0, 38, "after task", "soft")
    return canvas, "Accuracy of each task after each task, One-A on CIFAR-100."


def carried() -> tuple[Canvas, str]:
    """How far class means are from where all images would put them, and what that costs, task by task."""
    with CARRIED.open() as file:
        lines = list(csv.DictReader(file))
    looks = {
        "left": ("left where they were", "b"),
        "carried": ("carried", "a"),
        "recomputed": ("of all images", "rest"),
    }
    panels = (("mean", "error of old means, deviations", (0, 0.3, 0.6, 0.9)), ("right", "right, %", (40, 60, 80, 100)))
    canvas, half = Canvas(PICTURE), PICTURE / 2
    for row, data in enumerate(dict.fromkeys(line["data"] for line in lines)):
        for column, (key, title, ticks) in enumerate(panels):
            left, top = column * half + 32, row * 190 + 48
            canvas.text(left - 28, top - 30, {"cifar100": "CIFAR-100", "cub200": "CUB-200"}[data], "head")
            canvas.text(left - 28, top - 13, title, "soft")
            y = frame(canvas, (left, top, left + half - 44, top + 120), ticks)
            for kind, (_, look) in looks.items():
                own = [line for line in lines if (line["data"], line["statistics"]) == (data, kind)]
                x = linear(1, len(own), left + 2, left + half - 46)
                values = [float(line[key]) * (100 if key == "right" else 1) for line in own]
                if key == "right" or kind != "recomputed":
                    canvas.line([(x(step + 1), y(value)) for step, value in enumerate(values)], f"curve {look}")
            canvas.text(left + half - 44, top + 136, "tasks", "soft", "end")
    for number, (words, look) in enumerate(looks.values()):
        extra = " (not allowed)" if look == "rest" else ""
        canvas.text(4, canvas.height + 16 + (4 if number == 0 else 0), f"statistics {words}{extra}", look)
    return (
        canvas,
        "Class means left where they were are farther from their true place than carried ones, and cost accuracy.",
    )


def share(right: int, total: int) -> Mean:
    """In percent, with the interval that the program itself prints."""
    low, high = wilson_interval(right, total)
    return Mean(100 * right / total, 100 * low, 100 * high, total)


def grocery_history(updates: Sequence[dict[str, Any]]) -> tuple[Canvas, str]:
    """Held-out accuracy: photos of each update, and those of all classes known by then."""
    canvas, top = Canvas(PICTURE), 0.0
    for title, side, count in (
        ("photos of the update", "held_out", "held_out"),
        ("photos of all classes known by then", "overall", "overall_images"),
    ):
        canvas.text(0, top + 16, f"Held-out {title}: accuracy, %", "head")
        rows = []
        for update in updates:
            if update[f"{side}_accuracy"] is None:  # too few photos
                continue
            right = share(round(update[f"{side}_accuracy"] * update[count]), update[count])
            words = f"+{update['new_classes']}" if side == "held_out" else f"{update['known']} classes"
            rows.append(DotRow(f"{update['version']} {update['name']}, {words}", [(right, "hollow")]))
        dots(canvas, rows, Panel(8, top + 24, PICTURE - 8), "", (0, 100))
        top = canvas.height
    return canvas, "Held-out accuracy after each update, of its own classes and of all."


def grocery_classes(found: dict[str, Any]) -> tuple[Canvas, str]:
    """The products with the lowest accuracy, and what each is mostly taken for."""
    canvas, taken = Canvas(PICTURE), {}
    for mistake in reversed(found["confusions"]):  # the most frequent come first
        taken[mistake["class"]] = mistake
    worst = found["classes"][:WORST]
    canvas.text(0, 16, f"Test photos correct, %: the {WORST} worst of {len(found['classes'])} products", "head")
    canvas.text(PICTURE, 34, "mostly taken for", "soft", "end")
    rows = [DotRow(each["class"], [(share(each["correct"], each["images"]), "hollow")]) for each in worst]
    dots(canvas, rows, Panel(0, 40, PICTURE - 184), "", (0, 100))
    for number, each in enumerate(worst):
        mistake = taken[each["class"]]
        words = f"{mistake['taken_for']}, {mistake['images']} of {each['images']}"
        canvas.text(PICTURE, 44 + ROW * (number + 0.6), words, "soft", "end")
    return canvas, "Accuracy of the worst products, and the product that each is mostly taken for."


def main() -> None:
    """Write all of them."""
    example = json.loads(GROCERY.read_text("utf-8"))
    three = records("cifar100", ONE_A, "running-mean", "simplecil")
    plus = records("cub200", PLUS, JOINT, MOS, ONE_A)
    one_a = three[0]
    figures = {
        "streams": drawings.streams(),
        "sizes": drawings.sizes(),
        "network": drawings.network(),
        "merge-steps": drawings.merge_steps(),
        "prototypes": drawings.prototypes(),
        "weights": weights(one_a),
        "gates": layers(one_a, "gate", "Gates: share of the step", "Gates of each direction."),
        "updates": layers(one_a, "update", "How far directions moved", "Update of each direction."),
        "matrix": matrix(one_a),
        "curves": curves(three, "CIFAR-100, ten tasks, seed 1: right, %", "Accuracy after each task."),
        "one-a-plus": curves(
            plus, "CUB-200, 20 tasks, seed 1: right, %", "Accuracy over all classes seen after each of 20 tasks."
        ),
        "carried": carried(),
        "grocery-history": grocery_history(example["updates"]),
        "grocery-classes": grocery_classes(example),
    }
    for name, (canvas, label) in figures.items():
        path = OUT / f"{name}.svg"
        path.write_text(canvas.file(label), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
