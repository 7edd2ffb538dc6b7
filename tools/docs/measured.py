# SPDX-License-Identifier: Apache-2.0
"""Numbers and tables from the results in benchmarks/: speed, trials, accuracy of models."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean, median
from typing import Any, NamedTuple

from results import ROOT, table

from onea.vit.network_config import ACCURATE_IMAGE_SIZE, IMAGE_SIZE

BENCHMARKS = ROOT / "benchmarks"
GPU = "speed/bench-nvidia-h200-16-random-vit_base_patch16_224.csv"
CPU = "speed/bench-amd-epyc-2-vit_small_patch14_dinov2.csv"
EXPORT = "speed/bench-amd-epyc-2-vit_small_patch14_dinov2-export.csv"
NOT_MEASURED = "not measured"


@cache
def lines(file: str) -> tuple[dict[str, Any], ...]:
    """The lines of a CSV, or of a file with a JSON object on each line; none if the file does not exist."""
    path = BENCHMARKS / file
    text = path.read_text("utf-8").splitlines() if path.exists() else []
    return tuple(csv.DictReader(text)) if file.endswith(".csv") else tuple(map(json.loads, text))


# results of `onea bench`


class Rate(NamedTuple):
    """A row of a speed table: its title; measure, setting and unit in the file."""

    title: str
    measure: str
    setting: str
    unit: str


_INFERENCE = (
    Rate("inference, batch 256, images/s", "inference", "batch 256", "images/s"),
    Rate("inference, batch 32, images/s", "inference", "batch 32", "images/s"),
    Rate("one image, ms", "inference", "batch 1", "ms"),
)
ON_GPU = (
    Rate("training, images/s", "training", "batch 128", "images/s"),
    *_INFERENCE,
    Rate("memory while training, GB", "peak memory", "training, batch 128", "MB"),
    Rate("merge of 12 blocks in float64 on the GPU, ms", "merge", "12 blocks, rank 128, float64", "ms"),
)


ON_CPU = (Rate("training, images/s", "training", "batch 32", "images/s"), *_INFERENCE)


def bench(file: str, measure: str, setting: str, unit: str, column: str) -> float | None:
    """A value from a file of `onea bench`; None if it was not measured."""
    key = (measure, setting, unit, column)
    matches = (line for line in lines(file) if (line["measure"], line["setting"], line["unit"], line["column"]) == key)
    return next((float(line["value"]) for line in matches), None)


def speed(file: str, rates: Sequence[Rate], precision: str) -> str:
    """The speed of the plain loop, of onea in fp32 and at its fastest, and the speed-up."""
    if not lines(file):
        return NOT_MEASURED
    rows = []
    for title, measure, setting, unit in rates:
        columns = ("plain loop", "same numerics", "fast")
        plain, full, fast = (bench(file, measure, setting, unit, column) for column in columns)
        if fast is None:
            continue
        times = "" if not plain else f"{fast / plain if unit == 'images/s' else plain / fast:.1f}x"
        rows.append([title, *(_format(value, unit) for value in (plain, full, fast)), times])
    return table(("", "plain loop", "onea, fp32", f"onea, {precision}", "speed-up"), rows, words=1)


def _format(value: float | None, unit: str) -> str:
    """
    >>> _format(4784.83, "images/s"), _format(8.53, "ms"), _format(10636.8, "MB"), _format(None, "ms")
    ('4,785', '8.5', '10.6', '')
    """
    if value is None:
        return ""
    if unit == "MB":
        return f"{value / 1000:.1f}"  # printed as GB
    return f"{value:.1f}" if unit == "ms" and value < 20 else f"{value:,.0f}"


def export() -> str:
    """Speed-up of exported files over PyTorch in fp32."""
    rows = []
    for column in ("PyTorch bf16", "ONNX Runtime fp32", "ONNX Runtime int8", "OpenVINO"):
        cells = [column]
        for setting in ("batch 1", "batch 32"):
            plain, other = (bench(EXPORT, "inference", setting, "ms", name) for name in ("PyTorch fp32", column))
            cells.append(f"{plain / other:.1f}x" if plain and other else "")
        rows.append(cells)
    return table(("", "one image", "batch 32"), [row for row in rows if any(row[1:])], words=1)


def one_photo() -> str:
    """Median milliseconds of one answer, by image size."""
    medians = [line for line in lines("speed/one_photo-amd-epyc-2.csv") if line["turn"] == "median"]
    titles = {"old": "1f28aef, 112 px"}
    rows = [
        (titles.get(side, f"{side} px"), f"{float(line['predict_ms']):.0f}", f"{float(line['int8_ms']):.1f}")
        for line in medians
        for side in [line["side"]]
    ]
    return table(("ms", "`predict`", "int8 export"), rows, words=1)


# an old commit and the current code, measured in turn by gpu_turns.py

_LATER, _WHOLE, _TIMM = "training, later epochs", "training, 20 epochs with the first", "one image, {}, ours / timm"
_VIT, _ALL = "training, ViT-B/16, {}, images/s".format, "all 20 epochs, the first included"
_LAST = "adapters in the last 7 blocks, tokens cached, half of the patches"
_FROZEN = "all blocks for a fifth of the epochs, then the last 8, tokens cached, half of the patches"
# Title, way, file after ``gpu_turns-nvidia-h200``, section, measure, side.
TURNS = (
    (_VIT("later epochs"), "", "-frozen", "train", _LATER, "new"),
    (_VIT("later epochs"), "FP8", "-frozen", "train", _LATER, "new fp8"),
    (_VIT("later epochs"), _LAST, "-last-7", "train", _LATER, "new last 7, cached"),
    (_VIT(_ALL), "", "-frozen", "train", _WHOLE, "new"),
    (_VIT(_ALL), "FP8", "-frozen", "train", _WHOLE, "new fp8"),
    (_VIT(_ALL), _LAST, "-last-7", "train", _WHOLE, "new last 7, cached"),
    (_VIT(_ALL), _FROZEN, "-frozen", "train", _WHOLE, "new last 8 after 20%, cached"),
    (_VIT(_ALL), f"{_FROZEN}, FP8", "-frozen", "train", _WHOLE, "new last 8 after 20%, cached, fp8"),
    ("inference, ViT-B/16, batch 256, images/s", "", "-fp8", "infer", "inference", "new"),
    ("inference, ViT-B/16, batch 256, images/s", "FP8", "-fp8", "infer", "inference", "new fp8"),
    ("one image, bf16, not compiled: time, timm's = 1", "", "", "one", _TIMM.format("bf16"), "new"),
    ("one image, fp32, not compiled: time, timm's = 1", "", "", "one", _TIMM.format("fp32"), "new"),
    ("memory of fp32 training, MB", "", "", "memory", "peak memory, reserved", "new"),
    ("memory of fp32 training, MB", "plain loop", "", "memory", "peak memory, reserved", "plain"),
)


def turns() -> str:
    """The medians of both sides, and their ratio."""
    rows = []
    for title, way, file, section, what, side in TURNS:
        medians = {
            line["side"]: float(line["value"])
            for line in lines(f"speed/gpu_turns-nvidia-h200{file}.csv")
            if (line["section"], line["what"], line["turn"]) == (section, what, "median")
        }
        old, new = medians["old"], medians[side]
        when = "present" if file == "-frozen" else "earlier run"
        rows.append((title, ", ".join(filter(None, (when, way))), _digits(old), _digits(new), f"{new / old:.2f}"))
    return table(("", "way", "old commit", "this way", "ratio"), rows, words=2)


def _digits(value: float) -> str:
    """Three digits, or thousands.

    >>> _digits(4972.97), _digits(64.182), _digits(1.487)
    ('4,973', '64.2', '1.49')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 5 else f"{value:.2f}"


