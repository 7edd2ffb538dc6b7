# SPDX-License-Identifier: Apache-2.0
"""Tables and sentences of the speed page, from the files that `onea bench` left in benchmarks/speed/."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from functools import cache

import turns
from evidence import DATA, ROOT, mean
from result_tables import table

from onea.research.methods import METHODS

GPU = "bench-nvidia-h200-16-random-vit_base_patch16_224.csv"
CPU = "bench-amd-epyc-2-vit_small_d6_patch14_84.csv"
STREAM = "bench-nvidia-h200-16-vit_small_patch14_112-cifar100-{precision}.csv"
EXPORT = "bench-amd-epyc-2-vit_small_patch14_112-export.csv"
Row = tuple[str, str, str, str]  # what the table calls it; measure, setting and unit of the file
_RATES: tuple[Row, ...] = (
    ("inference, batch 256, images/s", "inference", "batch 256", "images/s"),
    ("inference, batch 32, images/s", "inference", "batch 32", "images/s"),
    ("one image, ms", "inference", "batch 1", "ms"),
)


@cache
def value(file: str, measure: str, setting: str, unit: str, column: str) -> float | None:
    """A figure of a file; None where it has none."""
    with (ROOT / "benchmarks/speed" / file).open(encoding="utf-8") as lines:
        for line in csv.DictReader(lines):
            if (line["measure"], line["setting"], line["unit"], line["column"]) == (measure, setting, unit, column):
                return float(line["value"])
    return None


def text(found: float | None, unit: str) -> str:
    """
    >>> text(4784.83, "images/s"), text(8.53, "ms"), text(10636.8, "MB"), text(None, "ms")
    ('4,785', '8.5', '10.6', '')
    """
    if found is None:
        return ""
    if unit == "MB":
        return f"{found / 1000:.1f}"  # printed as GB
    return f"{found:.1f}" if unit == "ms" and found < 20 else f"{found:,.0f}"


def against_plain_loop(file: str, rows: Sequence[Row]) -> list[list[str]]:
    """The plain loop, ours in fp32, ours in bf16, and how many times the first the last is."""
    lines = []
    for words, measure, setting, unit in rows:
        found = [value(file, measure, setting, unit, column) for column in ("plain loop", "same numerics", "fast")]
        plain, fast = found[0], found[-1]
        ratio = "" if not plain or not fast else f"{fast / plain if unit == 'images/s' else plain / fast:.1f}x"
        lines.append([words, *(text(each, unit) for each in found), ratio])
    return lines


def _heads(last: str) -> tuple[str, ...]:
    return ("", "plain loop", "ours, fp32", last, "against the plain loop")


def gpu() -> str:
    """ViT-B/16 on an H200."""
    rows: tuple[Row, ...] = (
        ("training, images/s", "training", "batch 128", "images/s"),
        *_RATES,
        ("memory while training, GB", "peak memory", "training, batch 128", "MB"),
        ("merge of 12 blocks in float64 on the GPU, ms", "merge", "12 blocks, rank 128, float64", "ms"),
    )
    return table(_heads("ours, bf16 compiled"), against_plain_loop(GPU, rows), words=1)


def cpu() -> str:
    """The network `fast` on two cores."""
    rows: tuple[Row, ...] = (("training, images/s", "training", "batch 32", "images/s"), *_RATES)
    peaks = [value(CPU, "growth: peak memory", f"after task {task}", "MB", "fast") or 0.0 for task in (4, 40)]
    grown = ["peak memory after 4 and 40 tasks, MB", "", "", " and ".join(f"{peak:,.0f}" for peak in peaks), ""]
    return table(_heads("ours, bf16"), [*against_plain_loop(CPU, rows), grown], words=1)


def stream() -> str:
    """A whole stream in two precisions."""

    def of(setting: str, unit: str, digits: int) -> list[str]:
        where = f"cifar100, 10 tasks, {setting}"
        files = (STREAM.format(precision=precision) for precision in ("bf16", "fp32"))
        return [
            f"{found:,.{digits}f}"
            for file in files
            for column in ("fast", "same numerics")
            if (found := value(file, "stream", where, unit, column)) is not None
        ]

    accuracies = zip(of("accuracy A_T", "%", 2), of("mean accuracy", "%", 2), strict=True)
    rows = [
        ("start to end, s", *of("from start to end", "s", 1)),
        ("learning, images/s, compilation included", *of("learning", "images/s", 0)),
        ("learning from the second task on, images/s", *of("learning from task 2 on", "images/s", 0)),
        ("A_T, mean A", *(", ".join(pair) for pair in accuracies)),
    ]
    heads = [f"{name} ([CSV](../benchmarks/speed/{STREAM.format(precision=name)}))" for name in ("bf16", "fp32")]
    return table(("", *heads), rows, words=1)


def export() -> str:
    """Exported files against PyTorch in fp32."""
    names = {
        "PyTorch bf16": "PyTorch, bf16",
        "ONNX Runtime fp32": "ONNX Runtime, fp32",
        "ONNX Runtime int8": "ONNX Runtime, int8",
        "OpenVINO": "OpenVINO, as it chooses",
    }
    rows = []
    for column, words in names.items():
        cells = [words]
        for setting in ("batch 1", "batch 32"):
            plain, ours = (value(EXPORT, "inference", setting, "ms", each) or 0.0 for each in ("PyTorch fp32", column))
            cells.append(f"{plain / ours:.1f}x")
        rows.append(cells)
    return table(("", "one image", "batch 32"), rows, words=1)


def figure(file: str, measure: str, setting: str, unit: str, column: str) -> float:
    """A figure that a file must have."""
    found = value(file, measure, setting, unit, column)
    assert found is not None, (file, measure, setting, unit, column)
    return found


def pace(ours: float, theirs: float) -> str:
    """Of two times, in words.

    >>> pace(1.66, 1.58), pace(22.34, 24.43)
    ('5 % slower', '9 % faster')
    """
    return f"{100 * (ours / theirs - 1):.0f} % slower" if ours > theirs else f"{100 * (theirs / ours - 1):.0f} % faster"


def against_timm(file: str, ours: str, theirs: str, setting: str, unit: str = "ms") -> tuple[str, float, float]:
    """How ours with an adapter compares with timm without, and both figures."""
    found = [figure(file, "inference", setting, unit, column) for column in (ours, theirs)]
    return pace(*(found if unit == "ms" else found[::-1])), found[0], found[1]


def timm_on_gpu() -> str:
    """Both compiled in bf16."""
    both = "fast", "timm bf16 compiled"
    large, middle = (against_timm(GPU, *both, setting)[0] for setting in ("batch 256", "batch 32"))
    one, ours, theirs = against_timm(GPU, *both, "batch 1")
    flying, many = (against_timm(GPU, *both, setting, "images/s")[0] for setting in ("batch 1", "batch 32"))
    alone = figure(GPU, "growth: inference", "after 1 task, batch 1", "ms", "fast")
    return (
        f"{large} at batch 256, {middle} at batch 32 ({many} with several requests in flight), {one} for one image at "
        f"a time ({ours:.2f} against {theirs:.2f} ms; {alone:.2f} ms when ours is measured alone) and {flying} with "
        "eight of them in flight"
    )


def timm_eager_on_gpu() -> str:
    """One image in fp32, neither compiled."""
    words, ours, theirs = against_timm(GPU, "same numerics", "timm fp32 eager", "batch 1")
    return f"{words} than timm ({ours:.1f} against {theirs:.1f} ms)"


def timm_on_cpu() -> str:
    """In bf16, neither compiled."""
    both = "fast", "timm bf16 eager"
    middle, large = (against_timm(CPU, *both, setting)[0] for setting in ("batch 32", "batch 256"))
    one, ours, theirs = against_timm(CPU, *both, "batch 1")
    full = against_timm(CPU, "same numerics", "timm fp32 eager", "batch 1")[0]
    single = f"{one} for one image ({ours:.1f} against {theirs:.1f} ms; in fp32 {full})"
    return f"{middle} at batch 32, {large} at 256, {single}"


def utilisation() -> str:
    """Of the GPU's peak."""
    shares = {
        (what, peak): figure(GPU, "utilisation", f"{what}, of {peak} peak", "%", "fast")
        for what in ("training", "inference")
        for peak in ("data sheet", "measured")
    }
    sheet, measured = (figure(GPU, "peak of the chip", f"{kind}, bf16", "TFLOP/s", "fast") for kind in _PEAKS)
    return (
        f"training {shares['training', 'data sheet']:.0f} % of the data sheet's {sheet:.0f} TFLOP/s and "
        f"{shares['training', 'measured']:.0f} % of the {measured:.0f} that one large product reached; inference "
        f"{shares['inference', 'data sheet']:.0f} % and {shares['inference', 'measured']:.0f} %"
    )


