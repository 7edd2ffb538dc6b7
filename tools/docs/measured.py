# SPDX-License-Identifier: Apache-2.0
"""Numbers and tables from the results in benchmarks/: speed, trials, accuracy of models."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from results import DATA, JOINT, PLUS, ROOT, mean, runs, table

BENCHMARKS = ROOT / "benchmarks"
GPU = "speed/bench-nvidia-h200-16-random-vit_base_patch16_224.csv"
CPU = "speed/bench-amd-epyc-2-vit_small_d6_patch14_84.csv"
STREAM = "speed/bench-nvidia-h200-16-vit_small_patch14_112-cifar100-{precision}.csv"
EXPORT = "speed/bench-amd-epyc-2-vit_small_patch14_112-export.csv"


@cache
def lines(file: str) -> tuple[dict[str, Any], ...]:
    """The lines of a CSV, or of a file with a JSON object on each line."""
    text = (BENCHMARKS / file).read_text("utf-8").splitlines()
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
    rows = []
    for title, measure, setting, unit in rates:
        columns = ("plain loop", "same numerics", "fast")
        plain, full, fast = (bench(file, measure, setting, unit, column) for column in columns)
        times = "" if not plain or not fast else f"{fast / plain if unit == 'images/s' else plain / fast:.1f}x"
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


def stream() -> str:
    """The time of a whole stream in two precisions."""

    def both(setting: str, unit: str, digits: int) -> list[str]:
        values = (
            bench(STREAM.format(precision=precision), "stream", f"cifar100, 10 tasks, {setting}", unit, column)
            for precision, column in (("bf16", "fast"), ("fp32", "same numerics"))
        )
        return ["" if value is None else f"{value:,.{digits}f}" for value in values]

    rows = [
        ("start to end, s", *both("from start to end", "s", 1)),
        ("learning, images/s, compilation included", *both("learning", "images/s", 0)),
        ("learning from the second task on, images/s", *both("learning from task 2 on", "images/s", 0)),
        ("A_T, %", *both("accuracy A_T", "%", 2)),
        ("mean A, %", *both("mean accuracy", "%", 2)),
    ]
    heads = [f"{name} ([CSV](../benchmarks/{STREAM.format(precision=name)}))" for name in ("bf16", "fp32")]
    return table(("", *heads), rows, words=1)


def export() -> str:
    """Speed-up of exported files over PyTorch in fp32."""
    rows = []
    for column in ("PyTorch bf16", "ONNX Runtime fp32", "ONNX Runtime int8", "OpenVINO"):
        cells = [column]
        for setting in ("batch 1", "batch 32"):
            plain, other = (bench(EXPORT, "inference", setting, "ms", name) for name in ("PyTorch fp32", column))
            cells.append(f"{plain / other:.1f}x" if plain and other else "")
        rows.append(cells)
    return table(("", "one image", "batch 32"), rows, words=1)


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
    ("training, small network, images/s", "", "", "small", _LATER, "new"),
    ("training, small network, images/s", "adapter as one parameter", "", "small", _LATER, "new one parameter"),
    ("CIFAR-100, small network, 16 epochs (E0), s", "", "-stream", "stream", "stream, learned and evaluated", "new"),
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
        when = "present" if file in ("-frozen", "-stream") else "earlier run"
        rows.append((title, ", ".join(filter(None, (when, way))), _digits(old), _digits(new), f"{new / old:.2f}"))
    return table(("", "way", "old commit", "this way", "ratio"), rows, words=2)


def _digits(value: float) -> str:
    """Three digits, or thousands.

    >>> _digits(4972.97), _digits(64.182), _digits(1.487)
    ('4,973', '64.2', '1.49')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 5 else f"{value:.2f}"


def frozen_cost() -> str:
    """Differences in A_T between freezing lower adapters and training all of them."""
    way = "last 8 blocks after 20%, 2 views, 50% of the patches dropped"
    rows = []
    for title, method, data, base in (
        ("One-A+", "one-a-plus", "cub200", "bf16, tokens added up in bf16, too"),
        ("One-A+", "one-a-plus", "cifar100", "bf16"),
        ("One-A", "one-a", "cub200", "bf16"),
    ):
        by_way: dict[str, dict[str, float]] = {}
        for line in lines("speed/precision_quality-nvidia-h200.csv"):
            if (line["method"], line["data"]) == (method, data) and line["A_T"]:
                by_way.setdefault(line["way"], {})[line["seed"]] = float(line["A_T"])
        changes = ([by_way[name][seed] - by_way[base][seed] for seed in by_way[name]] for name in (way, f"{way}, fp8"))
        texts = [mean(change).text(sign=True) for change in changes]
        rows.append((f"{title}, {DATA[data]}", *texts, str(len(by_way[way]))))
    return table(("", "bf16", "FP8", "streams"), rows, words=1)


# models


