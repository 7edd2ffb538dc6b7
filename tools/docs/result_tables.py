# SPDX-License-Identifier: Apache-2.0
"""Tables of results for the pages, made from committed records and measured files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import charts
import decisions
import evidence
import findings
import frontier
import remarks
import reproduction
import turns
from evidence import MOS, ONE_A, PLUS, ROOT, Runs, difference, main_runs, select

from onea.research.record import Record

GROCERY = ROOT / "benchmarks/models/grocery-2-cores-amd-epyc.json"
_CHOSEN = {"classifier": "rgda"}  # One-A+'s classifier
STREAMS: dict[str, dict[str, Any]] = {  # what the configurations of the further streams say
    "10 tasks of 10 classes": {"stream": "balanced", "tasks": 10},
    "20 tasks of 5 classes": {"stream": "balanced", "tasks": 20},
    "large tasks first": {"order": "descending"},
    "gamma 0.001": {"gamma": 0.001},
    "gamma 0.05": {"gamma": 0.05},
    "long-tailed, 500 to 50 images of a class": {"long_tail": 0.1},
    "a task of one class first": {"order": "given"},
}
_INTERVAL = re.compile(r"\xa0(\([^()]+\xa0to)\xa0([^()]+\))")  # as evidence.Mean writes it
# Where long words of heads may break, or a phone would have no room for columns of short numbers.
_BREAKS = {"calibration": "calibra-tion", "detector": "detec-tor", "unknown": "un-known"}
_MERGES = {"one-a": "One-A", "weighted-mean": "class-weighted mean, two votes", "newest": "none (the newest adapter)"}
_ORDER = [
    ("fresh", "one-a"),
    ("fresh", "weighted-mean"),
    ("fresh", "newest"),
    ("merged", "one-a"),
    ("merged", "newest"),
    ("merged", "weighted-mean"),
]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int | None = None) -> str:
    """A Markdown table; bars inside cells are escaped.

    Args:
        heads: of the columns.
        rows: their cells.
        words: so many columns from the left hold words; the others hold numbers, to the right. By default all do.
    """
    left = range(len(heads) if words is None else words)
    return _table(heads, list(rows), {column for column in range(len(heads)) if column not in left})


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int]) -> str:
    lines = ["| " + " | ".join(map(_cell, cells)) + " |" for cells in (map(_head, heads), *rows)]
    rule = "".join("---:|" if column in right else "---|" for column in range(len(heads)))
    return "\n".join([lines[0], f"|{rule}", *lines[1:]])


def _head(text: str) -> str:
    """The head of a column, whose long words a phone may break.

    >>> _head("known called unknown").encode("ascii", "xmlcharrefreplace")
    b'known called un&#173;known'
    """
    for word, parts in _BREAKS.items():
        text = re.sub(rf"\b{word}\b", parts.replace("-", "\N{SOFT HYPHEN}"), text)
    return text


def _cell(text: str) -> str:
    r"""A cell; an interval in it is marked, so that a phone can show it below its value, on two lines where need be.

    >>> _cell("5.2\xa0(4.0\xa0to\xa06.4)")
    '5.2 <small>(4.0\xa0to 6.4)</small>'
    """
    marked = _INTERVAL.sub(r" <small>\1 \2</small>", text)
    return marked.replace("|", "\\|")


def methods(data: str) -> str:
    """Every method on one of the two main streams: accuracy and forgetting with intervals, and an answer's cost."""
    heads = ("method", "A_T %", "mean A %", "F", "n", "GFLOP", "passes", "MB kept")
    rows = (
        (
            (f"**{runs.title}**" if name in evidence.HIGHLIGHTED else runs.title) + remarks.marked(runs),
            runs.of("A_T").text(),
            f"{runs.of('mean_A').value:.1f}",
            runs.of("F").text(),
            str(len(runs.records)),
            f"{runs.cost('gflops'):.1f}",
            passes(runs),
            f"{runs.cost('state_mb'):.1f}",
        )
        for name, runs in main_runs(data).items()
    )
    return table(heads, rows, words=1)


def passes(*runs: Runs) -> str:
    """Through the network for one answer after the last task; MOS stops as soon as its answer is stable."""
    counts = " / ".join(dict.fromkeys(f"{each.cost('passes'):g}" for each in runs))
    return f"up to {counts}" if runs[0].method == MOS else counts


