# SPDX-License-Identifier: Apache-2.0
"""Every result in README and docs equals a number in a committed record or results file.

Tables of results are generated when the site is built, or written into the page, and then compared word for word by
test_fill.py. Every other number in the text of a page must be computed here for that page, or be listed as a
setting, which is not measured.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path

import pytest
from support import ROOT

from onea.research.methods.one_a import OneAPlus

sys.path.insert(0, str(ROOT / "tools/docs"))
import fill

BENCH = "speed/bench-nvidia-h200-16-random-vit_base_patch16_224.csv"
PAGES = sorted(fill.PAGES)
_NUMBER = re.compile(
    r"(?<![\w.,-])(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+|\d+(?= (?:%|(?:s|seconds|ms|MB)\b)))x?(?!\.?\d|\w)"
)
# Versions, rates, limits, sizes of datasets: chosen or given, not measured.
EVERYWHERE = {"3.11", "2603.10237", "0.01", "95"}
SETTINGS = {
    "README.md": "22.1 2.0 0.1",
    "docs/about.md": "0.1 2.0",
    "docs/index.md": "5",
    "docs/results.md": "22.1",
    "docs/expect.md": "2,485",
    "docs/methods.md": "100 5,000 1,370 0.25 0.5 1.5 2,500",
    "docs/paper.md": "60,000",
    "docs/serving.md": "10,000 1,600 12.5 512 64 10 30 5 4",
    "docs/models.md": "256 2 2.25 5 90 50 25 70 97 100 0.5 1.6 2,000 22.1 25.7 2,485",
    "docs/official-code.md": "0.3 0.1 7,788 4,000 5,994 5,794",
    "docs/one-a-plus.md": "0.1 2,500",
    "research/README.md": "2 5 85 86 90 0.1 1,000 0.15 0.031 0.17 0.068 0.13 0.065",
    "docs/speed.md": "5",
    "docs/research.md": "2 0.1 90 1,000",
    "docs/results/README.md": "5,000",
}


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
    yield from shown(*(float(line["value"]) for line in lines("privacy/fingerprints.csv")), digits=(2,))
    yield from {f"{int(line['photos']):,}" for line in lines("privacy/fingerprints.csv")}


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


def lines(name: str) -> list[dict[str, str]]:
    with (ROOT / "benchmarks" / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def one_a_plus() -> Iterator[str]:
    """The learning rate of One-A+ in research runs."""
    yield f"{OneAPlus.base_learning_rate:g}"


SOURCES = {
    "README.md": bench_numbers,
    "docs/one-a-plus.md": one_a_plus,
    "docs/index.md": blocks_of_examples,
    "docs/expect.md": blocks_of_examples,
    "docs/grocery.md": blocks_of_examples,
    "docs/models.md": models,
    "docs/speed.md": speed,
}
WITH_RESULTS = [ROOT / name for name in SOURCES]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_number_has_a_source(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    without_source = unknown(name, page.read_text("utf-8"))
    assert not without_source, f"{name} prints {', '.join(without_source)}, which no record or results file contains"


@pytest.mark.parametrize("page", WITH_RESULTS, ids=named)
def test_an_edited_number_is_detected(page: Path) -> None:
    """If its last digit changes, in most cases: the edited number may equal another result."""
    name, text = str(page.relative_to(ROOT)), page.read_text("utf-8")
    results = [number for number in dict.fromkeys(numbers(text)) if number in facts(name)]
    exact = [number for number in results if re.fullmatch(r"[\d,]*[.,]\d+", number)] or results
    edited = [number[:-1] + str((int(number[-1]) + 5) % 10) for number in exact]
    unnoticed = [number for number in edited if not unknown(name, f" {number} % ")]
    assert edited
    assert len(unnoticed) <= len(edited) / 2, unnoticed
