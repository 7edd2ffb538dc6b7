# SPDX-License-Identifier: Apache-2.0
"""Two surprises, decided by runs that differ in the merge alone: alignment that adds nothing, gates that forget.

The committed records of CIFAR-100 answer a part; benchmarks/surprises.csv, made by benchmarks/surprises.py, the rest.
What has not been run yet is said to be so.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Literal

from evidence import ROOT, Mean, difference, mean, parts

from onea.metrics import fall_per_step
from onea.record import Record

FILE = ROOT / "benchmarks" / "surprises.csv"
LATE = "large task late"  # the setting whose largest task meets fewer classes than it has
_CHANCE = 0.025  # how often an interval lies above zero though there is nothing
Row = Mapping[str, str]
Cause = Literal["length", "directions", "undecided"]


@dataclass(frozen=True)
class Answer:
    """A table and what it comes to, as a page shows them."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: str


@cache
def rows() -> tuple[Row, ...]:
    """The runs that were made for this, one a row."""
    if not FILE.exists():
        return ()
    with FILE.open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def settings(among: Sequence[Row]) -> list[str]:
    """Streams, ranks and starts, in the order of the file."""
    return list(dict.fromkeys(row["setting"] for row in among))


def paired(among: Sequence[Row], setting: str, first: str, second: str, column: str) -> Mean | None:
    """A column under the second merge minus that under the first, over the seeds that both have; None without any."""
    found: dict[str, dict[str, float]] = {first: {}, second: {}}
    for row in among:
        if row["setting"] == setting and row["merge"] in found:
            found[row["merge"]][row["seed"]] = float(row[column])
    both = sorted(found[first].keys() & found[second].keys(), key=int)
    return mean([found[second][seed] - found[first][seed] for seed in both]) if both else None


def average(among: Sequence[Row], setting: str, merge: str, column: str) -> float | None:
    """The mean of a column over the seeds."""
    found = [float(row[column]) for row in among if (row["setting"], row["merge"]) == (setting, merge)]
    return fmean(found) if found else None


# alignment


def alignment(among: Sequence[Row] | None = None) -> Answer:
    """One-A without gates, with alignment against without, on every stream, rank and start."""
    among = rows() if among is None else among
    found: dict[str, Mean] = {}
    lines = []
    for tasks in (10, 20):
        first, second = parts(tasks, "GW"), parts(tasks, "ASA + GW")
        name = f"CIFAR-100, {tasks} tasks, shuffled"
        found[name] = difference(first, second)
        changes = _texts(found[name], difference(first, second, _forgotten))
        lines.append((name, *changes, "", "", str(found[name].count)))
    for setting in settings(among):
        if gain := paired(among, setting, "mean", "aligned", "A_T"):
            found[f"CUB-200, {setting}"] = gain
            inside, chance = (average(among, setting, "aligned", name) or 0.0 for name in ("inside", "chance"))
            shares = f"{100 * inside:.0f}", f"{100 * chance:.0f}"
            changes = _texts(gain, paired(among, setting, "mean", "aligned", "F"))
            lines.append((f"CUB-200, {setting}", *changes, *shares, str(gain.count)))
    heads = ("setting", "alignment changes A_T by", "and F by", "left by it, %", "by chance, %", "n")
    words = helped(found)
    if not among:
        words += " Not run yet: other streams, ranks and starts, on CUB-200 (`python benchmarks/surprises.py list`)."
    return Answer(heads, lines, words)


def helped(gains: Mapping[str, Mean]) -> str:
    """Whether alignment helps anywhere, in words; a setting with one seed has no interval and does not count.

    >>> helped({"a": Mean(0.1, -0.2, 0.4, 5), "b": Mean(-0.6, -0.9, -0.3, 5), "c": Mean(3.0, None, None, 1)})
    '**No setting found where alignment helps** (2 tried). The intervals leave room for a gain of 0.4 at most, in: a. \
It costs accuracy in: b.'
    """
    tried = {name: gain for name, gain in gains.items() if gain.count > 1}
    better = [name for name, gain in tried.items() if gain.decided and gain.value > 0]
    worse = [name for name, gain in tried.items() if gain.decided and gain.value < 0]
    if better:
        listed = "; ".join(f"{name} ({gains[name].text(sign=True)})" for name in better)
        told = f"**Alignment helps in {len(better)} of {len(tried)} settings**: {listed}. "
        told += f"By chance alone, about {_CHANCE * len(tried):.1f} would look so."
    else:
        room = {name: gain.high or 0.0 for name, gain in tried.items()}
        most = max(room, key=lambda name: room[name])
        told = f"**No setting found where alignment helps** ({len(tried)} tried). "
        told += f"The intervals leave room for a gain of {room[most]:.1f} at most, in: {most}."
    return told + (f" It costs accuracy in: {'; '.join(worse)}." if worse else "")


# gating


def gating_in_records() -> Answer:
    """What gates change in the committed runs of CIFAR-100, by which side is the base."""
    lines, told = [], []
    for tasks in (10, 20):
        first, second = parts(tasks, "ASA + GW"), parts(tasks, "ASA + GW + DG")
        total = difference(first, second, _forgotten)
        new, old = (difference(first, second, _falls(base)) for base in ("new", "accumulated"))
        count = sum(_bases(record).count("new") for record in second.records)
        lines.append((f"{tasks} tasks", str(count), *_texts(total, new, old), str(total.count)))
        told.append(f"{tasks} tasks: {blamed(new, old)}")
    gates = [
        (made["gate_min"], made["gate_max"])
        for tasks in (10, 20)
        for record in parts(tasks, "ASA + GW + DG").records
        for made in (task.get("merge") for task in record["tasks"])
        if made
    ]
    low, high = min(gate[0] for gate in gates), max(gate[1] for gate in gates)
    heads = ("CIFAR-100", "merges onto the new task", "gates change F by", "in merges onto it", "in the others", "n")
    return Answer(heads, lines, " ".join([f"All gates lie between {low:.2f} and {high:.2f}.", *told]))


