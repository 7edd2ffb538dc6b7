# SPDX-License-Identifier: Apache-2.0
"""Every result in README and docs equals a number in a committed record or results file.

Tables of results are generated when the site is built, or written into the page, and then compared word for word by
test_fill.py. Every other number in the text of a page must be computed here for that page, or be listed as a
setting, which is not measured.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from support import ROOT

from onea.learner.one_a import OneAPlusOptions
from onea.research.methods.one_a import OneAPlus

sys.path.insert(0, str(ROOT / "tools/docs"))
import fill

BENCH = "speed/bench-nvidia-h200-16-random-vit_base_patch16_224.csv"
LOG = ROOT / "research/README.md"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "docs/results/README.md", LOG])
_NUMBER = re.compile(
    r"(?<![\w.,-])(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+|\d+(?= (?:%|(?:s|seconds|ms|MB)\b)))x?(?!\.?\d|\w)"
)
# Versions, rates, limits, sizes of datasets: chosen or given, not measured.
EVERYWHERE = {"3.11", "2603.10237", "0.01", "95"}
SETTINGS = {
    "README.md": "21.6 2.0 0.1",
    "docs/about.md": "0.1 2.0",
    "docs/index.md": "5",
    "docs/results.md": "21.6",
    "docs/expect.md": "2,485",
    "docs/methods.md": "100 5,000 1,370 0.25 0.5 1.5 2,500",
    "docs/paper.md": "60,000",
    "docs/serving.md": "10,000 1,600 12.5 512 64 10 30 12 5 4",
    "docs/models.md": "2.25 5 90 50 25 70 97 100 0.2 0.4 0.5 1.6 2,000 2,936 2,485",
    "docs/official-code.md": "0.3 0.1 7,788 4,000 5,994 5,794",
    "docs/one-a-plus.md": "2,500",
    "research/README.md": "20 10 5 0.05 0.1 0.15 0.2 0.3 0.4 0.5 0.8 60 1,000 1,050 1,200 2,936",
    "docs/speed.md": "5",
    "docs/research.md": "1.5 4",
    "docs/results/README.md": "5,000 2,000",
}


def content(page: Path) -> str:
    """The text of a page; the log without its tables, which are measurements themselves."""
    text = page.read_text("utf-8")
    return re.sub(r"^\|.*\n", "", text, flags=re.M) if page == LOG else text


def numbers(text: str) -> list[str]:
    """Decimals, numbers with a comma, percentages, times and sizes outside code, comments, links, filled-in text."""
    text = fill.WRITTEN.sub("", text)
    for pattern in (r"^```.*?^```$", r"<!--.*?-->", r"`[^`]*`"):
        text = re.sub(pattern, "", text, flags=re.M | re.S)
    return _NUMBER.findall(re.sub(r"\]\([^)]*\)", "]", text))


def shown(*values: float, digits: Iterable[int] = (1, 2)) -> Iterator[str]:
    """Values as pages print them."""
    for value in values:
        for count in digits:
            yield f"{Decimal(repr(abs(value))).quantize(Decimal(1).scaleb(-count), ROUND_HALF_UP):,f}"


def unknown(page: str, text: str) -> list[str]:
    """The numbers of a page that have no source."""
    allowed = {*EVERYWHERE, *SETTINGS.get(page, "").split(), *facts(page)}
    return [number for number in numbers(text) if number not in allowed]


@cache
def facts(page: str) -> frozenset[str]:
    """The numbers that a page may print."""
    return frozenset([*(SOURCES[page]() if page in SOURCES else ()), *measured_once(page)])


def measured_once(page: str) -> Iterator[str]:
    """Results of runs that left no record."""
    with (ROOT / "benchmarks/measured-once.csv").open(encoding="utf-8") as file:
        yield from (line["value"] for line in csv.DictReader(file) if line["page"] == page)


def blocks_of_examples() -> Iterator[str]:
    """Accuracy of the examples on all test photos and on the worst class, as whole percentages."""
    for page in ("index.md", "grocery.md"):
        text = (ROOT / "docs" / page).read_text("utf-8")
        for pattern in (r"^(\d+\.\d+) % correct", r"correct % .*\n─+\n\S+ +\d+ +(\d+\.\d)"):
            yield from (str(round(float(value))) for value in re.findall(pattern, text, re.M))


def models() -> Iterator[str]:
    results = json.loads((ROOT / "benchmarks/models/grocery-2-cores-amd-epyc.json").read_text("utf-8"))
    for way in ("stream", "at-once"):
        last = results[way]["steps"][-1]
        yield from shown(last["accuracy"], last["answered_unknown"], digits=(1,))
        yield from shown(results[way]["seconds"], digits=(0,))
    for line in lines("models/grocery-trials.csv"):
        for column in ("right_in_stream", "right_with_all_prototypes_anew"):
            if line[column]:
                yield from shown(float(line[column]), digits=(1,))
    for line in lines("speed/teaching-amd-epyc-2.csv"):
        if line["ratio"]:  # the old commit's has none
            yield from shown(float(line["ratio"]), float(line["ratio_as_trained"]), digits=(2,))
    yield from shown(*(float(line["value"]) for line in lines("privacy/fingerprints.csv")), digits=(2,))
    yield from {f"{int(line['photos']):,}" for line in lines("privacy/fingerprints.csv")}
    yield from teaching()
    yield from check_labels()


def teaching() -> Iterator[str]:
    """Seconds for teaching a thousand photos, in each run."""
    yield from shown(*(float(line["learn_s"]) for line in lines("speed/teaching-amd-epyc-2.csv")), digits=(0,))


def check_labels() -> Iterator[str]:
    """Shares of wrong labels among the first results of a check, in three groups of five seeds."""
    results = json.loads((ROOT / "benchmarks/models/check_labels.json").read_text("utf-8"))["found"]
    for by_seed in results.values():
        for low in (0, 5, 10):
            yield from shown(100 * fmean(by_seed[str(seed)] for seed in range(low, low + 5)), digits=(0,))


def verdicts() -> Iterator[str]:
    """Differences between rows of the log, and the numbers of its table of verdicts."""
    log = LOG.read_text("utf-8")
    yield from re.findall(r"(?<=\+)\d\.\d", log.partition("## Verdicts")[2].partition("\n## ")[0])
    pairs = "77.41-64.56 62.67-39.33 80.86-71.46 62.83-53.75 65.00-64.61 63.6-58.2 75.5-74.2 61.0-60.1 77.1-69.6"
    for pair in f"{pairs} 55.3-55.2 68.2-66.1 82.1-77.9 8.9-6.8 9.6-8.4".split():
        assert all(re.search(rf"(?<![\d.]){re.escape(value)}(?!\d)", log) for value in pair.split("-")), pair
        high, low = map(Decimal, pair.split("-"))
        yield str((high - low).quantize(Decimal("0.1"), ROUND_HALF_UP))


def research() -> Iterator[str]:
    yield from re.findall(r"\d+\.\d+", LOG.read_text("utf-8").partition("## Classifier")[0])
    for number in (1, 4):  # looks at test photos after many updates
        for line in unknown_runs(f"unknown-nvidia-h200-{number}.jsonl"):
            if line["updates"] > 1:
                yield from shown(line["calibration_error"], digits=(1,))
                yield from shown(line["right"], digits=(0,))
    for name in ("unknown-nvidia-h200-3.jsonl", "unknown-nvidia-h200-5.jsonl"):
        halves = [line for line in unknown_runs(name) if (line["data"], line["classes"]) == ("grocery81", 40)]
        yield from shown(fmean(line["others_called_unknown"] for line in halves), digits=(1,))
    told = [line for line in json_lines("../research/calibration-folds-nvidia-h200.jsonl") if line["in_series"] > 0.5]
    yield from shown(*(fmean(line["rules"][f"{folds} folds"][2] for line in told) for folds in (4, 10)), digits=(1,))
    yield from quick_against_default()
    for name, preset in (("default-nvidia-h200.jsonl", "quick"), ("crops-test-nvidia-h200.jsonl", None)):
        told = [line for line in unknown_runs(name) if (line["updates"], line["params"].get("preset")) == (10, preset)]
        errors = [line["calibration_error"] for line in told]
        yield from shown(min(errors), max(errors), digits=(1,))
    yield from shown(*(line["right"] for line in unknown_runs("crops-thorough-nvidia-h200.jsonl")), digits=(1,))
    for name in ("unknown-nvidia-h200-5.jsonl", "crops-test-nvidia-h200.jsonl"):
        told = [line for line in unknown_runs(name) if (line["data"], line["updates"]) == ("cifar100", 1)]
        yield from shown(*(line["calibration_error"] for line in told), digits=(1,))
    on_cpu = unknown_runs("fast-path-amd-epyc-2.jsonl")
    yield from shown(*(line["right"] for line in on_cpu), digits=(1,))
    yield from shown(fmean(line["right"] for line in on_cpu if line["updates"] == 1), digits=(1,))


def quick_against_default() -> Iterator[str]:
    """Test photos: the gain with each seed, the mean gain, and the lowest accuracy of the default."""
    right: dict[str, dict[int, dict[int | None, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in unknown_runs("fast-path-nvidia-h200.jsonl"):
        if line["looked_at"] == "test photos":
            blocks = line["params"].get("options", {}).get("adapter_blocks")
            right[line["data"]][line["seed"]][blocks] = line["right"]
    for line in unknown_runs("fast-path-nvidia-h200.jsonl"):
        if line["data"] == "grocery81" and "options" not in line["params"]:
            yield from shown(line["right"], digits=(1,))
    for by_seed in right.values():
        gains = [found[7] - found[None] for found in by_seed.values()]
        yield from shown(*gains, fmean(gains), min(found[None] for found in by_seed.values()), digits=(1,))


def speed() -> Iterator[str]:
    yield from bench_numbers()
    rows = {row["setting"]: float(row["value"]) for row in lines(BENCH) if row["measure"] == "growth: peak memory"}
    yield from shown(100 * (rows["after task 40"] / rows["after task 4"] - 1), digits=(2,))
    yield from turns()


def turns() -> Iterator[str]:
    """Speed of each side relative to the old commit and to bf16; memory; FP8 products."""
    for path in sorted((ROOT / "benchmarks/speed").glob("gpu_turns-nvidia-h200-f*.csv")):
        found: dict[str, dict[str, float]] = defaultdict(dict)
        for row in lines(f"speed/{path.name}"):
            if row["turn"] == "median" and row["section"] in ("train", "infer"):
                found[row["what"]][row["side"]] = float(row["value"])
        yield from shown(*(value / 1000 for value in found.pop("peak memory, reserved", {}).values()), digits=(1,))
        for what, sides in found.items():
            ratios = [value / sides[base] for base in {"old", "new"} & {*sides} for side, value in sides.items()]
            yield from shown(*ratios, digits=(1,) if "20 epochs" in what else (2,))
    ratios = [float(row["ratio"]) for row in lines("speed/fp8_products-nvidia-h200.csv")]
    yield from shown(min(ratios), max(ratios), digits=(1,))
    differences = [
        float(row["difference"])
        for row in lines("speed/precision_quality-nvidia-h200.csv")
        if row["difference"] and "bits" not in row["way"]
    ]
    yield from shown(*differences, digits=(1,))


def bench_numbers() -> Iterator[str]:
    """Results of `onea bench`, and their ratios to the plain loop."""
    for path in sorted((ROOT / "benchmarks/speed").glob("bench-*.csv")):
        rows = lines(f"speed/{path.name}")
        found = {(row["measure"], row["setting"], row["unit"], row["column"]): float(row["value"]) for row in rows}
        spreads = [float(row["spread"]) / float(row["value"]) for row in rows if float(row["value"])]
        yield from shown(*(100 * spread for spread in spreads if spread > 0.05), digits=(0,))
        for (measure, setting, unit, column), value in found.items():
            yield from shown(value, digits=(0,) if value >= 1000 or (unit == "ms" and value >= 100) else (1, 2))
            if unit == "MB":
                yield from shown(value / 1000, digits=(1,))
            if unit == "%":
                yield from shown(value, digits=(0,))
            plain = found.get((measure, setting, unit, "plain loop"))
            if plain and column == "fast":
                ratio = plain / value if unit in ("ms", "MB", "s") else value / plain
                yield from (f"{text}x" for text in shown(ratio, digits=(1,)))
                yield from shown(ratio, digits=(1,))
            pytorch = found.get((measure, setting, unit, "PyTorch fp32"))
            if pytorch and unit == "ms":
                yield from (f"{text}x" for text in shown(pytorch / value, digits=(1,)))
            ours = found.get((measure, setting, unit, "fast" if "bf16" in column else "same numerics"))
            if ours and column.startswith("timm"):
                yield from shown(100 * (ours / value - 1), 100 * (value / ours - 1), digits=(0,))


def unknown_runs(name: str) -> list[dict[str, Any]]:
    """The results of benchmarks/models/unknown.py."""
    return json_lines(f"models/unknown/{name}")


def json_lines(name: str) -> list[dict[str, Any]]:
    """The lines of a results file of JSON objects."""
    return [json.loads(line) for line in (ROOT / "benchmarks" / name).read_text("utf-8").splitlines()]


def lines(name: str) -> list[dict[str, str]]:
    with (ROOT / "benchmarks" / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def privacy() -> Iterator[str]:
    told = {line["what"]: float(line["value"]) for line in lines("privacy/features.csv")}
    yield from shown(100 * told["features: share of photos found by a copy"], digits=(1,))
    yield from shown(
        told["mean picture alone: correlation"], told["features, kernel decoder: correlation"], digits=(2,)
    )


def readme() -> Iterator[str]:
    yield from teaching()
    yield from bench_numbers()


def one_a_plus() -> Iterator[str]:
    """The extra time of a prediction compared with One-A, and the learning rates of One-A+."""
    slower = [100 * (float(row["ratio"]) - 1) for row in lines("speed/answering-nvidia-h200.csv")]
    yield from shown(min(slower), max(slower), digits=(1,))
    yield from (f"{rate:g}" for rate in (OneAPlus.base_learning_rate, OneAPlusOptions.learning_rate))


SOURCES = {
    "README.md": readme,
    "docs/one-a-plus.md": one_a_plus,
    "docs/index.md": blocks_of_examples,
    "docs/expect.md": blocks_of_examples,
    "docs/grocery.md": blocks_of_examples,
    "docs/models.md": models,
    "docs/privacy.md": privacy,
    "docs/research.md": verdicts,
    "research/README.md": research,
    "docs/speed.md": speed,
}
WITH_RESULTS = [ROOT / name for name in SOURCES]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_number_has_a_source(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    without_source = unknown(name, content(page))
    assert not without_source, f"{name} prints {', '.join(without_source)}, which no record or results file contains"


@pytest.mark.parametrize("page", WITH_RESULTS, ids=named)
def test_an_edited_number_is_detected(page: Path) -> None:
    """If its last digit changes, in most cases: the edited number may equal another result."""
    name, text = str(page.relative_to(ROOT)), content(page)
    results = [number for number in dict.fromkeys(numbers(text)) if number in facts(name)]
    exact = [number for number in results if re.fullmatch(r"[\d,]*[.,]\d+", number)] or results
    edited = [number[:-1] + str((int(number[-1]) + 5) % 10) for number in exact]
    unnoticed = [number for number in edited if not unknown(name, f" {number} % ")]
    assert edited
    assert len(unnoticed) <= len(edited) / 2, unnoticed


def test_the_table_of_frozen_blocks_follows_from_its_runs() -> None:
    runs: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for line in json_lines("../research/frozen-blocks-nvidia-h200.jsonl"):
        options = line["options"]
        if options.get("freeze_at") and not line["changed"]:
            left_out = "half" if options["patch_drop_rate"] == 0.5 else "a third"
            name = f"after {options['freeze_at']:.0%}: last {options['adapter_blocks']}, {left_out}"
        else:
            name = "all" if not options and not line["changed"] else "another"
        runs[line["data"], name][line["seed"]] = line["A_T"]
    _, heads, table = LOG.read_text("utf-8").partition("| blocks that learn | CUB-200 |")
    names, _, *rows = ([cell.strip(" *") for cell in line.split("|")[1:-1]] for line in f"{heads}{table}".splitlines())
    printed = [dict(zip(names, row, strict=True)) for row in rows[: rows.index([])] if "share" not in row[0]]
    compared = 0
    for row in printed:
        name = row["blocks that learn"].replace(" %", "%")
        for data, column in (("cub200", "difference"), ("cifar100", "its difference")):
            if row[column] and name.startswith("after"):
                measured, base = runs[data, name], runs[data, "all"]
                assert f"{fmean(measured[seed] - base[seed] for seed in base):+.1f}" == row[column]
                compared += 1
    assert compared == 11
