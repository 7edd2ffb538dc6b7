# SPDX-License-Identifier: Apache-2.0
"""The example outputs of the pages agree with the measurements and with each other."""

from __future__ import annotations

import json
import re
from statistics import fmean

import pytest
from support import ROOT

from onea.metrics import wilson_interval
from onea.model.evaluation.metrics import Counts

EXAMPLE = json.loads((ROOT / "benchmarks/models/grocery-example.json").read_text("utf-8"))
_ROW = re.compile(r"^(\S+) +(\d+) +(\d+\.\d) +(\d+) +(\d+)$", re.M)
_MISTAKE = re.compile(r"^(\S+) +(\S+) +(\d+)$", re.M)
_TOTAL = re.compile(
    (
        r"^([\d.]+ % correct, [\d.]+ % wrong, [\d.]+ % unknown) of ([\d,]+) images \(version \d\); accuracy (\d+) to "
        r"(\d+) % \(95 % confidence interval\); mean accuracy of the classes (\d+\.\d) %$"
    ).replace(" ", r"\s+"),
    re.M,
)
_UPDATE = re.compile(
    r"^(\d+)  \S+  (.+)\n +classes \+(\d+), images \d+, known (\d+), seconds \S+\n"
    r" +held-out accuracy (\d+\.\d) % of (\d+) \((\d+) to (\d+)\)$",
    re.M,
)


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def percent(correct: int, total: int) -> tuple[str, str, str]:
    """A percentage and the ends of its interval, as the program prints them."""
    low, high = wilson_interval(correct, total)
    return f"{100 * correct / total:.2f}", f"{100 * low:.0f}", f"{100 * high:.0f}"


def assert_total(text: str, classes: list[Counts]) -> None:
    """Check that the last line of an evaluation agrees with the lines of its classes."""
    total = sum(classes, Counts(0, 0, 0))
    found = _TOTAL.search(text)
    assert found
    shares, *others = (" ".join(part.split()) for part in found.groups())
    _, low, high = percent(total.correct, total.images)
    mean = f"{100 * fmean(one.accuracy for one in classes):.1f}"
    assert (shares, others) == (str(total), [f"{total.images:,}", low, high, mean])


def test_the_quick_start_adds_up() -> None:
    rows = _ROW.findall(page("index.md"))
    assert len(rows) == 5
    classes = [Counts(int(n), int(n) - int(wrong) - int(unknown), int(unknown)) for _, n, _, wrong, unknown in rows]
    assert [share for _, _, share, _, _ in rows] == [f"{100 * one.accuracy:.1f}" for one in classes]
    assert_total(page("index.md"), classes)
    mistakes = sum(int(images) for *_, images in _MISTAKE.findall(page("index.md").partition("predicted  images")[2]))
    assert mistakes == sum(one.wrong for one in classes), "all mistakes are shown"


def test_the_grocery_shop_is_the_one_of_the_file() -> None:
    text = page("grocery.md")
    known = {one["class"]: Counts(one["images"], one["correct"], one["unknown"]) for one in EXAMPLE["classes"]}
    rows = _ROW.findall(text)
    assert len(rows) > 5
    for name, images, share, wrong, unknown in rows:
        one = known[name]
        assert (int(images), int(wrong), int(unknown)) == (one.images, one.wrong, one.unknown)
        assert share == f"{100 * one.accuracy:.1f}"
    mistakes = [(a, b, int(n)) for a, b, n in _MISTAKE.findall(re.split(r"^class +predicted", text, flags=re.M)[1])]
    assert mistakes == [(one["class"], one["predicted"], one["images"]) for one in EXAMPLE["confusions"][:10]]
    assert_total(text, list(known.values()))


def test_the_history_is_the_one_of_the_file() -> None:
    found = _UPDATE.findall(page("grocery.md"))
    assert len(found) == 6, "of five updates, and of four after undo, those with enough held-out photos"
    for version, name, new, known, share, total, low, high in found:
        update = EXAMPLE["updates"][int(version) - 1]
        assert (name, int(new), int(known)) == (update["name"], update["new_classes"], update["known"])
        correct, images = round(update["held_out_accuracy"] * update["held_out"]), update["held_out"]
        assert (int(total), low, high) == (images, *percent(correct, images)[1:])
        assert share == f"{100 * correct / images:.1f}"


@pytest.mark.parametrize("name", ["index.md", "grocery.md"])
def test_held_out_figures_have_their_intervals(name: str) -> None:
    found = re.findall(
        r"(\d+\.\d) % of (\d+) (?:held-out )?images \(95 % confidence interval (\d+) to (\d+) %\)", page(name)
    )
    assert found
    for share, images, low, high in found:
        correct = round(float(share) * int(images) / 100)
        assert (share, low, high) == (f"{100 * correct / int(images):.1f}", *percent(correct, int(images))[1:])