# models

# Runs of grocery.py on test photos: preset, way, row title.
TAUGHT = (
    ("auto", "at-once", "81 groceries, all at once"),
    ("auto", "stream", "81 groceries, 15 updates"),
    ("accurate", "at-once", "81 groceries, all at once, `accurate`"),
    ("accurate", "stream", "81 groceries, 15 updates, `accurate`"),
)
GROCERY = {"one H200": "models/grocery-nvidia-h200.jsonl", "two CPU cores": "models/grocery-amd-epyc-2.jsonl"}


def grocery_runs(preset: str, way: str, hardware: str = "one H200") -> list[dict[str, Any]]:
    """The last steps of runs on test photos with the image size of the preset."""
    chosen = (
        line
        for line in lines(GROCERY[hardware])
        if line["looked_at"] == "test" and line["params"].keys() <= {"preset", "seed"} and way in line
    )
    return [line[way]["steps"][-1] for line in chosen if line["params"].get("preset", "auto") == preset]


def models() -> str:
    """Accuracy of models: mean and range over seeds, on each hardware."""
    rows = []
    for preset, way, title in TAUGHT:
        for hardware in GROCERY:
            if steps := grocery_runs(preset, way, hardware):
                values = [step["accuracy"] for step in steps]
                span = f"{min(values):.1f} to {max(values):.1f}"
                rows.append((title, hardware, f"{fmean(values):.1f}", span, str(len(values))))
    return table(("test photos, accuracy in %", "on", "mean", "lowest to highest", "n"), rows, words=2)


def taught(preset: str, way: str) -> str:
    """Mean accuracy of models."""
    values = [step["accuracy"] for step in grocery_runs(preset, way)]
    return f"{fmean(values):.1f}" if values else NOT_MEASURED