_PEAKS = ("data sheet", "measured")


def fp8() -> str:
    """How much faster than bf16, in turns: training by today's code, answers by the run that measured them last."""
    plain, eight = (ratio("-frozen", "train", "training, later epochs", side) for side in ("new", "new fp8"))
    return (
        f"trains about {eight / plain:.2f} times as fast as bf16 does today ({eight:.2f} against {plain:.2f} times the "
        f"old commit) and answers {ratio('-fp8', 'infer', 'inference', 'new fp8', 'new'):.2f} times as fast"
    )


def frozen() -> str:
    """Blocks that stop learning: how much faster that is."""
    sides = [f"new last 8 after 20%, cached{more}" for more in ("", ", fp8")]
    whole = "train", "training, 20 epochs with the first"
    fast, faster = (ratio("-frozen", *whole, side, "new") for side in sides)
    once, ever = (ratio("-frozen", *whole, side) for side in sides)
    return (
        f"20 epochs of ViT-B/16 are {fast:.1f} times as fast as those of all blocks in bf16, and {faster:.1f} times "
        f"with FP8 ({once:.1f} and {ever:.1f} times as fast as the old commit)"
    )


def frozen_cost() -> str:
    """What that changes in A_T, beside all blocks on new crops: means over streams with 95 % intervals."""
    rows = []
    for method, data, plain in (
        ("one-a-plus", "cub200", "bf16, tokens added up in bf16, too"),
        ("one-a-plus", "cifar100", "bf16"),
        ("one-a", "cub200", "bf16"),
    ):
        found = _accuracies(method, data)
        ways, base = (found[_FROZEN], found[f"{_FROZEN}, fp8"]), found[plain]
        changes = (mean([way[seed] - base[seed] for seed in way]).text(sign=True) for way in ways)
        rows.append((f"{METHODS.load(method).title}, {DATA[data]}", *changes, str(len(ways[0]))))
    return table(("", "bf16", "FP8", "streams"), rows, words=1)