def claims() -> str:
    """What holds of the paper, claim by claim; the verdict beside the claim, where a phone shows it too."""
    rows = (
        (
            claim.words,
            f"**{claim.verdict}**" if claim.verdict == "does not hold" else claim.verdict,
            claim.paper,
            claim.here,
            str(claim.count),
            f"[{_where(claim.source)}](paper.md#status)",
        )
        for claim in findings.claims()
    )
    return _table(("claim", "verdict", "paper", "here", "n", "shown in"), list(rows), right={2, 3, 4})


def status() -> str:
    """Every table and figure of the paper: run or not, with what result, and what its own setting would cost."""
    rows = (
        (
            f"{_where(each.experiment.name)}: {each.experiment.title}",
            each.state,
            each.verdict,
            f"`onea paper {each.experiment.alias}`",
            str(each.runs or ""),
            f"{each.hours:.1f}" if each.hours else "",
        )
        for each in reproduction.statuses()
    )
    return table(("in the paper", "here", "claims", "command", "runs", "GPU hours"), rows, words=4)


def cost() -> str:
    """What the paper's own setting would cost, in a sentence."""
    bench = reproduction.bench
    memory = bench("peak memory", unit="MB") / 1000
    return (
        "*GPU hours* are an estimate for one H200 with the paper's network, ViT-B/16 at 224 pixels, and the paper's "
        f"epochs and seeds: the images of all runs, divided by the {bench('training'):,.0f} a second in training and "
        f"{bench('inference', 'batch 256'):,.0f} in inference that [our benchmark](speed.md) measured for One-A. "
        "Methods that pass an image several times while they learn take longer. "
        f"Training needs {memory:.1f} GB of the GPU's memory (batch 128). All together, with runs that several of them "
        f"need made once: about {reproduction.total_hours():.0f} hours."
    )


def _where(name: str) -> str:
    return name.replace("table", "Table ").replace("figure", "Figure ")


def rivals() -> str:
    """One-A+ against methods with five seeds."""
    found = {data: rival_runs(data) for data in evidence.DATA}
    rows = []
    for title in sorted(_RIVALS, key=lambda each: -found["cifar100"][each].of("A_T").value):
        cells = [title + remarks.marked(*(found[data][title] for data in found))]
        for data in found:
            runs, own = found[data][title], main_runs(data)[PLUS]
            better = "" if runs.records == own.records else difference(runs, own).text()
            cells += [f"{runs.of('A_T').value:.2f}", better]
        rows.append([f"**{cell}**" if title == "One-A+" and cell else cell for cell in cells])
    heads = ("", "CIFAR-100", "One-A+ is better by", "CUB-200", "One-A+ is better by")
    return table(heads, rows, words=1)


def rival_runs(data: str) -> dict[str, Runs]:
    """One-A+, its variants and others with five seeds, by what the table calls them."""
    return {title: pick(data) for title, pick in _RIVALS.items()}


def _beside(method: str, **options: Any) -> Callable[[str], Runs]:
    return lambda data: select(evidence.records("one-a-plus/runs"), method, data, **options)


def _main(method: str) -> Callable[[str], Runs]:
    return lambda data: main_runs(data)[method]


_RIVALS: dict[str, Callable[[str], Runs]] = {
    "One-A+": _main(PLUS),
    "One-A+, trained on the first task only": _beside(PLUS, min_share=1.0, **_CHOSEN),
    "first task, the same classifier": _beside("first-task", **_CHOSEN),
    "RanPAC, first task": _main("ranpac-first"),
    "RanPAC, frozen network": _main("ranpac"),
    "frozen network, the same classifier": _beside("simplecil", **_CHOSEN),
    "MOS": _main("mos"),
    "One-A, the same classifier": _beside(ONE_A, **_CHOSEN),
    "One-A": _main(ONE_A),
    "SLDA": _main("slda"),
    "ACMap": _main("acmap"),
    "APER-Adapter": _main("aper-adapter"),
}