def cost_of_updates() -> str:
    """Accuracy that models lose if they are taught in updates instead of all at once: points, lowest to highest."""
    gaps = []
    for preset in ("auto", "accurate"):
        ways = [[step["accuracy"] for step in grocery_runs(preset, way)] for way in ("at-once", "stream")]
        if all(ways):
            gaps.append(fmean(ways[0]) - fmean(ways[1]))
    return f"{min(gaps):.0f} to {max(gaps):.0f}" if min(gaps) >= 0.5 else f"up to {max(gaps):.0f}"


UNKNOWN = "models/unknown/unknown-amd-epyc-2.jsonl"
_TITLES = {"grocery": "Grocery", "cub200": "CUB-200", "cifar100": "CIFAR-100"}


def _unknown_runs() -> dict[str, list[dict[str, Any]]]:
    """The runs on test photos in which all classes were taught at once, by dataset and number of classes."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines(UNKNOWN):
        if line["looked_at"] == "test photos" and line["updates"] == 1:
            title = f"{_TITLES.get(line['data'], line['data'])}, {line['classes']} classes taught"
            groups.setdefault(title, []).append(line)
    return groups


SCALE = "speed/bench-amd-epyc-2-preset-fast-scale.csv"


def scale() -> str:
    """Time, memory and disk space of a model by its number of classes."""
    settings = list(dict.fromkeys(line["setting"] for line in lines(SCALE)))
    rows: dict[str, list[str]] = {}
    for line in lines(SCALE):
        value, digits = float(line["value"]), 1 if line["unit"] in ("ms", "MB") else 2
        rows.setdefault(f"{line['measure']}, {line['unit']}", []).append(f"{value:,.{digits}f}")
    return table(("", *settings), [(name, *values) for name, values in rows.items()], words=1)


MEMORY = "models/memory-amd-epyc-2.csv"
_TRIGGERS = {"fifth": "0.2", "": "0.33", "half": "0.5"}
_KEPT = {"0": "nothing", "pending": "`pending`", "2": "2", "5": "5", "10": "10", "20": "20"}
_AT_ONCE = {"once": "nothing; all photos at once"}


def memory() -> str:
    """Accuracy by the number of small copies of each class, in many updates and all at once."""
    titles = _KEPT | _AT_ONCE
    rows = [
        (
            title,
            _TRIGGERS[line["variant"]] if float(line["kilobytes_per_class"]) else "",
            f"{float(line['accuracy']):.1f}",
            line["trainings"],
            f"{float(line['kilobytes_per_class']):.0f}",
        )
        for kept, title in titles.items()
        for line in lines(MEMORY)
        if line["memory"] == kept
    ]
    return table(("photos kept of a class", "`trigger`", "accuracy", "trainings", "KB a class"), rows, words=2)


GAUSSIAN = "models/gaussian.csv"
_GAUSSIAN_DEFAULTS = (32, 800.0, 0.0)


def gaussian() -> str:
    """The best settings of the Gaussian classifier and the default ones, by their mean over sets and trainings."""
    scores: dict[tuple[int, float, float], dict[str, list[float]]] = {}
    for line in lines(GAUSSIAN):
        setting = int(line["directions"]), float(line["prior_images"]), float(line["ridge"])
        scores.setdefault(setting, {}).setdefault(line["training"], []).append(float(line["accuracy"]))
    means = {setting: [fmean(values) for values in by.values()] for setting, by in scores.items()}
    best = sorted(means, key=lambda setting: -fmean(means[setting]))[:5]
    rows = [
        (f"{directions}", f"{prior:.0f}", f"{ridge:g}", *(f"{mean:.2f}" for mean in means[directions, prior, ridge]))
        for directions, prior, ridge in dict.fromkeys([*best, _GAUSSIAN_DEFAULTS])
    ]
    return table(("directions", "prior images", "ridge", *next(iter(scores.values()))), rows, words=0)


def detectors() -> str:
    """AUROC of each published detector on the same features; means over seeds, and of the best one for each seed."""
    groups = _unknown_runs()
    if not groups:
        return NOT_MEASURED
    names = list(next(iter(groups.values()))[0]["auroc"])
    rows = [
        (name, *(f"{fmean(line['auroc'][name] for line in group):.1f}" for group in groups.values())) for name in names
    ]
    best = (f"{fmean(max(line['auroc'].values()) for line in group):.1f}" for group in groups.values())
    return table(("AUROC, %", *groups), [*rows, ("the best of these for each seed", *best)], words=1)


def unknown() -> str:
    """Recognition of photos of classes that were not taught: means over seeds."""
    groups = _unknown_runs()
    if not groups:
        return NOT_MEASURED

    def mean_of(group: list[dict[str, Any]], name: str) -> str:
        values = [line[name]["ours"] if name == "auroc" else line[name] for line in group if name in line]
        return f"{fmean(values):.1f}" if values else ""

    rates = ("known_called_unknown", "others_called_unknown", "auroc", "far_called_unknown")
    names = ("right", *rates, "calibration_error")
    rows = [(title, *(mean_of(group, name) for name in names), str(len(group))) for title, group in groups.items()]
    heads = ("test photos, %", "accuracy", "known called *unknown*", "others called *unknown*", "AUROC")
    return table((*heads, "far photos called *unknown*", "calibration error", "n"), rows, words=1)


EIGHT_BITS = "models/eight_bits.csv"


def eight_bits() -> str:
    """Accuracy of the bundled network in eight bits and of its float weights, and how far features moved."""
    readouts = {"ncm": "nearest mean", "rgda": "Gaussian"}
    rows = [
        (
            f"{_TITLES[line['data']]}, {readouts[line['readout']]}",
            *(f"{float(line[name]):.1f}" for name in ("float", "eight_bits")),
            f"{float(line['moved']):.1f}",
        )
        for line in lines(EIGHT_BITS)
    ]
    return table(("test images, %", "float32", "8 bits", "features moved by"), rows, words=1)


# seconds on two cores

TEACHING = "speed/teaching-amd-epyc-2.csv"
SIZES = {
    "fast": IMAGE_SIZE,
    "auto": IMAGE_SIZE,
    "accurate": ACCURATE_IMAGE_SIZE,
}  # unless another is given


def teaching() -> dict[tuple[str, int, str], float]:
    """Seconds of teaching 1,000 photos by preset, image size and precision: the median of the runs."""
    found: dict[tuple[str, int, str], list[float]] = {}
    for line in lines(TEACHING):
        params = json.loads(line["params"])
        if isinstance(params, dict) and params.keys() <= {"preset", "image_size", "precision", "threads", "verbose"}:
            preset = params.get("preset", "auto")
            key = (preset, params.get("image_size", SIZES[preset]), params.get("precision", "auto"))
            found.setdefault(key, []).append(float(line["learn_s"]))
    return {key: median(values) for key, values in found.items()}


def teaching_seconds(preset: str, precision: str = "auto") -> str:
    """Seconds of teaching 1,000 photos of 1920 x 1440 pixels in 20 classes."""
    value = teaching().get((preset, SIZES[preset], precision))
    return NOT_MEASURED if value is None else f"{value:.0f}"


def minutes(target: str, bf16: str) -> str:
    """Minutes of a Makefile target on two cores, with bf16 instructions (yes) or without (no)."""
    times = [
        float(line["seconds"]) / 60
        for line in lines("speed/first_contact_times.csv")
        if (line["hardware"], line["command"], line["bf16"]) == ("AMD EPYC, 2 cores", f"make {target}", bf16)
    ]
    return f"{times[-1]:.1f}" if times else NOT_MEASURED  # the last run


def one_more_class(column: str) -> str:
    """Seconds of one more class of 20 photos with the current code."""
    medians = [
        line
        for line in lines("speed/one_more_class-amd-epyc-2.csv")
        if (line["side"], line["turn"]) == ("new", "median")
    ]
    return f"{float(medians[-1][column]):.1f}" if medians else NOT_MEASURED


def demo() -> str:
    """The final output of `onea demo` on two cores."""
    path = BENCHMARKS / "speed/demo-amd-epyc-2.txt"
    return f"```text\n{path.read_text('utf-8') if path.exists() else f'{NOT_MEASURED}{chr(10)}'}```"


_FEATURES = {
    "copies": "features: share of photos found by a copy",
    "decoder": "features, kernel decoder: correlation",
    "mean": "mean picture alone: correlation",
}


def features_reveal(name: str) -> str:
    """What an attack on stored features of photos achieves: a share in percent, or a correlation."""
    values = [float(line["value"]) for line in lines("privacy/features.csv") if line["what"] == _FEATURES[name]]
    if not values:
        return NOT_MEASURED
    return f"{100 * values[0]:.1f}" if name == "copies" else f"{values[0]:.2f}"


NUMBERS: dict[str, Callable[..., str]] = {
    "features-reveal": features_reveal,
    "taught": taught,
    "cost-of-updates": cost_of_updates,
    "teaching-seconds": teaching_seconds,
    "minutes": minutes,
    "one-more-class": one_more_class,
}
TABLES: dict[str, Callable[..., str]] = {
    "demo": demo,
    "speed-gpu": lambda: speed(GPU, ON_GPU, "bf16 compiled"),
    "speed-cpu": lambda: speed(CPU, ON_CPU, "bf16"),
    "speed-export": export,
    "one-photo": one_photo,
    "gpu-turns": turns,
    "expect-models": models,
    "unknown": unknown,
    "detectors": detectors,
    "gaussian": gaussian,
    "memory": memory,
    "scale": scale,
    "eight-bits": eight_bits,
}