_FROZEN = "last 8 blocks after 20%, 2 views, 50% of the patches dropped"


def _accuracies(method: str, data: str) -> dict[str, dict[str, float]]:
    """A_T of every way of training by its seed."""
    found: dict[str, dict[str, float]] = {}
    with (ROOT / "benchmarks/speed/precision_quality-nvidia-h200.csv").open(encoding="utf-8") as lines:
        for line in csv.DictReader(lines):
            if (line["method"], line["data"]) == (method, data) and line["A_T"]:
                found.setdefault(line["way"], {})[line["seed"]] = float(line["A_T"])
    return found


def step_memory() -> str:
    """What recorded steps of the large network reserve."""
    new, old = (turns.median("-frozen", "train", "peak memory, reserved", side) / 1000 for side in ("new", "old"))
    return f"{new:.1f} GB instead of {old:.1f}"


def short_attention() -> str:
    """Of 65 tokens, forward and back."""
    with (ROOT / "benchmarks/speed/short_attention-nvidia-h200.csv").open(encoding="utf-8") as lines:
        took = {
            line["kernel"]: float(line["both_us"])
            for line in csv.DictReader(lines)
            if (line["images"], line["tokens"]) == ("128", "65")
        }
    ours, theirs = took["ours 64x4"], min(took[name] for name in ("cudnn", "flash", "efficient"))
    return f"{ours:.0f} µs, where PyTorch's fastest, not compiled, takes {theirs:.0f}"


def ratio(file: str, section: str, what: str, side: str, against: str = "old") -> float:
    """A figure of one side, in figures of another."""
    return turns.median(file, section, what, side) / turns.median(file, section, what, against)