def streams() -> str:
    """One-A+ and three others on further streams of CIFAR-100."""
    columns: dict[str, tuple[str, dict[str, Any]]] = {
        "One-A+": (PLUS, _CHOSEN),
        "first task, the same classifier": ("first-task", _CHOSEN),
        "frozen, the same classifier": ("simplecil", _CHOSEN),
        "RanPAC, first task": ("ranpac-first", {}),
    }
    rows = []
    for name, setting in STREAMS.items():
        among = stream_records(setting)
        found = [select(among, method, "cifar100", **options).of("A_T").value for method, options in columns.values()]
        cells = [f"{value:.1f}" for value in found]
        rows.append([name, *(f"**{cell}**" if cell == cells[found.index(max(found))] else cell for cell in cells)])
    return table(("", *columns), rows, words=1)


def stream_records(setting: dict[str, Any]) -> list[Record]:
    """The records of one of the further streams."""
    usual = {"stream": "auto", "gamma": 0.01, "order": None, "long_tail": None}
    asked = usual | setting
    return [
        record
        for record in evidence.records("streams/runs")
        if all(record["config"].get(key) == value for key, value in asked.items())
    ]


def attribution() -> str:
    """One-A+ with other starts and merges, under two classifiers."""
    rows = []
    for start, merge in _ORDER:
        cells = [start, _MERGES[merge]]
        for data in evidence.DATA:
            for classifier in ("ncm", "rgda"):
                cells.append(f"{attributed(data, start, merge, classifier).of('A_T').value:.1f}")
        rows.append([f"**{cell}**" for cell in cells] if (start, merge) == ("merged", "weighted-mean") else cells)
    heads = ("start", "merge", "CIFAR-100, nearest mean", "Gaussian", "CUB-200, nearest mean", "Gaussian")
    return table(heads, rows, words=2)


def attributed(data: str, start: str, merge: str, classifier: str) -> Runs:
    """One of those, seeds 1 to 3; One-A+ itself has five, of which three count, of the network that the others had."""
    others = evidence.records("attribution/runs")
    networks = {record["config"]["backbone"] for record in others}
    both = [*others, *evidence.records("one-a-plus/runs")]
    among = [record for record in both if record["config"]["seed"] <= 3 and record["config"]["backbone"] in networks]
    return select(among, PLUS, data, start=start, merge=merge, classifier=classifier, min_share=0.25)


def grocery() -> tuple[str, str]:
    """Test photos of Grocery that are answered right: taught in updates, and all at once."""
    told = json.loads(GROCERY.read_text("utf-8"))
    updates, at_once = (f"{told[way]['steps'][-1]['accuracy']:.1f}" for way in ("stream", "at-once"))
    return updates, at_once


def committed_runs() -> str:
    """How much was run, in a sentence."""
    work = reproduction.committed_runs()
    return (
        f"The {work.runs} committed runs kept one H200 busy for {work.busy:.1f} hours, in which up to {work.at_once} "
        f"shared it; added up run by run they took {work.added:.1f} hours. Tuning and the surprises are not counted."
    )


def answered(answer: decisions.Answer) -> str:
    """What experiments came to, and below it their table, if there is something in it."""
    shown = f"\n\n{table(answer.heads, answer.rows, words=1)}" if answer.rows else ""
    return answer.words + shown


GENERATED: dict[str, Callable[[], str]] = {
    "results-cifar100": lambda: methods("cifar100"),
    "results-cub200": lambda: methods("cub200"),
    "presets": remarks.presets,
    "single-seeds": remarks.single_seeds,
    "most-accurate": remarks.most_accurate,
    "forgets": remarks.forgets,
    "in-short": remarks.in_short,
    "rules": findings.rules,
    "outside": findings.outside,
    "claims": claims,
    "status": status,
    "paper-cost": cost,
    "rivals": rivals,
    "other-streams": streams,
    "attribution": attribution,
    "committed-runs": committed_runs,
    "surprise-alignment": lambda: answered(decisions.alignment()),
    "surprise-gating-answer": decisions.gates_forget,
    "surprise-gating-records": lambda: answered(decisions.gating_in_records()),
    "surprise-gating": lambda: answered(decisions.gating()),
    "gpu-turns": lambda: table(*turns.cells(), words=2),
    "chart-frontier": frontier.frontier,
    **{f"chart-{name}": draw for name, draw in charts.CHARTS.items()},
}
