# SPDX-License-Identifier: Apache-2.0
"""What holds of the paper on our records, claim by claim: the paper's difference, ours, and a verdict by rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Literal

import charts
import evidence
from evidence import DATA, JOINT, MOS, ONE_A, PLUS, Mean, difference, main_runs, parts, proxy

from onea.research.paper.names import METHODS
from onea.research.paper.reported import number, reported
from onea.research.record import Record

Verdict = Literal["holds", "does not hold", "not seen", "undecided", "one run"]
_TABLE_1 = {"cifar100": "CIFAR100 (T=10) / A_T", "cub200": "CUB (T=20) / A_T"}
_FIRM = 0.648  # rank correlation of ten methods that chance exceeds, in either direction, in one case of twenty
_SMALL = 1.0  # points between best and worst that hardly matter
_KEPT = 0.5  # overlap above which directions are kept


@dataclass(frozen=True)
class Claim:
    """A statement of the paper and what our runs say to it.

    Attributes:
        source: the table or figure that shows it.
        words: the statement.
        paper: the paper's number, as text.
        here: ours.
        count: seeds behind ours; a text where they differ.
        verdict: whether it holds here.
    """

    source: str
    words: str
    paper: str
    here: str
    count: int | str
    verdict: Verdict


def judged(ours: Mean, theirs: float) -> Verdict:
    """What a difference here says about a positive one in the paper.

    >>> judged(Mean(0.5, 0.1, 0.8, 3), 4.1), judged(Mean(0.0, -0.1, 0.1, 3), 1.9), judged(Mean(0.6, -0.6, 1.9, 3), 1.1)
    ('holds', 'not seen', 'undecided')
    """
    if ours.low is None or ours.high is None:
        return "one run"
    if ours.decided:
        return "holds" if (ours.value > 0) == (theirs > 0) else "does not hold"
    return "undecided" if ours.low <= theirs <= ours.high else "not seen"


def rules() -> str:
    """What decides where there is no interval to look at, in words."""
    return (
        f"Where there is no difference to look at, *holds* means: a rank correlation above {_FIRM:.2f}, which chance "
        "exceeds, in either direction, once in twenty; a spread between best and worst below "
        f"{'one point' if _SMALL == 1 else f'{_SMALL:g} points'}; an overlap above "
        f"{'one half' if _KEPT == 0.5 else f'{_KEPT:g}'}; no rival with a higher mean; operations within a tenth of "
        "those of a pass for each task. Operations are counted, so one run is enough for them."
    )


def outside() -> str:
    """Methods of others that have a higher mean than One-A here and are not in the paper's Table 1, in words."""
    told = []
    for data, column in _TABLE_1.items():
        runs, known = main_runs(data), {PLUS, JOINT, *(name for name, _, _ in charts.distances(data, column))}
        own = runs[ONE_A].of("A_T").value
        if higher := [each.title for name, each in runs.items() if each.of("A_T").value > own and name not in known]:
            told.append(f"{', '.join(higher)} ({DATA[data]})")
    return f"Not in the paper's Table 1, and with a higher mean than One-A here: {'; '.join(told)}." if told else ""


def _gain(source: str, words: str, theirs: float, ours: Mean) -> Claim:
    return Claim(source, words, _signed(theirs), ours.text(sign=True), ours.count, judged(ours, theirs))


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


@cache
def claims() -> tuple[Claim, ...]:
    """All of them, in the order of the paper's tables and figures."""
    return (*_ranking(), *_components(), *_merging(), *_proxies(), *_forgetting(), *_figures())


def _ranking() -> Iterable[Claim]:
    for data, column in _TABLE_1.items():
        rows = charts.distances(data, column)
        best = max((name for name, _, _ in rows), key=lambda name: main_runs(data)[name].of("A_T").value)
        ours = difference(main_runs(data)[best], main_runs(data)[ONE_A])
        words = (
            f"{DATA[data]}: One-A is above the best of its nine rivals in Table 1 (here {main_runs(data)[best].title})"
        )
        yield _gain("table1", words, -max(theirs for _, _, theirs in rows), ours)
        names = [*(name for name, _, _ in rows), ONE_A]
        here = [main_runs(data)[name].of("A_T").value for name in names]
        there = [*(theirs for _, _, theirs in rows), 0.0]
        agreement = rank_correlation(here, there)
        verdict: Verdict = "holds" if agreement > _FIRM else "undecided"
        words = f"{DATA[data]}: the order of the ten methods (rank correlation, 1 is the same order)"
        yield Claim("table1", words, "1", f"{agreement:.2f}", _seeds(data, names), verdict)


def _seeds(data: str, names: Iterable[str]) -> str:
    """How many seeds these methods have, the fewest and the most."""
    counts = sorted({len(main_runs(data)[name].records) for name in names})
    return "\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}".join(map(str, dict.fromkeys((counts[0], counts[-1]))))


def _components() -> Iterable[Claim]:
    for tasks in (10, 20):
        for name, (first, second) in charts.STEPS.items():
            ours = difference(parts(tasks, first), parts(tasks, second))
            yield _gain("table3", f"{tasks} tasks: {name} raises A_T", charts.paper_gain(first, second, tasks), ours)