def fp8_products() -> str:
    """The matrix products alone."""
    with (ROOT / "benchmarks/speed/fp8_products-nvidia-h200.csv").open(encoding="utf-8") as lines:
        ratios = [float(line["ratio"]) for line in csv.DictReader(lines)]
    return f"{min(ratios):.1f} to {max(ratios):.1f} times as fast"


def times_the_plain_loop(file: str, batch: str) -> list[float]:
    """In training and in inference."""
    asked = ("training", batch), ("inference", "batch 256")
    return [
        figure(file, measure, setting, "images/s", "fast") / figure(file, measure, setting, "images/s", "plain loop")
        for measure, setting in asked
    ]


def in_short() -> str:
    """What the README says of speed."""
    train, answer = (
        figure(GPU, measure, setting, "images/s", "fast")
        for measure, setting in (("training", "batch 128"), ("inference", "batch 256"))
    )
    gpu_times, cpu_times = times_the_plain_loop(GPU, "batch 128"), times_the_plain_loop(CPU, "batch 32")
    return (
        f"ViT-B/16 on one H200: {train:,.0f} images/s in training and {answer:,.0f} in inference, {gpu_times[0]:.1f} "
        f"and {gpu_times[1]:.1f} times a plain PyTorch loop in the same run; an answer costs the same after 40 tasks "
        f"as after one. Two CPU cores with the network `fast`: {cpu_times[0]:.1f} times the plain loop in training and "
        f"{cpu_times[1]:.1f} in inference. "
        "`onea bench` measures your machine; [what the figures mean, and all of ours](docs/speed.md)."
    )


def first_contact() -> str:
    """How long `make demo` and `make test` take, in minutes, with bf16 instructions and without."""
    with (ROOT / "benchmarks/speed/first_contact_times.csv").open(encoding="utf-8") as lines:
        own = [line for line in csv.DictReader(lines) if line["hardware"] == "AMD EPYC, 2 cores"]
    took = {(line["command"], line["bf16"]): float(line["seconds"]) / 60 for line in own}  # the latest counts
    demo, test = ([took[command, bf16] for bf16 in ("yes", "no")] for command in ("make demo", "make test"))
    return (
        f"`make demo` takes {demo[0]:.1f} minutes with bf16 instructions and {demo[1]:.1f} minutes without, and "
        f"`make test` {test[0]:.1f} and {test[1]:.1f}"
    )


def one_more_class() -> str:
    """How long one more class takes, and the first answer of a command, then and now."""
    old, new = _one_more_class()
    return (
        f"One more class of 20 such photos takes {float(new['learn_s']):.1f} s beside the start of the process, and "
        f"`onea predict` {float(new['predict_s']):.1f} s from its start to the first answer "
        f"({float(old['predict_s']):.1f} s at commit 1a2ee9f)"
    )


def one_more_class_in_short() -> str:
    """The seconds of one more class, as README tells them."""
    return f"{float(_one_more_class()[1]['learn_s']):.1f}"


def _one_more_class() -> tuple[dict[str, str], dict[str, str]]:
    """The medians of the old commit and of today's code."""
    with (ROOT / "benchmarks/speed/one_more_class-amd-epyc-2.csv").open(encoding="utf-8") as lines:
        old, new = (line for line in csv.DictReader(lines) if line["turn"] == "median")
    return old, new


WRITTEN: dict[str, Callable[[], str]] = {
    "speed-gpu": gpu,
    "speed-cpu": cpu,
    "speed-stream": stream,
    "speed-export": export,
    "speed-in-short": in_short,
    "first-contact": first_contact,
    "one-more-class": one_more_class,
    "one-more-class-in-short": one_more_class_in_short,
    "timm-gpu": timm_on_gpu,
    "timm-gpu-eager": timm_eager_on_gpu,
    "timm-cpu": timm_on_cpu,
    "utilisation": utilisation,
    "fp8": fp8,
    "frozen": frozen,
    "frozen-cost": frozen_cost,
    "step-memory": step_memory,
    "short-attention": short_attention,
    "fp8-products": fp8_products,
}