def blamed(new: Mean, old: Mean) -> str:
    """In which merges gates cost accuracy of earlier tasks, in words.

    >>> blamed(Mean(2.0, 0.3, 3.7, 3), Mean(-0.6, -2.3, 1.2, 3))
    'gates **raise forgetting in merges onto the new task** (+2.0\xa0(+0.3\xa0to\xa0+3.7)) and not in the others \
(−0.6\xa0(−2.3\xa0to\xa0+1.2)).'
    """
    where = f"({new.text(sign=True)})", f"({old.text(sign=True)})"
    harm_new, harm_old = (change.decided and change.value > 0 for change in (new, old))
    if harm_new and not harm_old:
        return f"gates **raise forgetting in merges onto the new task** {where[0]} and not in the others {where[1]}."
    if harm_old and not harm_new:
        return (
            f"gates **raise forgetting in merges onto what was learned before** {where[1]}, not in others {where[0]}."
        )
    if harm_new and harm_old:
        return f"gates **raise forgetting in all merges**, onto the new task {where[0]} and others {where[1]}."
    return f"in neither kind of merge is the change decided: onto the new task {where[0]}, others {where[1]}."


def gating(among: Sequence[Row] | None = None) -> Answer:
    """What gates change in forgetting, what an equally long step without directions does, and gates on an old base."""
    among = rows() if among is None else among
    heads = (
        "CUB-200",
        "merges onto the new task",
        "gates",
        "even step",
        "gates on an old base only",
        "A_T by gates",
        "n",
    )
    lines = []
    for setting in settings(among):
        changes = [paired(among, setting, "aligned", merge, "F") for merge in ("gated", "even", "old-gated")]
        gain = paired(among, setting, "aligned", "gated", "A_T")
        if changes[0] and gain:
            count = average(among, setting, "gated", "merges_new") or 0.0
            lines.append((setting, f"{count:g}", *_texts(*changes, gain), str(gain.count)))
    return Answer(heads, lines, explained(among))


def explained(among: Sequence[Row]) -> str:
    """Why gates raise forgetting, in words: by the setting in which a large task comes late."""
    total, even, careful = (paired(among, LATE, "aligned", merge, "F") for merge in ("gated", "even", "old-gated"))
    new, old = (paired(among, LATE, "aligned", "gated", column) for column in ("fall_new", "fall_old"))
    against = paired(among, LATE, "even", "gated", "F")
    if not (total and even and careful and new and old and against):
        return "Not run yet (`python benchmarks/surprises.py list`)."
    told = [f"Where a large task comes late, gates change F by {total.text(sign=True)}: {blamed(new, old)}"]
    words: dict[Cause, str] = {
        "length": "**The length of the step explains it**: one as long without regard to directions does the same",
        "directions": "**Directions matter**: a step as long without regard to them does something else",
        "undecided": "Whether directions matter is undecided by comparison with a step as long without regard to them",
    }
    told.append(f"{words[cause(total, even, against)]} (gates minus even step: {against.text(sign=True)}).")
    told.append(f"With gates only where the base is what was learned before, F changes by {careful.text(sign=True)}.")
    gain, modest = (paired(among, LATE, "aligned", merge, "A_T") for merge in ("gated", "old-gated"))
    less = paired(among, LATE, "gated", "old-gated", "A_T")
    if gain and modest and less and less.decided and gain.decided and gain.value > 0 > less.value:
        told.append(
            f"It is the price of accuracy on the large task: A_T changes by {gain.text(sign=True)} with gates, and by "
            f"{modest.text(sign=True)} with gates on an old base only."
        )
    return " ".join(told)


def cause(total: Mean, even: Mean, against: Mean) -> Cause:
    """Whether the length of the step explains what gates do.

    Args:
        total: what gates change.
        even: what a step changes that is as long as theirs and treats all directions alike.
        against: gates minus even step.

    >>> cause(Mean(2.0, 1.0, 3.0, 5), Mean(1.9, 0.8, 3.0, 5), Mean(0.1, -0.2, 0.4, 5))
    'length'
    >>> cause(Mean(2.0, 1.0, 3.0, 5), Mean(0.2, -0.5, 0.9, 5), Mean(1.8, 1.0, 2.6, 5))
    'directions'
    """
    alike = even.decided and (even.value > 0) == (total.value > 0) and abs(against.value) < abs(total.value) / 2
    if total.decided and alike:
        return "length"
    return "directions" if against.decided else "undecided"


def _texts(*found: Mean | None) -> tuple[str, ...]:
    return tuple(each.text(sign=True) if each else "" for each in found)


def _forgotten(record: Record) -> float:
    return float(record["metrics"]["F"])


def _bases(record: Record) -> list[str]:
    return [str((task.get("merge") or {}).get("base", "")) for task in record["tasks"][1:]]


def _falls(base: str) -> Callable[[Record], float]:
    """Points that earlier tasks lose in merges onto such a base."""

    def read(record: Record) -> float:
        matrix = [[float("nan") if value is None else value for value in line] for line in record["metrics"]["matrix"]]
        return float(sum(fall for own, fall in zip(_bases(record), fall_per_step(matrix), strict=True) if own == base))

    return read