@dataclass(frozen=True)
class Taught:
    """Models taught with the default preset.

    Attributes:
        data: name of the dataset in the file.
        updates: number of updates.
        file: file in benchmarks/models/unknown/.
        title: title of the row in the table; empty for no row.
        preset: name of the default preset in the file.
        split: the photos of the evaluation.
        again: whether a last update taught all photos again.
    """

    data: str
    updates: int
    file: str
    title: str = ""
    preset: str | None = None
    split: str = "test photos"
    again: bool = False

    @property
    def lines(self) -> tuple[dict[str, Any], ...]:
        """All lines of the file."""
        return lines(f"models/unknown/{self.file}")

    def values(self, measure: str = "right") -> list[float]:
        """A metric in percent for each seed; ``right`` is the accuracy."""
        values = [
            float(line[measure])
            for line in self.lines
            if (line["data"], line["updates"], line["looked_at"]) == (self.data, self.updates, self.split)
            and line["params"].get("preset") == self.preset
            and line["params"].keys() <= {"preset", "threads", "verbose"}
            and line.get("again", False) == self.again
            and line["backbone"] == self.lines[-1]["backbone"]
        ]
        assert values, f"{self.file} has no such runs"
        return values


_SHOP, _HELD_OUT = "updates-amd-epyc-2.jsonl", "a quarter of the training photos, in groups that look alike"
TAUGHT = {
    "at-once": Taught("grocery81", 1, _SHOP, "81 groceries, all at once"),
    "updates": Taught("grocery81", 15, _SHOP, "81 groceries, 15 updates"),
    "again": Taught("grocery81", 15, _SHOP, "81 groceries, 15 updates, then all photos again", again=True),
    "cifar100": Taught("cifar100", 10, "crops-test-nvidia-h200.jsonl", "CIFAR-100, 150 images of a class, 10 updates"),
    "cub200": Taught("cub200", 20, "default-nvidia-h200.jsonl", "CUB-200, 20 updates", "quick"),
    "held-out-updates": Taught("grocery81", 15, "fast-path-nvidia-h200-2.jsonl", "", "quick", _HELD_OUT),
    "held-out-at-once": Taught("grocery81", 1, "fast-path-amd-epyc-2.jsonl", "", "quick", _HELD_OUT),
}


def models() -> str:
    """Accuracy of models: mean and range over seeds."""
    rows = []
    for taught in TAUGHT.values():
        if taught.title:
            values = taught.values()
            span = f"{min(values):.1f} to {max(values):.1f}"
            link = f"[{taught.title}](benchmarks/models/unknown/{taught.file})"
            rows.append((link, f"{fmean(values):.1f}", span, str(len(values))))
    return table(("`onea teach`, accuracy, %", "mean", "lowest to highest", "n"), rows, words=1)


def taught(key: str) -> str:
    """Mean accuracy of models."""
    return f"{fmean(TAUGHT[key].values()):.1f}"


def taught_unknown(key: str) -> str:
    """Percentage of known photos that were called unknown, lowest to highest."""
    values = TAUGHT[key].values("known_called_unknown")
    return f"{min(values):.1f} to {max(values):.1f}"


def cost_of_updates() -> str:
    """Accuracy lost by teaching in updates instead of all at once, in percentage points, lowest to highest."""
    gaps = [float(taught(f"{way}at-once")) - float(taught(f"{way}updates")) for way in ("", "held-out-")]
    steps = json.loads((BENCHMARKS / "models/grocery-2-cores-amd-epyc.json").read_text("utf-8"))
    gaps.append(steps["at-once"]["steps"][-1]["accuracy"] - steps["stream"]["steps"][-1]["accuracy"])
    for methods in map(runs, DATA):
        if PLUS in methods and JOINT in methods:
            gaps.append(methods[JOINT].of("A_T").value - methods[PLUS].of("A_T").value)
    return f"{min(gaps):.0f} to {max(gaps):.0f}" if min(gaps) >= 0.5 else f"up to {max(gaps):.0f}"


# first contact


def minutes(target: str, bf16: str) -> str:
    """Minutes of a Makefile target on two cores, with bf16 instructions (yes) or without (no)."""
    times = [
        float(line["seconds"]) / 60
        for line in lines("speed/first_contact_times.csv")
        if (line["hardware"], line["command"], line["bf16"]) == ("AMD EPYC, 2 cores", f"make {target}", bf16)
    ]
    return f"{times[-1]:.1f}"  # the last run


def one_more_class(column: str, side: str) -> str:
    """Seconds of one more class of 20 photos, with the old or the current code."""
    old, new = (line for line in lines("speed/one_more_class-amd-epyc-2.csv") if line["turn"] == "median")
    return f"{float((new if side == 'new' else old)[column]):.1f}"


def demo() -> str:
    """The final output of `onea demo` on two cores."""
    return f"```text\n{(BENCHMARKS / 'speed/demo-amd-epyc-2.txt').read_text('utf-8')}```"


NUMBERS: dict[str, Callable[..., str]] = {
    "taught": taught,
    "taught-unknown": taught_unknown,
    "cost-of-updates": cost_of_updates,
    "minutes": minutes,
    "one-more-class": one_more_class,
}
TABLES: dict[str, Callable[..., str]] = {
    "demo": demo,
    "speed-gpu": lambda: speed(GPU, ON_GPU, "bf16 compiled"),
    "speed-cpu": lambda: speed(CPU, ON_CPU, "bf16"),
    "speed-stream": stream,
    "speed-export": export,
    "gpu-turns": turns,
    "frozen-cost": frozen_cost,
    "expect-models": models,
}
