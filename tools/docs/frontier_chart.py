# SPDX-License-Identifier: Apache-2.0
"""Accuracy of models by image size, training and time: tables, and the figure of models.md.

Accuracies are those of benchmarks/models/frontier.py on held-out training photos: the mean over three sets of photos
and two splits. Seconds are those of benchmarks/speed/teaching.py; where they are missing, the figure shows accuracy
against the image size instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from charts import PICTURE, Canvas, linear
from measured import NOT_MEASURED, SIZES, lines, teaching, teaching_seconds
from results import table

from onea.vit.network_config import BUNDLED, IMAGE_SIZE

FRONTIER = "models/frontier-nvidia-h200.csv"
CLIP = "models/frontier-clip-nvidia-h200.csv"
CLIP_NETWORK = "vit_base_patch16_clip_quickgelu_224.openai"
TRIALS = "models/frontier-trials-nvidia-h200.csv"
SETS = {"grocery": "Grocery", "cub200": "CUB-200", "cifar100": "CIFAR-100"}
TRAININGS = {"frozen": "fast", "auto": "auto"}
"""Trainings of the file, and the presets that have them."""
PHOTOS = "20"  # of each class

# Trainings of the trials, in which ``auto`` had three epochs and an update of any size trained.
_TITLES = {
    ("frozen", "0.0"): "nothing trained",
    ("1-epoch", "0.1"): "1 epoch",
    ("2-epochs", "0.1"): "**2 epochs** (`auto`)",
    ("auto", "0.1"): "3 epochs",
    ("2-epochs", "0.05"): "2 epochs, rate 0.05",
    ("2-epochs", "0.2"): "2 epochs, rate 0.2",
    ("auto", "0.05"): "3 epochs, rate 0.05",
    ("auto", "0.2"): "3 epochs, rate 0.2",
    ("quarter", "0.1"): "3 epochs, a quarter of the patches kept",
    ("last-4", "0.1"): "3 epochs, last 4 blocks",
    ("thorough", "0.1"): "all blocks, all patches, 8 epochs",
}


def accuracies(file: str, **where: str) -> dict[tuple[str, str], float]:
    """Accuracy by set and split, of the lines of a file with these values."""
    return {
        (line["data"], line["split"]): float(line["accuracy"])
        for line in lines(file)
        if all(line[name] == value for name, value in where.items())
    }


def point(training: str, size: int) -> float | None:
    """Accuracy of a training at an image size: mean over all sets and splits; None if one is missing."""
    found = accuracies(FRONTIER, photos=PHOTOS, updates="1", training=training, image_size=str(size))
    return fmean(found.values()) if len(found) == 2 * len(SETS) else None


def sizes() -> list[int]:
    """The image sizes of the file."""
    return sorted({int(line["image_size"]) for line in lines(FRONTIER)})


# tables


def presets() -> str:
    """Each preset of models: image size, training, seconds, accuracy."""
    rows = []
    for preset, trains in (
        ("fast", "nothing; one pass per photo"),
        ("auto", "adapters in the upper 7 of 12 blocks, on half of the patches, for up to three epochs"),
        ("accurate", "as `auto`"),
    ):
        accuracy = point("frozen" if preset == "fast" else "auto", SIZES[preset])
        shown = NOT_MEASURED if accuracy is None else f"{accuracy:.1f}"
        seconds = (teaching_seconds(preset, precision) for precision in ("auto", "fp32"))
        rows.append((f"`{preset}`", trains, f"{SIZES[preset]} px", *seconds, shown))
    return table(("preset", "what it trains", "images", "seconds, bf16", "seconds, fp32", "accuracy, %"), rows, words=2)


def by_size() -> str:
    """Accuracy by image size and training: mean over sets and splits, and of each set."""
    rows = []
    for training, preset in TRAININGS.items():
        for data, title in ((None, "mean"), *SETS.items()):
            cells = []
            for size in sizes():
                found = accuracies(FRONTIER, photos=PHOTOS, updates="1", training=training, image_size=str(size))
                values = [value for (name, _), value in found.items() if data in (None, name)]
                cells.append(f"{fmean(values):.1f}" if values else "")
            name = "nothing trained" if preset == "fast" else f"`{preset}`"
            rows.append((f"**{name}, {title}**" if data is None else f"{name}, {title}", *cells))
    return table(("accuracy, %", *(f"{size} px" for size in sizes())), rows, words=1)


def few_and_many() -> str:
    """Accuracy by image size, small ones included, with 20 photos of a class and with all: mean over sets, split 0."""
    found = sorted({int(line["image_size"]) for line in lines(TRIALS) if line["photos"] == "0"})
    rows = []
    for title, photos, training in (
        ("nothing trained, 20 photos of a class", PHOTOS, "frozen"),
        ("nothing trained, all photos", "0", "frozen"),
        ("`auto`, 20 photos of a class", PHOTOS, "2-epochs"),
    ):
        where = {"photos": photos, "updates": "1", "split": "0", "training": training}
        if training != "frozen":
            where["learning_rate"] = "0.1"
        means = (fmean(accuracies(TRIALS, **where, image_size=str(size)).values()) for size in found)
        rows.append((title, *(f"{mean:.1f}" for mean in means)))
    return table(("mean accuracy, %", *(f"{size} px" for size in found)), rows, words=1)


def trials(updates: str, size: str) -> str:
    """Accuracy of each training of the trials at one size, on split 0."""
    rows = []
    for (training, rate), title in _TITLES.items():
        where = {"photos": PHOTOS, "updates": updates, "image_size": size, "split": "0"}
        found = accuracies(TRIALS, **where, training=training, learning_rate=rate)
        values = [found.get((data, "0")) for data in SETS]
        if any(value is not None for value in values):
            all_sets = [value for value in values if value is not None]
            mean = f"{fmean(all_sets):.1f}" if len(all_sets) == len(SETS) else ""
            rows.append((title, *("" if value is None else f"{value:.1f}" for value in values), mean))
    return table(("", *SETS.values(), "mean"), rows, words=1)


def clip() -> str:
    """CLIP ViT-B/16 beside the bundled network at 224 pixels, on split 0."""
    rows = []
    for title, file in (("DINOv2 ViT-S/14", FRONTIER), ("CLIP ViT-B/16", CLIP)):
        for training, preset in TRAININGS.items():
            where = {"photos": PHOTOS, "updates": "1", "image_size": "224", "split": "0"}
            found = accuracies(file, **where, training=training)
            values = [found[data, "0"] for data in SETS]
            name = "nothing trained" if preset == "fast" else f"`{preset}`"
            rows.append((f"{title}, {name}", *(f"{value:.1f}" for value in (*values, fmean(values)))))
    return table(("accuracy, %", *SETS.values(), "mean"), rows, words=1)


def strong_networks() -> str:
    """Strong networks: size, operations, and the accuracy of those that could be measured here."""
    from timm.models import get_pretrained_cfg

    from onea.research.catalogue import BUNDLED_GIGAFLOPS, STRONG_NETWORKS

    def measured(file: str, size: int) -> str:
        where = {"photos": PHOTOS, "updates": "1", "image_size": str(size), "split": "0"}
        return ", ".join(f"{fmean(accuracies(file, **where, training=name).values()):.1f}" for name in TRAININGS)

    rows = [(f"`{BUNDLED}`", "", str(IMAGE_SIZE), "1", measured(FRONTIER, IMAGE_SIZE))]
    for name, network in STRONG_NETWORKS.items():
        config = get_pretrained_cfg(name)
        times = f"{network.gigaflops / BUNDLED_GIGAFLOPS:.0f}"
        found = measured(CLIP, 224) if name == CLIP_NETWORK else ""
        rows.append((f"`{name}`", str(network.megabytes), str(config.input_size[-1]), times, found))
    return table(("network", "MB", "px", "×", "%"), rows, words=1)


# the figure


def _curves() -> tuple[dict[str, list[tuple[float, float, int]]], bool]:
    """For each training its points (place, accuracy, image size), and whether the place is the measured seconds."""
    seconds = {
        ("frozen" if preset == "fast" else "auto", size): value
        for (preset, size, precision), value in teaching().items()
        if precision == "auto"
    }
    known = {training: [(size, point(training, size)) for size in sizes()] for training in TRAININGS}
    timed = all(sum((training, size) in seconds for size, _ in known[training]) > 1 for training in TRAININGS)
    curves: dict[str, list[tuple[float, float, int]]] = {}
    for training, values in known.items():
        for size, accuracy in values:
            place = seconds.get((training, size)) if timed else float(size)
            if accuracy is not None and place is not None:
                curves.setdefault(training, []).append((place, accuracy, size))
    return curves, timed


def picture() -> tuple[Canvas, str]:
    """Accuracy against the seconds for 1,000 photos, or against the image size; presets are named."""
    curves, timed = _curves()
    canvas = Canvas(PICTURE)
    canvas.text(0, 16, "Accuracy on held-out photos, %", "head")
    left, right, top, bottom = 34.0, PICTURE - 22.0, 36.0, 290.0
    values = [accuracy for curve in curves.values() for _, accuracy, _ in curve]
    low, high = 5 * int(min(values) // 5), 5 * (int(max(values) // 5) + 1)
    y = linear(low, high, bottom, top)
    for value in range(low, high + 1, 5):
        canvas.line([(left, y(value)), (right, y(value))], "axis" if value == low else "grid")
        canvas.text(left - 6, y(value) + 4, str(value), "soft", "end")
    places = [place for curve in curves.values() for place, _, _ in curve]
    x = linear(0 if timed else min(places), max(places), left + (0 if timed else 12), right - 12)
    _ticks(canvas, x, places, timed, (left, bottom))
    for (training, curve), css_class in zip(curves.items(), ("b", "a"), strict=True):
        canvas.line([(x(place), y(accuracy)) for place, accuracy, _ in sorted(curve)], f"curve {css_class}")
        named = {SIZES[preset]: preset for preset in SIZES if (preset == "fast") == (training == "frozen")}
        for place, accuracy, size in curve:
            words = f"{named[size]}, {size}" if size in named else str(size) if timed else ""
            note = f"{named.get(size, TRAININGS[training])}, {size} pixels: {accuracy:.1f} %"
            canvas.dot(x(place), y(accuracy), css_class, 6 if size in named else 3.5, note)
            style, here = css_class if size in named else "soft", (x(place), y(accuracy))
            if words and timed and training == "frozen":  # a steep curve
                canvas.text(here[0] - 9, here[1] + 4, words, style, "end")
            elif words:
                canvas.text(here[0], here[1] + 21, words, style, "end" if place == max(places) else "middle")
    label = "Accuracy by seconds of teaching, image size and preset." if timed else "Accuracy by image size and preset."
    return canvas, label


def _ticks(canvas: Canvas, x: Any, places: Sequence[float], timed: bool, corner: tuple[float, float]) -> None:
    """Values below the horizontal axis, and its unit."""
    _, bottom = corner
    step = next(step for step in (10, 20, 50, 100, 200, 500, 1000) if max(places) / step <= 8)
    shown = range(0, int(max(places)) + 1, step) if timed else sorted({int(place) for place in places})
    for value in shown:
        canvas.text(x(value), bottom + 17, str(value), "soft", "middle")
    unit = "seconds for 1,000 photos on two CPU cores (labels: image size)" if timed else "side of the images, pixels"
    canvas.text(PICTURE, bottom + 34, unit, "soft", "end")


TABLES: Mapping[str, Callable[..., str]] = {
    "presets": presets,
    "frontier": by_size,
    "few-and-many": few_and_many,
    "trials": trials,
    "clip": clip,
    "strong-networks": strong_networks,
}
