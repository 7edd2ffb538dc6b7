# SPDX-License-Identifier: Apache-2.0
"""Draw figures of concepts.md, models.md, one-a-plus.md and grocery.md from committed files and the source.

python tools/docs/pictures.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from charts import PICTURE, ROW, Canvas, DotRow, Panel, apart, dots, linear
from frontier_chart import picture as frontier
from results import MOS, ONE_A, PLUS, ROOT, Mean, runs

from onea.merging.gated_fusion import Gate, fuse, gate_values
from onea.metrics import wilson_interval
from onea.research.record import Record
from onea.research.report.heat_maps import analysed_merge, has_analysis, parse_numbers
from onea.research.streams import make_stream

OUT = ROOT / "docs/pictures"
GROCERY = ROOT / "benchmarks/models/grocery-example.json"
WORST = 20  # products in the figure
LARGEST_TASK = 4  # the fifth task; its 36 classes are more than those of all earlier tasks
_SHARE = 0.4  # of the smaller side, in the example of a merge
KINDS = {"down": "down-projection", "up": "up-projection"}


# the idea


def network() -> tuple[Canvas, str]:
    """One block of the network with its adapter, and the numbers of weights."""
    from onea.vit.adapter import Adapters
    from onea.vit.backbones import load_backbone

    vit = load_backbone()
    adapters = Adapters(vit.depth, vit.width, rank=64, generator=torch.Generator())
    frozen, trained = (sum(value.numel() for value in module.parameters()) / 1e6 for module in (vit, adapters))
    canvas = Canvas(PICTURE)
    canvas.text(0, 16, f"one of {vit.depth} blocks, frozen: {frozen:.1f} million numbers in all", "a")
    for start, stop in (((0, 75), (40, 75)), ((130, 75), (245, 75)), ((335, 75), (402, 75)), ((418, 75), (455, 75))):
        canvas.arrow(start, stop, "rest")
    canvas.line([(180, 75), (180, 38), (410, 38), (410, 60)], "bar rest")
    canvas.arrow((410, 45), (410, 67), "rest")
    canvas.line([(180, 75), (180, 135), (200, 135)], "bar rest")
    canvas.arrow((180, 135), (205, 135), "rest")
    canvas.arrow((275, 135), (300, 135), "rest")
    canvas.line([(370, 135), (410, 135)], "bar rest")
    canvas.arrow((410, 135), (410, 83), "rest")
    for name, left, top, width, css_class in (
        ("attention", 40, 57, 90, "box"),
        ("MLP", 245, 57, 90, "box"),
        ("down", 205, 117, 70, "box b"),
        ("up", 300, 117, 70, "box b"),
    ):
        canvas.rect(left, top, width, 36, css_class)
        canvas.text(left + width / 2, top + 23, name, anchor="middle")
    canvas.dot(410, 75, "hollow", 8)
    canvas.text(410, 80, "+", anchor="middle")
    canvas.text(150, 176, f"adapter, trained: {trained:.2f} million in all", "b")
    return canvas, "A block of the network: attention, then an MLP with the adapter, two small matrices, beside it."


def merge_steps() -> tuple[Canvas, str]:
    """The steps of a merge of 2 x 2 matrices whose base has a single direction, and the gates of a base with six."""
    line = torch.tensor([2.0, 1.0], dtype=torch.float64) / 5**0.5
    base = torch.outer(line, torch.tensor([1.6, 0.9], dtype=torch.float64))
    align = torch.tensor([[0.3, 1.5], [1.3, -0.5]], dtype=torch.float64)
    inside = torch.outer(line, line) @ align
    merged = fuse(base[None], align[None], _SHARE, Gate(gating=False)).merged[0]
    canvas, half = Canvas(PICTURE), PICTURE / 2
    titles = ("1. Two sides", "2. Align", f"3. Weigh, here {_SHARE:g} to 0.6", "4. Gate")
    for number, title in enumerate(titles):
        canvas.text(number % 2 * half, 16 + number // 2 * 190, title, "head")

    def place(number: int) -> Any:
        x = linear(-0.5, 1.8, number % 2 * half, number % 2 * half + half - 24)
        y = linear(-0.65, 1.45, 165 + number // 2 * 190, 24 + number // 2 * 190)
        return lambda point: (x(float(point[0])), y(float(point[1])))

    for number in range(3):
        at = place(number)
        canvas.line([at(-0.3 * line), at(1.9 * line)], "band")
        sides: tuple[tuple[torch.Tensor, str], ...] = ((base, "a"), (align, "b"))
        if number:
            sides = ((base, "a"), (inside, "b"))
        for matrix, css_class in sides if number < 2 else ((merged, "c"),):
            for column in matrix.T:
                canvas.arrow(at((0, 0)), at(column), css_class)
        for before, after in zip(align.T, inside.T, strict=True):
            if number == 1:
                canvas.line([at(before), at(after)], "bound")
                x, y = at(before)
                canvas.dot(x, y, "b", 3)
    canvas.text(120, 60, "kept (base)", "a")
    canvas.text(24, 162, "new (align)", "b")
    canvas.text(0, 182, "grey: the base's subspace", "soft")
    canvas.text(half, 162, "into the subspace", "b")
    canvas.text(96, 148 + 190, "merged", "c")
    spectrum = torch.tensor([1.0, 0.7, 0.5, 0.3, 0.2, 0.1], dtype=torch.float64)
    opened = gate_values(spectrum[None], Gate().kappa, Gate().quantile)[0]
    x, y = linear(-0.5, 5.5, half, PICTURE - 20), linear(0, 1, 340, 225)
    for index, (value, gate) in enumerate(zip(spectrum.tolist(), opened.tolist(), strict=True)):
        canvas.line([(x(index), y(0)), (x(index), y(value))], "column a")
        canvas.dot(x(index), y(gate), "b", 5)
    canvas.line([(half, 340), (PICTURE - 20, 340)])
    canvas.text(half, 358, "directions, strong to weak", "soft")
    canvas.text(half + 80, 232, "singular value", "a")
    canvas.text(half + 80, 250, "gate", "b")
    return canvas, "A merge in four steps: two sides, aligned, weighed by their shares, gated by direction."


def prototypes() -> tuple[Canvas, str]:
    """Test images of some bundled classes and their prototypes, projected to the two main directions of the latter."""
    from onea.model.engine import Engine
    from onea.model.learning.images import read_unlabelled
    from onea.research.data.sources import load_dataset
    from onea.vit.heads import cosine_scores
    from onea.vit.hooks import NO_HOOKS
    from onea.vit.network_config import BUNDLED

    data, engine = load_dataset("glyphs-mini"), Engine(BUNDLED, "cpu", "fp32", 1, mirror=False, image_size=56)
    classes = max(data.groups, key=lambda group: len(group.classes)).classes[:6]

    def features(split: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [row for row, label in enumerate(split.labels) if label in classes]
        pixels = read_unlabelled(split.pixels[rows], engine.side).pixels
        return engine.features(pixels, NO_HOOKS), torch.tensor([classes.index(split.labels[row]) for row in rows])

    (train, labels), (test, truth) = features(data.train), features(data.test)
    means = torch.stack([train[labels == label].mean(0) for label in range(len(classes))])
    correct = int((cosine_scores(test, means).argmax(1) == truth).sum())
    centre, plane = means.mean(0), torch.linalg.svd(means - means.mean(0)).Vh[:2]
    points, stars = ((rows - centre) @ plane.T for rows in (test, means))
    on_plane = int((torch.cdist(points, stars).argmin(1) == truth).sum())
    both = torch.cat([points, stars])
    canvas = Canvas(PICTURE)
    x = linear(float(both[:, 0].min()), float(both[:, 0].max()), 16, PICTURE - 110)
    y = linear(float(both[:, 1].min()), float(both[:, 1].max()), 300, 50)
    canvas.text(0, 16, f"Features of {len(truth)} test images, on a plane", "head")
    for point, label in zip(points.tolist(), truth.tolist(), strict=True):
        star = stars[label].tolist()
        canvas.line([(x(point[0]), y(point[1])), (x(star[0]), y(star[1]))], "leader")
    for point in points.tolist():
        canvas.dot(x(point[0]), y(point[1]), "a", 4)
    for star in stars.tolist():
        canvas.dot(x(star[0]), y(star[1]), "b", 7)
    places = apart([y(star[1]) for star in stars.tolist()], 16, 40, 305)
    for label, (star, place) in enumerate(zip(stars.tolist(), places, strict=True)):
        name = data.classes[classes[label]].removeprefix("greek ").replace(" letter", "")
        canvas.text(x(star[0]) + 10, place + 4, name, "b")
    canvas.text(0, 330, f"Lines lead to an image's own prototype. On this plane {on_plane} of {len(truth)} are", "soft")
    canvas.text(0, 347, f"nearest to it; in all {means.shape[1]} dimensions, which predictions use, {correct}.", "soft")
    return canvas, "Features of test images around the prototypes of their classes."


def _columns(canvas: Canvas, values: tuple[int, ...], title: str, left: float, top: float, css_class: str) -> None:
    """A bar chart in half the width, with the value of each bar."""
    width = PICTURE / 2 - 16
    canvas.text(left, top + 14, title, "strong")
    x = linear(-0.5, len(values) - 0.5, left, left + width)
    y = linear(0, 38, top + 132, top + 36)
    for place, value in enumerate(values):
        canvas.line([(x(place), y(0)), (x(place), y(value))], f"column {css_class}")
        canvas.text(x(place), y(value) - 4, str(value), "soft", "middle")
    canvas.line([(left, y(0)), (left + width, y(0))])


def long_tailed_and_step_imbalanced() -> tuple[Canvas, str]:
    """A long-tailed stream and a step-imbalanced one: classes of each task, images of each class."""
    classes, tasks = 100, 10
    step = make_stream(classes=classes, tasks=tasks, gamma=0.01, seed=1)
    even = make_stream(classes=classes, tasks=tasks, kind="balanced", seed=1, long_tail=0.1, n_max=500)
    canvas, half = Canvas(PICTURE), PICTURE / 2
    for row, (name, stream, css_class) in enumerate((("Long-tailed", even, "b"), ("Step-imbalanced", step, "a"))):
        top = row * 190.0
        canvas.text(0, top + 14, name, "head")
        _columns(canvas, stream.sizes, "classes of each task", 0, top + 20, css_class)
        images = sorted(stream.samples or [500] * classes, reverse=True)
        canvas.text(half, top + 34, "images of each class", "strong")
        x, y = linear(0, classes - 1, half + 34, PICTURE - 6), linear(0, 500, top + 152, top + 56)
        for value in (0, 250, 500):
            canvas.line([(half + 34, y(value)), (PICTURE - 6, y(value))], "axis" if value == 0 else "grid")
            canvas.text(half + 28, y(value) + 4, str(value), "soft", "end")
        canvas.line([(x(place), y(value)) for place, value in enumerate(images)], f"curve {css_class}")
        canvas.text(0, top + 170, "tasks in order of arrival", "soft")
        canvas.text(PICTURE - 6, top + 170, "classes by size", "soft", "end")
    return canvas, "A long-tailed stream has equal tasks and unequal classes; a step-imbalanced one the reverse."


def task_sizes() -> tuple[Canvas, str]:
    """The sizes of a step-imbalanced stream, sorted and shuffled."""
    stream = make_stream(classes=100, tasks=10, gamma=0.01, seed=1)
    canvas = Canvas(PICTURE)
    canvas.text(0, 16, "100 classes in ten tasks, gamma 0.01", "head")
    _columns(canvas, tuple(sorted(stream.sizes, reverse=True)), "computed", 0, 22, "rest")
    _columns(canvas, stream.sizes, "shuffled by the seed", PICTURE / 2, 22, "a")
    return canvas, "Sizes of tasks from largest to smallest, and in order of arrival."


# runs


def records(data: str, *methods: str) -> list[Record]:
    """Seed 1 of methods on a dataset, with their titles."""
    available = [runs(data)[name] for name in methods if name in runs(data)]
    return [method.seeds[1] | {"title": method.title} for method in available]


def frame(canvas: Canvas, place: tuple[float, float, float, float], ticks: Sequence[float], unit: str = "") -> Any:
    """Grid lines of a panel (left, top, right, bottom) at these values; returns its vertical scale."""
    left, top, right, bottom = place
    y = linear(ticks[0], ticks[-1], bottom, top)
    for value in ticks:
        canvas.line([(left, y(value)), (right, y(value))], "axis" if value == ticks[0] else "grid")
        canvas.text(left - 6, y(value) + 4, f"{value:g}{unit}", "soft", "end")
    return y


def curves(records: Sequence[Record], title: str, label: str) -> tuple[Canvas, str]:
    """Accuracy after each task, with a name at the end of each line; the first line is emphasised."""
    canvas, tasks = Canvas(PICTURE), len(records[0]["metrics"]["A"])
    canvas.text(0, 16, title, "head")
    low = 10 * int(min(min(record["metrics"]["A"]) for record in records) // 10)
    y = frame(canvas, (34, 36, PICTURE - 130, 280), range(low, 101, 10))
    x = linear(1, tasks, 44, PICTURE - 134)
    css_classes = dict(zip((str(record["title"]) for record in records), ("a", "rest", "c", "b"), strict=False))
    ends = apart([y(record["metrics"]["A"][-1]) for record in records], 17, 36, 280)
    for record, end in zip(records, ends, strict=True):
        line, css_class = record["metrics"]["A"], css_classes[record["title"]]
        canvas.line([(x(task + 1), y(value)) for task, value in enumerate(line)], f"curve {css_class}")
        words = f"{record['title'].split(' (')[0]} {line[-1]:.1f}"
        canvas.text(PICTURE - 126, end + 4, words, css_class if css_class != "rest" else "soft")
    for task in range(1, tasks + 1, 1 if tasks <= 10 else 3):
        canvas.text(x(task), 297, str(task), "soft", "middle")
    canvas.text(PICTURE - 130, 314, "tasks learned", "soft", "end")
    return canvas, label


def weights(run: Record) -> tuple[Canvas, str]:
    """The base of each merge, and the share of the smaller side."""
    canvas, sizes = Canvas(PICTURE), run["stream"]["sizes"]
    canvas.text(0, 16, "Share of the smaller side in each merge", "head")
    y = frame(canvas, (34, 44, PICTURE, 220), (0, 0.1, 0.2, 0.3, 0.4, 0.5))
    x = linear(1.5, len(sizes) + 0.5, 40, PICTURE - 6)
    for index, task in enumerate(run["tasks"]):
        if merge := task.get("merge"):
            css_class = "a" if merge["base"] == "accumulated" else "b"
            share = float(merge["align_share"])
            canvas.line([(x(index + 1), y(0)), (x(index + 1), y(share))], f"column {css_class}")
            canvas.text(x(index + 1), y(share) - 5, f"{share:.2f}", css_class, "middle")
            canvas.text(x(index + 1), 237, f"{sum(sizes[:index])}+{sizes[index]}", "soft", "middle")
    canvas.text(PICTURE, 254, "old + new classes", "soft", "end")
    canvas.text(40, 276, "blue: the merged adapter is the base", "a")
    canvas.text(40, 293, "orange: the new adapter is the base", "b")
    return canvas, "The smaller side's share in each merge of One-A on CIFAR-100."


def gates_by_direction(run: Record) -> tuple[Canvas, str]:
    """The gates of the base's directions in the merge of the largest task: layers thin, their mean thick."""
    _, analysis = analysed_merge(run, LARGEST_TASK)
    canvas, half = Canvas(PICTURE), PICTURE / 2
    canvas.text(0, 16, "Gates: share of the step", "head")
    series = {kind: [parse_numbers(layer["gate"]) for layer in analysis[kind]["layers"]] for kind in analysis}
    highest = max(value for lines in series.values() for line in lines for value in line)
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5) if highest / step <= 4)
    ticks = [round(step * count, 2) for count in range(ceil(highest / step) + 1)]
    for number, (kind, lines) in enumerate(series.items()):
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
    return canvas, "Gates of each direction."


