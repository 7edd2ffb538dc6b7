# SPDX-License-Identifier: Apache-2.0
"""Two surprises, decided by runs that differ in the merge alone: alignment that adds nothing, gates that forget.

The committed records of CIFAR-100 answer a part; benchmarks/merging/surprises.csv, which
surprises.py beside it wrote, the rest. What has not been run yet is said to be so.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Literal

from evidence import ROOT, Mean, difference, mean, parts

from onea.metrics import forgetting_per_step
from onea.research.record import Record

FILE = ROOT / "benchmarks/merging/surprises.csv"
LATE = "large task late"  # the setting whose largest task meets fewer classes than it has
LARGE_THEN_SMALL = ("descending", "one class first", LATE)
EVEN = ("balanced", "50 tasks")
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


def changes(among: Sequence[Row], first: str, second: str, column: str) -> dict[str, Mean]:
    """The same in every setting that both have with more than one seed: only these can decide anything."""
    found = {setting: paired(among, setting, first, second, column) for setting in settings(among)}
    return {setting: change for setting, change in found.items() if change and change.count > 1}


def average(among: Sequence[Row], setting: str, merge: str, column: str) -> float | None:
    """The mean of a column over the seeds."""
    found = [float(row[column]) for row in among if (row["setting"], row["merge"]) == (setting, merge)]
    return fmean(found) if found else None


# alignment


def alignment(among: Sequence[Row] | None = None) -> Answer:
    """One-A without gates, with alignment against without, on every stream, rank and start."""
    among = rows() if among is None else among
    lines = []
    for tasks in (10, 20):
        first, second = parts(tasks, "GW"), parts(tasks, "ASA + GW")
        gain = difference(first, second)
        told = _texts(gain, difference(first, second, forgotten))
        lines.append((f"CIFAR-100, {tasks} tasks, shuffled", *told, "", "", str(gain.count)))
    for setting in settings(among):
        if change := paired(among, setting, "mean", "aligned", "A_T"):
            inside, chance = (average(among, setting, "aligned", name) or 0.0 for name in ("inside", "chance"))
            shares = f"{100 * inside:.0f}", f"{100 * chance:.0f}"
            told = _texts(change, paired(among, setting, "mean", "aligned", "F"))
            lines.append((f"CUB-200, {setting}", *told, *shares, str(change.count)))
    heads = ("setting", "alignment changes A_T by", "and F by", "kept by it, %", "kept of a random one, %", "n")
    words = helped(aligned(among))
    if not among:
        words += " Not run yet: other streams, ranks and starts on CUB-200 (`benchmarks/merging/surprises.py list`)."
    return Answer(heads, lines, words)


def aligned(among: Sequence[Row]) -> dict[str, Mean]:
    """What alignment adds to A_T in every setting with more than one seed, of both datasets."""
    records = {
        f"CIFAR-100, {tasks} tasks": difference(parts(tasks, "GW"), parts(tasks, "ASA + GW")) for tasks in (10, 20)
    }
    runs = changes(among, "mean", "aligned", "A_T")
    return records | {f"CUB-200, {setting}": gain for setting, gain in runs.items()}


def helped(gains: Mapping[str, Mean]) -> str:
    """Whether alignment helps anywhere, in words.

    >>> helped({"a": Mean(0.1, -0.2, 0.4, 5), "b": Mean(-0.6, -0.9, -0.3, 5)})
    '**No setting found where alignment helps** (2 settings with more than one seed). At most 0.4 points of gain \
remain possible (a). It costs 0.6 points in: b.'
    """
    better, worse = raised(gains), lowered(gains)
    if better:
        listed = "; ".join(f"{name} ({inside(gain)})" for name, gain in better.items())
        told = f"**Alignment helps in {len(better)} of {len(gains)} settings**: {listed}. "
        told += f"By chance alone, about {_CHANCE * len(gains):.1f} would look so."
    else:
        room = {name: gain.high or 0.0 for name, gain in gains.items()}
        most = max(room, key=lambda name: room[name])
        told = f"**No setting found where alignment helps** ({len(gains)} settings with more than one seed). "
        told += f"At most {room[most]:.1f} points of gain remain possible ({most})."
    return told + (f" It costs {between(worse)} points in: {'; '.join(worse)}." if worse else "")


def raised(found: Mapping[str, Mean]) -> dict[str, Mean]:
    """Those whose interval lies above zero."""
    return {name: change for name, change in found.items() if change.decided and change.value > 0}


def lowered(found: Mapping[str, Mean]) -> dict[str, Mean]:
    """Those whose interval lies below zero."""
    return {name: change for name, change in found.items() if change.decided and change.value < 0}


def between(found: Mapping[str, Mean]) -> str:
    """The smallest and the largest of some changes, without their signs.

    >>> between({"a": Mean(-0.31, None, None, 1), "b": Mean(-0.12, None, None, 1)})
    '0.1 to 0.3'
    """
    sizes = [f"{size:.1f}" for size in sorted(abs(change.value) for change in found.values())]
    return " to ".join(dict.fromkeys((sizes[0], sizes[-1])))


def inside(change: Mean) -> str:
    """A change as it stands between brackets.

    >>> inside(Mean(4.8, 3.9, 5.7, 5)), inside(Mean(-0.5, None, None, 1))
    ('+4.8 points, +3.9\xa0to\xa0+5.7', '−0.5 points')
    """
    value, _, interval = change.text(sign=True).partition("\N{NO-BREAK SPACE}(")
    return f"{value} points" + (f", {interval.removesuffix(')')}" if interval else "")


# gating


def gating_in_records() -> Answer:
    """What gates change in the committed runs of CIFAR-100, by which side is the base."""
    lines, told = [], []
    for tasks in (10, 20):
        first, second = parts(tasks, "ASA + GW"), parts(tasks, "ASA + GW + DG")
        total = difference(first, second, forgotten)
        new, old = (difference(first, second, _falls(base)) for base in ("new", "accumulated"))
        count = sum(_bases(record).count("new") for record in second.records)
        lines.append((f"{tasks} tasks", str(count), *_texts(total, new, old), str(total.count)))
        told.append(f"{tasks} tasks: {blamed(new, old)}")
    heads = ("CIFAR-100", "merges onto the new task", "gates change F by", "in merges onto it", "in the others", "n")
    return Answer(heads, lines, " ".join(told))


def blamed(new: Mean, old: Mean) -> str:
    """In which merges gates cost accuracy of earlier tasks, in words.

    >>> blamed(Mean(2.0, 0.3, 3.7, 3), Mean(-0.6, -2.3, 1.2, 3))
    'gates **raise forgetting in merges onto the new task** (+2.0 points, +0.3\xa0to\xa0+3.7) and not in the others \
(−0.6 points, −2.3\xa0to\xa0+1.2).'
    """
    where = f"({inside(new)})", f"({inside(old)})"
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
        shown = [paired(among, setting, "aligned", merge, "F") for merge in ("gated", "even", "old-gated")]
        gain = paired(among, setting, "aligned", "gated", "A_T")
        if shown[0] and gain:
            count = average(among, setting, "gated", "merges_new") or 0.0
            lines.append((setting, f"{count:g}", *_texts(*shown, gain), str(gain.count)))
    return Answer(heads, lines, explained(among))


def gates_forget(among: Sequence[Row] | None = None) -> str:
    """Whether gates raise forgetting, in short."""
    among = rows() if among is None else among
    found = changes(among, "aligned", "gated", "F")
    if not found:
        return "Not run yet (`python benchmarks/merging/surprises.py list`)."
    more, less = raised(found), lowered(found)
    new = paired(among, LATE, "aligned", "gated", "fall_new")
    harm = new is not None and new.decided and new.value > 0
    if more and less:
        short = "It depends."
    elif more:
        short = "Yes."
    elif less:
        short = "Mostly no." if harm else "No."
    else:
        short = "Undecided."
    told = f"**{short}** On CUB-200 gates lower forgetting in {len(less)} of {len(found)} settings and raise it in "
    told += f"{len(more) or 'none'}."
    if new is not None and harm:
        told += (
            " They raise it in one kind of merge: where the new task is larger than everything before, it becomes the "
            f"base, and the gates hold back the old knowledge ({inside(new)})."
        )
    return told


def explained(among: Sequence[Row]) -> str:
    """Why gates raise forgetting, in words: by the setting in which a large task comes late."""
    total, even, careful = (paired(among, LATE, "aligned", merge, "F") for merge in ("gated", "even", "old-gated"))
    new, old = (paired(among, LATE, "aligned", "gated", column) for column in ("fall_new", "fall_old"))
    against = paired(among, LATE, "even", "gated", "F")
    if not (total and even and careful and new and old and against):
        return "Not run yet (`python benchmarks/merging/surprises.py list`)."
    told = [f"Where a large task comes late, gates change F by {total.text(sign=True)}: {blamed(new, old)}"]
    alike = "a step of the same length in which all directions move alike"
    less = against if against.value > 0 else against.negative
    value, _, interval = less.text().partition("\N{NO-BREAK SPACE}(")
    amount = f"{value} points {'less' if against.value > 0 else 'more'}" + (f" ({interval}" if interval else "")
    words: dict[Cause, str] = {
        "length": f"**The length of the step explains it**: {alike} does the same",
        "directions": f"It is not only that the step is shorter: {alike} forgets {amount}",
        "undecided": f"Whether it is only that the step is shorter is undecided: {alike} forgets {amount}",
    }
    told.append(f"{words[cause(total, even, against)]}.")
    told.append(f"With gates only where the base is what was learned before, F changes by {careful.text(sign=True)}.")
    gain, modest = (paired(among, LATE, "aligned", merge, "A_T") for merge in ("gated", "old-gated"))
    lost = paired(among, LATE, "gated", "old-gated", "A_T")
    if gain and modest and lost and lost.decided and gain.decided and gain.value > 0 > lost.value:
        told.append(
            f"But that is less accurate over all classes: A_T changes by {gain.text(sign=True)} with gates everywhere, "
            f"and by {modest.text(sign=True)} with gates on an old base only."
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


def forgotten(record: Record) -> float:
    """F of a run."""
    return float(record["metrics"]["F"])


def _bases(record: Record) -> list[str]:
    return [str((task.get("merge") or {}).get("base", "")) for task in record["tasks"][1:]]


def _falls(base: str) -> Callable[[Record], float]:
    """Points that earlier tasks lose in merges onto such a base."""

    def read(record: Record) -> float:
        matrix = [[float("nan") if value is None else value for value in line] for line in record["metrics"]["matrix"]]
        steps = zip(_bases(record), forgetting_per_step(matrix), strict=True)
        return float(sum(fall for each, fall in steps if each == base))

    return read