def _merging() -> Iterable[Claim]:
    paper = {row: number(reported("table4", row, "A_T") or "").value for row in ("One-A", "MOS", "Per-task adapter")}
    for data in DATA:
        for row in ("MOS", "Per-task adapter"):
            runs = main_runs(data)
            ours = difference(runs[METHODS[row]], runs[ONE_A])
            words = f"{DATA[data]}: One-A is above {runs[METHODS[row]].title} (paper: ImageNet-R)"
            yield _gain("table4", words, paper["One-A"] - paper[row], ours)
    for name, words in (
        (MOS, "an answer of MOS costs a pass for each task"),
        ("per-task", "so does one of per-task adapters"),
    ):
        runs = main_runs("cub200")
        factor = runs[name].cost("gflops") / runs[ONE_A].cost("gflops")
        theirs = reported("table4", {MOS: "MOS", "per-task": "Per-task adapter"}[name], "FLOPs") or ""
        tasks = len(runs[name].records[0]["stream"]["sizes"])
        verdict: Verdict = "holds" if abs(factor / tasks - 1) < 0.1 else "does not hold"
        here, count = f"{factor:.1f}× One-A's, {tasks} tasks", len(runs[name].records)
        yield Claim("table4", words, f"{theirs} One-A's, 40 tasks", here, count, verdict)


def _proxies() -> Iterable[Claim]:
    paper = {row: number(reported("table5", row, "CIFAR100") or "").value for row in _PROXIES}
    for row, words in _PROXIES.items():
        if row != _COUNTS:
            ours = difference(proxy(row), proxy(_COUNTS))
            yield _gain("table5", f"counting classes beats {words} as a weight", paper[_COUNTS] - paper[row], ours)


_COUNTS = "Class count-based"
_PROXIES = {"Norm-based": "norms", "SV-based": "singular values", _COUNTS: ""}


def _forgetting() -> Iterable[Claim]:
    ours = difference(parts(10, "ASA + GW"), parts(10, "ASA + GW + DG"), lambda r: float(r["metrics"]["F"]))
    verdict = judged(ours, -1.0) if ours.decided else "undecided"
    yield Claim("figure5", "10 tasks: gating lowers forgetting (F)", "lower", ours.text(sign=True), ours.count, verdict)


def _figures() -> Iterable[Claim]:
    verdict: Verdict
    for kind in ("down", "up"):
        factor = evidence.mean([update_ratio(record, kind) for record in parts(10, "ASA + GW + DG").records])
        verdict = "undecided"
        if factor.low is not None and factor.high is not None and not factor.low <= 1 <= factor.high:
            verdict = "holds" if factor.low > 1 else "does not hold"
        words = f"{kind}-projection: weak directions of the base move more than strong ones (last quarter over first)"
        yield Claim("figure6a", words, "above 1", factor.text(digits=2), factor.count, verdict)
    kept = evidence.mean([basis_kept(record) for record in parts(10, "ASA + GW + DG").records])
    verdict = "holds" if kept.value > _KEPT else "does not hold"
    words = "a merge keeps the strong directions of the base (overlap of the first quarter with itself, 1 is the same)"
    yield Claim("figure6b", words, "near 1", kept.text(digits=2), kept.count, verdict)
    one_a = [record for record in evidence.records("runs") if len(record["stream"]["sizes"]) == 10]
    for source, words, keys in (
        ("figure7", "sharpness and quantile of the gate hardly matter (best minus worst)", ("kappa", "quantile")),
        ("figure11", "the rank hardly matters (best minus worst; paper: ImageNet-A)", ("rank",)),
    ):
        spreads = _spreads(one_a, keys)
        verdict = "holds" if fmean(spreads) < _SMALL else "does not hold"
        count = len(spreads)
        yield Claim(source, words, "small", f"{fmean(spreads):.1f} points", count, verdict if count > 1 else "one run")
    runs = main_runs("cifar100")
    own = runs[ONE_A]
    rivals = [name for name, _, _ in charts.distances("cifar100", _TABLE_1["cifar100"])]
    better = [
        name
        for name in rivals
        if runs[name].of("A_T").value > own.of("A_T").value and runs[name].cost("gflops") < 1.01 * own.cost("gflops")
    ]
    words = "none of the nine rivals of Table 1 is more accurate at One-A's cost (operations here, time in the paper)"
    verdict = "does not hold" if better else "holds"
    yield Claim("figure12", words, "none", str(len(better) or "none"), _seeds("cifar100", [*rivals, ONE_A]), verdict)


def update_ratio(record: Record, kind: str) -> float:
    """How much farther the weakest quarter of the base's directions moves than the strongest, mean over all merges."""
    from onea.research.report.analysis_figures import numbers

    found = []
    for task in record["tasks"]:
        if analysis := (task.get("merge") or {}).get("analysis"):
            for layer in analysis[kind]["layers"]:
                moved = numbers(layer["update"])
                quarter = len(moved) // 4
                found.append(fmean(moved[-quarter:]) / fmean(moved[:quarter]))
    return fmean(found)


def basis_kept(record: Record) -> float:
    """How much of each of the base's strongest directions (a quarter) is still itself after a merge, mean over all."""
    from onea.research.report.analysis_figures import square

    found = []
    for task in record["tasks"]:
        for kind in ((task.get("merge") or {}).get("analysis") or {}).values():
            table = square(kind["overlap"])
            found += [table[place][place] for place in range(len(table) // 4)]
    return fmean(found)


def _spreads(among: Iterable[Record], keys: tuple[str, ...]) -> list[float]:
    """Best minus worst A_T where only these options differ, for each seed that has all of their values."""
    fixed = {key: value for key, value in evidence.USUAL.items() if key not in keys}
    found: dict[int, dict[tuple[object, ...], float]] = {}
    for record in among:
        if all(record["options"].get(key) == value for key, value in fixed.items()):
            chosen = tuple(record["options"][key] for key in keys)
            found.setdefault(record["config"]["seed"], {})[chosen] = record["metrics"]["A_T"]
    most = max(map(len, found.values()))
    return [max(by.values()) - min(by.values()) for by in found.values() if len(by) == most]


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's, for lists without ties.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    count = len(first)
    squares = float(sum((a - b) ** 2 for a, b in zip(*ranks, strict=True)))
    return 1 - 6 * squares / (count * (count * count - 1))