def matrix(run: Record) -> tuple[Canvas, str]:
    """Accuracy of each task after each task."""
    canvas, rows = Canvas(PICTURE), run["metrics"]["matrix"]
    side = (PICTURE - 86) / len(rows)
    canvas.text(0, 16, "Accuracy of each task, %", "head")
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


def percentage(correct: int, total: int) -> Mean:
    """A percentage with its Wilson interval."""
    low, high = wilson_interval(correct, total)
    return Mean(100 * correct / total, 100 * low, 100 * high, total)


def grocery_history(updates: Sequence[dict[str, Any]]) -> tuple[Canvas, str]:
    """Held-out accuracy: photos of each update, and of all classes so far."""
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
            accuracy = percentage(round(update[f"{side}_accuracy"] * update[count]), update[count])
            words = f"+{update['new_classes']}" if side == "held_out" else f"{update['known']} classes"
            rows.append(DotRow(f"{update['version']} {update['name']}, {words}", [(accuracy, "hollow")]))
        dots(canvas, rows, Panel(8, top + 24, PICTURE - 8), "", (0, 100))
        top = canvas.height
    return canvas, "Held-out accuracy after each update, of its own classes and of all."


def grocery_classes(example: dict[str, Any]) -> tuple[Canvas, str]:
    """The products with the lowest accuracy, and the product that each is mostly misclassified as."""
    canvas, mistakes = Canvas(PICTURE), {}
    for mistake in reversed(example["confusions"]):  # the most frequent come first
        mistakes[mistake["class"]] = mistake
    worst = example["classes"][:WORST]
    canvas.text(0, 16, f"Test photos correct, %: the {WORST} worst of {len(example['classes'])} products", "head")
    canvas.text(PICTURE, 34, "mostly misclassified as", "soft", "end")
    rows = [DotRow(item["class"], [(percentage(item["correct"], item["images"]), "hollow")]) for item in worst]
    dots(canvas, rows, Panel(0, 40, PICTURE - 184), "", (0, 100))
    for number, item in enumerate(worst):
        mistake = mistakes.get(item["class"], {"predicted": "unknown", "images": item["unknown"]})
        words = f"{mistake['predicted']}, {mistake['images']} of {item['images']}"
        canvas.text(PICTURE, 44 + ROW * (number + 0.6), words, "soft", "end")
    return canvas, "Accuracy of the worst products, and the product that each is mostly misclassified as."


def main() -> None:
    """Write all figures."""
    example = json.loads(GROCERY.read_text("utf-8"))
    three = records("cifar100", ONE_A, PLUS, "simplecil")
    plus = records("cub200", PLUS, MOS, ONE_A)
    one_a = three[0]
    figures = {
        "streams": long_tailed_and_step_imbalanced(),
        "sizes": task_sizes(),
        "network": network(),
        "merge-steps": merge_steps(),
        "prototypes": prototypes(),
        "weights": weights(one_a),
        **({"gates": gates_by_direction(one_a)} if has_analysis(one_a) else {}),
        "matrix": matrix(one_a),
        "curves": curves(three, "CIFAR-100, ten tasks, seed 1: accuracy, %", "Accuracy after each task."),
        "one-a-plus": curves(
            plus, "CUB-200, 20 tasks, seed 1: accuracy, %", "Accuracy over all classes seen after each of 20 tasks."
        ),
        "frontier": frontier(),
        "grocery-history": grocery_history(example["updates"]),
        "grocery-classes": grocery_classes(example),
    }
    for name, (canvas, label) in figures.items():
        path = OUT / f"{name}.svg"
        path.write_text(canvas.file(label), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
