# SPDX-License-Identifier: Apache-2.0
"""What accuracy to expect and what updates cost: the tables of expect.md, from records and measured files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import evidence
from evidence import DATA, JOINT, PLUS, ROOT, main_runs
from result_tables import table

BENCHMARKS = ROOT / "benchmarks/models/unknown"
_GROCERIES = "updates-amd-epyc-2.jsonl"
_ALIKE = "a quarter of the training photos, in groups that look alike"


@dataclass(frozen=True)
class Taught:
    """Models taught with the default network and preset.

    Attributes:
        words: the row of the table.
        data: what the file calls the photos.
        updates: in how many parts they were taught.
        preset: what the file calls today's default; None where it was the default by then.
        file: in benchmarks/models/unknown.
        looked_at: which photos were asked about.
        again: whether all of them were taught once more at the end, in one update.
    """

    words: str
    data: str
    updates: int
    preset: str | None
    file: str
    looked_at: str = "test photos"
    again: bool = False

    def right(self) -> list[float]:
        """The share of those photos that was answered right, in percent, by draw."""
        return self.of("right")

    def of(self, measure: str) -> list[float]:
        """What was measured on those photos, by draw."""
        lines = map(json.loads, (BENCHMARKS / self.file).read_text("utf-8").splitlines())
        found = [
            float(line[measure])
            for line in lines
            if (line["data"], line["updates"], line["looked_at"]) == (self.data, self.updates, self.looked_at)
            and (line["backbone"], line["params"].get("preset")) == (evidence.NETWORK, self.preset)
            and set(line["params"]) <= {"preset", "threads", "verbose"}
            and line.get("again", False) == self.again
        ]
        assert found, f"{self.file} has no such runs"
        return found


_AGAIN = Taught("81 groceries, 15 updates, then all photos again", "grocery81", 15, None, _GROCERIES, again=True)
MODELS = (
    Taught("81 groceries, all at once", "grocery81", 1, None, _GROCERIES),
    Taught("81 groceries, 15 updates", "grocery81", 15, None, _GROCERIES),
    _AGAIN,
    Taught("CIFAR-100, 150 images of a class, 10 updates", "cifar100", 10, None, "crops-test-nvidia-h200.jsonl"),
    Taught("CUB-200, 20 updates", "cub200", 20, "quick", "default-nvidia-h200.jsonl"),  # auto does the same there
)
# The same recipe in 15 updates and all at once.
BOTH_WAYS = (
    tuple(Taught("", "grocery81", updates, None, _GROCERIES) for updates in (15, 1)),
    (
        Taught("", "grocery81", 15, "quick", "fast-path-nvidia-h200-2.jsonl", _ALIKE),
        Taught("", "grocery81", 1, "quick", "fast-path-amd-epyc-2.jsonl", _ALIKE),
    ),
)


def runs() -> str:
    """Research runs: nothing trained, taught in tasks, all at once."""
    found = {data: main_runs(data) for data in DATA}
    beside = evidence.records("one-a-plus/runs")
    frozen = {data: evidence.select(beside, "simplecil", data, classifier="rgda").of("A_T").value for data in DATA}
    for data, known in frozen.items():
        plus, joint = (found[data][name].of("A_T").value for name in (PLUS, JOINT))
        assert joint - plus < plus - known, "expect.md says that One-A+ is nearer to joint training; it no longer is"
    rows = [
        ("nothing trained, nearest class mean", *(f"{found[d]['simplecil'].of('A_T').value:.1f}" for d in DATA)),
        ("nothing trained, the default classifier", *(f"{frozen[d]:.1f}" for d in DATA)),
        ("**taught in updates** (One-A+)", *(f"**{found[d][PLUS].of('A_T').value:.1f}**" for d in DATA)),
        ("all images at once", *(f"{found[d][JOINT].of('A_T').value:.1f}" for d in DATA)),
    ]
    return table(("right, %", *DATA.values()), rows, words=1)


def models() -> str:
    """Models with the default network and preset: mean and range over the draws."""
    rows = []
    for each in MODELS:
        right = each.right()
        shown = f"{min(right):.1f} to {max(right):.1f}"
        linked = f"[{each.words}](benchmarks/models/unknown/{each.file})"
        rows.append((linked, f"{fmean(right):.1f}", shown, str(len(right))))
    return table(("`onea teach`, right, %", "mean", "lowest to highest", "n"), rows, words=1)


def groceries() -> str:
    """What updates cost on photos of groceries, in words."""
    assert min(costs_of_updates()) > 0
    test, held_out = ([f"{fmean(way.right()):.1f}" for way in ways] for ways in BOTH_WAYS)
    return (
        f"{test[0]} % of these photos in 15 updates, {test[1]} % all at once; of training photos that were held out, "
        f"{held_out[0]} and {held_out[1]} %"
    )


def costs_of_updates() -> tuple[float, ...]:
    """In points: on test photos, and on held-out ones."""
    return tuple(fmean(at_once.right()) - fmean(updates.right()) for updates, at_once in BOTH_WAYS)


def again() -> str:
    """What it gains to teach all photos once more after many updates, in words."""
    updates, at_once = (fmean(way.right()) for way in BOTH_WAYS[0])
    taught = fmean(_AGAIN.right())
    assert at_once - taught < (taught - updates) / 2, "it no longer brings most of the accuracy back"
    return f"from {updates:.1f} to {taught:.1f} %"


def unknown_again() -> str:
    """How many known photos are called unknown then."""
    share = _AGAIN.of("known_called_unknown")
    assert max(share) < 5, "it is no longer on the safe side"
    return f"{min(share):.1f} to {max(share):.1f} %"


GENERATED: dict[str, Callable[[], str]] = {"expect": runs, "expect-models": models}
