# SPDX-License-Identifier: Apache-2.0
"""Pictures of the idea: the network with its adapter, a merge in four steps, features around their prototypes."""

from __future__ import annotations

from typing import Any

import torch
from svg import PICTURE, Canvas, apart, linear

from onea.merging.fusion import Gate, fuse, gates
from onea.research.streams import make_stream

_SHARE = 0.4  # of the smaller side, in the example of a merge


def network() -> tuple[Canvas, str]:
    """One block of the network with its adapter, and how many numbers are trained and kept."""
    from onea.vit.adapter import Adapters
    from onea.vit.backbones import load_backbone
    from onea.vit.embedded import DEFAULT

    vit = load_backbone(DEFAULT)
    adapters = Adapters(vit.depth, vit.width, rank=64, generator=torch.Generator())
    frozen, small = (sum(value.numel() for value in each.parameters()) / 1e6 for each in (vit, adapters))
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
    for name, left, top, width, look in (
        ("attention", 40, 57, 90, "box"),
        ("MLP", 245, 57, 90, "box"),
        ("down", 205, 117, 70, "box b"),
        ("up", 300, 117, 70, "box b"),
    ):
        canvas.rect(left, top, width, 36, look)
        canvas.text(left + width / 2, top + 23, name, anchor="middle")
    canvas.dot(410, 75, "hollow", 8)
    canvas.text(410, 80, "+", anchor="middle")
    canvas.text(150, 176, f"adapter, trained: {small:.2f} million in all", "b")
    return canvas, "A block of the network: attention, then an MLP with the adapter, two small matrices, beside it."


def merge_steps() -> tuple[Canvas, str]:
    """A merge of 2 x 2 matrices whose base has one direction only, step by step, and gates of a base with six."""
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
        for matrix, look in sides if number < 2 else ((merged, "c"),):
            for column in matrix.T:
                canvas.arrow(at((0, 0)), at(column), look)
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
    opened = gates(spectrum[None], Gate().kappa, Gate().quantile)[0]
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
    """Test images of some embedded classes and their prototypes, in the plane that tells the prototypes apart best."""
    from onea.model.engine import Engine
    from onea.model.learning.images import read_unlabelled
    from onea.research.data.sources import load_dataset
    from onea.vit.embedded import FAST
    from onea.vit.heads import cosine_scores
    from onea.vit.hooks import NO_HOOKS

    data, engine = load_dataset("glyphs-mini"), Engine(FAST, "cpu", "fp32", 1, mirror=False)
    classes = max(data.groups, key=lambda group: len(group.classes)).classes[:6]

    def features(split: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [row for row, label in enumerate(split.labels) if label in classes]
        pixels = read_unlabelled(split.pixels[rows], engine.side).pixels
        return engine.features(pixels, NO_HOOKS), torch.tensor([classes.index(split.labels[row]) for row in rows])

    (seen, labels), (asked, truth) = features(data.train), features(data.test)
    means = torch.stack([seen[labels == label].mean(0) for label in range(len(classes))])
    right = int((cosine_scores(asked, means).argmax(1) == truth).sum())
    centre, plane = means.mean(0), torch.linalg.svd(means - means.mean(0)).Vh[:2]
    points, stars = ((each - centre) @ plane.T for each in (asked, means))
    here = int((torch.cdist(points, stars).argmin(1) == truth).sum())
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
    canvas.text(0, 330, f"Lines lead to an image's own prototype. On this plane {here} of {len(truth)} are", "soft")
    canvas.text(0, 347, f"nearest to it; in all {means.shape[1]} dimensions, where answers are made, {right}.", "soft")
    return canvas, "Features of test images around the prototypes of their classes."


def _columns(canvas: Canvas, values: tuple[int, ...], title: str, left: float, top: float, look: str) -> None:
    """Columns with their values on top, in half the width."""
    width = PICTURE / 2 - 16
    canvas.text(left, top + 14, title, "strong")
    x = linear(-0.5, len(values) - 0.5, left, left + width)
    y = linear(0, 38, top + 132, top + 36)
    for place, value in enumerate(values):
        canvas.line([(x(place), y(0)), (x(place), y(value))], f"column {look}")
        canvas.text(x(place), y(value) - 4, str(value), "soft", "middle")
    canvas.line([(left, y(0)), (left + width, y(0))])


def streams() -> tuple[Canvas, str]:
    """A long-tailed stream and a step-imbalanced one: classes of each task, images of each class."""
    classes, tasks = 100, 10
    step = make_stream(classes=classes, tasks=tasks, gamma=0.01, seed=1)
    even = make_stream(classes=classes, tasks=tasks, kind="balanced", seed=1, long_tail=0.1, n_max=500)
    canvas, half = Canvas(PICTURE), PICTURE / 2
    for row, (name, stream, look) in enumerate((("Long-tailed", even, "b"), ("Step-imbalanced", step, "a"))):
        top = row * 190.0
        canvas.text(0, top + 14, name, "head")
        _columns(canvas, stream.sizes, "classes of each task", 0, top + 20, look)
        images = sorted(stream.samples or [500] * classes, reverse=True)
        canvas.text(half, top + 34, "images of each class", "strong")
        x, y = linear(0, classes - 1, half + 34, PICTURE - 6), linear(0, 500, top + 152, top + 56)
        for value in (0, 250, 500):
            canvas.line([(half + 34, y(value)), (PICTURE - 6, y(value))], "axis" if value == 0 else "grid")
            canvas.text(half + 28, y(value) + 4, str(value), "soft", "end")
        canvas.line([(x(place), y(value)) for place, value in enumerate(images)], f"curve {look}")
        canvas.text(0, top + 170, "tasks in order of arrival", "soft")
        canvas.text(PICTURE - 6, top + 170, "classes by size", "soft", "end")
    return canvas, "A long-tailed stream has equal tasks and unequal classes; a step-imbalanced one the reverse."


def sizes() -> tuple[Canvas, str]:
    """How the sizes of a step-imbalanced stream are made."""
    stream = make_stream(classes=100, tasks=10, gamma=0.01, seed=1)
    canvas = Canvas(PICTURE)
    canvas.text(0, 16, "100 classes in ten tasks, gamma 0.01", "head")
    _columns(canvas, tuple(sorted(stream.sizes, reverse=True)), "computed", 0, 22, "rest")
    _columns(canvas, stream.sizes, "shuffled by the seed", PICTURE / 2, 22, "a")
    return canvas, "Sizes of tasks from largest to smallest, and in order of arrival."
