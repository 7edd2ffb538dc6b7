# SPDX-License-Identifier: Apache-2.0
"""What to know about the results, in sentences that follow the records: who leads, and which rows to read with care."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import charts
import decisions
import evidence
import findings
from evidence import JOINT, ONE_A, PLUS, SEQUENTIAL, Mean, Runs, difference, main_runs, parts
from findings import Verdict

from onea.research.record import Record


def presets(docs: str = "") -> str:
    """Which runs are of an earlier preset, in words; nothing once there is none.

    Args:
        docs: the way from the page to docs/.
    """
    before, rows = _earlier_rows()
    if not before:
        return ""
    which = f"{before} of the {rows} results, marked †," if before < rows else "The results of all methods"
    trials = "benchmarks/presets/trials-by-dataset.csv"  # on the site, too
    joint = any(main_runs(data)[JOINT].earlier for data in evidence.DATA)
    return (
        f"{which} are of earlier presets, tuned on one dataset each (`small/cifar100`, `small/cub200`), and of the "
        f"network in half precision, until all five seeds have been run with the [present preset]({docs}methods.md"
        "#hyper-parameters)."
        + (" So are all runs of One-A's parts and of other streams." if _others_earlier() else "")
        + (f" Joint training may be better than shown: it had four [trials]({trials}), most methods six." * joint)
    )


def most_accurate() -> str:
    """Who is above whom, by paired differences: means whose interval contains zero rank nobody."""
    rows: list[tuple[str, ...]] = []
    alone: dict[str, None] = {}
    for own, title in _OWN.items():
        gaps = [_against(data, own, lambda record: float(record["metrics"]["A_T"])) for data in evidence.DATA]
        rows += compared(
            gaps, f"more accurate than {title}", f"less accurate than {title}", f"undecided against {title}"
        )
        alone |= {name: None for each in gaps for name, gap in each.items() if gap.count < 2}
    best = all(next(name for name in main_runs(data) if name != JOINT) == PLUS for data in evidence.DATA)
    lead = ", and has the highest mean on both datasets" if best else ""
    return (
        f"[One-A+](one-a-plus.md) takes one pass and sees no old image{lead}. Who differs from it, and from the "
        "paper's One-A, by more than chance (the 95 % interval of the paired difference of A_T leaves out zero):\n\n"
        f"{_table(rows)}\n\n{_left_out(alone)}"
    )


def forgets() -> str:
    """Who forgets more than One-A, and who less."""
    gaps = [_against(data, ONE_A, decisions.forgotten) for data in evidence.DATA]
    rows = compared(gaps, "forget more than One-A", "forget less than One-A", "undecided")
    return f"By paired differences of F:\n\n{_table(rows)}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [("", *evidence.DATA.values()), ("---",) * (1 + len(evidence.DATA)), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _left_out(names: Iterable[str]) -> str:
    told = listed(list(names))
    return f"Not ranked, because one seed decides nothing: {told}." if told != "none" else ""


def _against(data: str, own: str, read: Callable[[Record], float]) -> dict[str, Mean]:
    """Every method minus one of them, by title; the bounds are no rivals."""
    runs = main_runs(data)
    rivals = [name for name in runs if name not in (own, JOINT, SEQUENTIAL)]
    # Titles stand in lists here, between commas.
    titles = {name: runs[name].title.replace(", ", " with ") for name in rivals}
    return {title: difference(runs[own], runs[name], read) for name, title in titles.items()}


def compared(gaps: Sequence[Mapping[str, Mean]], more: str, less: str, undecided: str) -> list[tuple[str, ...]]:
    """Rows of a table, a column for each dataset: which differences are decided, and on which side.

    A long list is only counted, and a row without any name is left out.

    Args:
        gaps: the differences, by name, of each dataset.
        more: what those above zero are.
        less: what those below zero are.
        undecided: what the others are, those of one seed excepted.

    >>> found = {"A": Mean(2.0, 1.0, 3.0, 5), "B": Mean(9.0, None, None, 1), "C": Mean(0.5, -1.0, 2.0, 5)}
    >>> compared([found], "above", "below", "undecided")
    [('above', 'A'), ('undecided', 'C')]
    >>> compared([{str(number): Mean(-2.0, -3.0, -1.0, 5) for number in range(9)}], "above", "below", "undecided")
    [('below', 'all 9')]
    """

    def cell(names: Sequence[str], every: int) -> str:
        if len(names) < _MANY:
            return ", ".join(names) or "none"
        among = ", One-A+ among them" if _PLUS in names else ""
        return f"all {every}" if len(names) == every else f"{len(names)} of {every}{among}"

    rows = []
    for words, chosen in (
        (more, decisions.raised),
        (less, decisions.lowered),
        (undecided, lambda each: {name: gap for name, gap in each.items() if gap.count > 1 and not gap.decided}),
    ):
        names = [list(chosen(each)) for each in gaps]
        if any(names):
            known = [sum(gap.count > 1 for gap in each.values()) for each in gaps]
            rows.append((words, *map(cell, names, known)))
    return rows


_PLUS = "One-A+"
_OWN = {PLUS: _PLUS, ONE_A: "the paper's One-A"}
_MANY = 8  # names that nobody reads in a cell


def in_short() -> str:
    """What holds of the paper, in a few sentences: what each part adds, on either dataset."""
    steps = {name.partition(" (")[0]: step for name, step in charts.STEPS.items()}  # alignment: with weights
    gains = {name: difference(parts(10, first), parts(10, second)) for name, (first, second) in steps.items()}
    helps = sorted(decisions.raised(gains).items(), key=lambda item: -item[1].value)
    told = [f"{name} adds {gain.value:.1f} points" for name, gain in helps]
    told += [f"{name} costs {-gain.value:.1f} points" for name, gain in decisions.lowered(gains).items()]
    told += [f"{name} adds nothing that {gain.count} seeds show" for name, gain in gains.items() if not gain.decided]
    sentences = [f"On CIFAR-100 in 10 tasks, {listed(told)}."]
    if {*_verdicts("table5").values()} == {"holds"}:
        sentences.append("Numbers of classes are better weights than norms or singular values.")
    sentences += _on_cub()
    moves = {verdict: words.partition(":")[0] for words, verdict in _verdicts("figure6a").items()}
    if moves.keys() == {"holds", "does not hold"}:
        sentences.append(
            "That weak directions of the base move more than strong ones holds in the "
            f"{moves['holds']} and is reversed in the {moves['does not hold']}."
        )
    return " ".join(sentences)


def _on_cub() -> list[str]:
    """What gates add there, and alignment."""
    gates = {name: gain.value for name, gain in decisions.changes(decisions.rows(), "aligned", "gated", "A_T").items()}
    if not gates:
        return []
    low, high = (f"{end:.1f}".replace("-", "−") for end in (min(gates.values()), max(gates.values())))
    told = f"On CUB-200 gates add between {low} and {high} points"
    most, least = ({name: gates[name] for name in names if name in gates} for names in _KINDS)
    others = [gain for name, gain in gates.items() if name not in (*most, *least)]
    if most and least and min(most.values()) > max(others) and max(least.values()) < min(others):
        many, few = (", ".join(f"{name} {gain:.1f}" for name, gain in kind.items()) for kind in (most, least))
        told += f": most where a large task meets many small ones ({many}), least where all tasks are alike ({few})"
    aligned = decisions.aligned(decisions.rows())
    better, worse = decisions.raised(aligned), decisions.lowered(aligned)
    where = f"{len(better)} of {len(aligned)}" if better else f"none of {len(aligned)}"
    words = f"Alignment helps in {where} settings on both datasets"
    words += f" and costs {decisions.between(worse)} points in {len(worse)} of them" if worse else ""
    return [f"{told}.", f"{words}."]


_KINDS = decisions.LARGE_THEN_SMALL, decisions.EVEN


def _verdicts(source: str) -> dict[str, Verdict]:
    return {claim.words: claim.verdict for claim in findings.claims() if claim.source == source}


def listed(names: Sequence[str]) -> str:
    """
    >>> listed([]), listed(["A"]), listed(["A", "B", "C"])
    ('none', 'A', 'A, B and C')
    """
    if len(names) < 2:
        return names[0] if names else "none"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def single_seeds() -> str:
    """A warning about rows of one seed beside those of five; nothing once all have five."""
    every = [runs for data in evidence.DATA for runs in main_runs(data).values()]
    if all(len(runs.records) >= len(evidence.SEEDS) for runs in every):
        return ""
    example = main_runs("cub200")["aper-adapter"]
    first, mean = example.seeds[1]["metrics"]["A_T"], example.of("A_T").value
    plus = [main_runs(data)[PLUS].seeds[1]["metrics"]["A_T"] for data in evidence.DATA]
    return (
        "Rows with n = 1 are of seed 1 alone, whose stream is kind to methods that build on their first task (on "
        f"CUB-200 it has {example.seeds[1]['stream']['sizes'][0]} classes): APER-Adapter reaches {first:.1f} % there "
        f"with seed 1 and {mean:.1f} % over all {len(example.records)}. With seed 1, One-A+ reaches {plus[0]:.1f} and "
        f"{plus[1]:.1f} %."
    )


def marked(*runs: Runs) -> str:
    """The sign of earlier runs beside those of today."""
    before, rows = _earlier_rows()
    return " †" if before < rows and any(each.earlier for each in runs) else ""


def _others_earlier() -> bool:
    """Whether none of the runs beside the two main tables is of the present preset."""
    return not any(
        evidence.is_current(record) for name in ("runs", "streams/runs") for record in evidence.records(name)
    )


@cache
def _earlier_rows() -> tuple[int, int]:
    """How many rows of both tables are of an earlier preset, and how many there are."""
    every = [runs.earlier for data in evidence.DATA for runs in main_runs(data).values()]
    return sum(every), len(every)
