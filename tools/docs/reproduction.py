# SPDX-License-Identifier: Apache-2.0
"""How far each table and figure of the paper has been run here, and what its own setting would cost."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

import decisions
import evidence
from evidence import ONE_A, ROOT, SEEDS, USUAL
from findings import Verdict, claims

from onea.research.paper.experiment import Cell, Experiment
from onea.research.paper.experiments import experiments
from onea.research.record import Record
from onea.research.report.load import load_records

BENCH = ROOT / "benchmarks/speed/bench-nvidia-h200-16-random-vit_base_patch16_224.csv"
NO_CLAIM = "–"
_NOT_OPTIONS = ("method", "data", "tasks", "backbone", "protocol", "stream", "gamma", "order", "long_tail")


@dataclass(frozen=True)
class Status:
    """One table or figure: what has been run of it here, what came out, and what the paper's own setting would cost."""

    experiment: Experiment
    done: int
    seeds: str
    hours: float

    @property
    def runs(self) -> int:
        """How many the paper's own setting takes."""
        return len(self.experiment.cells) * self.experiment.seeds

    @property
    def state(self) -> str:
        """In words."""
        if not self.experiment.cells:
            return "made by the program; nothing to run"
        if not self.done:
            return _alone(self.experiment.name) or ("on other data" if self.verdict != NO_CLAIM else "not run")
        whole = len(self.experiment.cells)
        return f"{self.done} of {whole} cells, n = {self.seeds}" if self.done < whole else f"run, n = {self.seeds}"

    @property
    def verdict(self) -> str:
        """What the claims that it shows came to."""
        if not self.experiment.cells:
            return "agrees"
        found = [claim.verdict for claim in claims() if claim.source == self.experiment.name]
        words: Mapping[Verdict, str] = {
            "holds": "agree",
            "does not hold": "disagree",
            "not seen": "not seen here",
            "undecided": "undecided",
            "one run": "with one run only",
        }
        return ", ".join(f"{found.count(key)} {word}" for key, word in words.items() if key in found) or NO_CLAIM


def matches(record: Record, cell: Cell) -> bool:
    """Whether a record is a run of a cell, on our network."""
    wanted, config, options = dict(cell.options), record["config"], record["options"]
    if wanted["method"] != config["method"] or wanted["data"] != record["data"]["name"] or cell.split:
        return False
    stream = {key: wanted.get(key) for key in ("order", "long_tail")}
    if any(config.get(key) != value for key, value in stream.items()):
        return False
    balanced = wanted["stream"] == "balanced"
    if (
        balanced != (config.get("stream") == "balanced")
        or config.get("sizes")
        or config.get("gamma") != wanted["gamma"]
    ):
        return False
    if len(record["stream"]["sizes"]) != wanted["tasks"]:
        return False
    given = {key: value for key, value in wanted.items() if key not in _NOT_OPTIONS}
    asked = (USUAL if wanted["method"] == ONE_A else {}) | given
    return all(options.get(key) == value for key, value in asked.items())


@cache
def statuses() -> tuple[Status, ...]:
    """All 22, in the paper's order."""
    return tuple(map(_status, experiments().values()))


def _status(experiment: Experiment) -> Status:
    # The claims about One-A's parts and merges are judged by runs of their own, those about methods by the main ones.
    # One-A itself is in both, under different presets: counted together, a cell would have seeds that no claim has.
    alone = {dict(cell.options)["method"] for cell in experiment.cells} == {ONE_A}
    known, wanted = evidence.records("runs" if alone else "methods/runs"), None if alone else SEEDS
    seeds = []
    for cell in experiment.cells:
        if found := [record for record in known if matches(record, cell)]:
            method, data = (dict(cell.options)[name] for name in ("method", "data"))
            seeds.append(evidence.select(found, method, data, wanted).seeds.keys())
    # Cells of One-A are compared with each other, seed by seed: a further seed of one of them is in no claim.
    counts = {len(set.intersection(*map(set, seeds)))} if alone and seeds else set(map(len, seeds))
    count = str(max(counts, default=0)) if len(counts) < 2 else f"{min(counts)} to {max(counts)}"
    return Status(experiment, len(seeds), count, sum(_hours(config) for config in _configs(experiment.name)))


def _alone(name: str) -> str:
    """Where a cell of One-A was run for the two surprises, which left no records; nothing where none was."""
    setting = {"table8": "descending", "table9": "balanced"}.get(name)
    count = sum((row["setting"], row["merge"]) == (setting, "gated") for row in decisions.rows())
    return f"One-A alone on CUB-200, n = {count} ([CSV](benchmarks/merging/{decisions.FILE.name}))" if count else ""


@cache
def _configs(name: str) -> tuple[Any, ...]:
    """The runs of an experiment in the paper's own setting."""
    from onea.research.paper.scale import Changes, make_plan

    experiment = experiments()[name]
    return make_plan(experiment, Changes(), _published).configs if experiment.cells else ()


@cache
def _published(data: str) -> Any:
    """Counts as published, whatever lies on this machine: the page must be the same everywhere."""
    from onea.research.paper.facts import DataFacts
    from onea.research.paper.names import DATASETS

    known = DATASETS[data]
    each = {
        side: tuple([count // known.classes] * known.classes)
        for side, count in (("train", known.train), ("test", known.test))
    }
    return DataFacts(each["train"], each["test"], loaded=True)


def _hours(config: Any) -> float:
    from onea.research.paper.scale import estimate

    cost = estimate(config, _published(config.data))
    return (cost.training / bench("training") + cost.evaluation / bench("inference", "batch 256")) / 3600


def total_hours() -> float:
    """All experiments, a run that several need counted once."""
    every = {config.key(): config for each in experiments() for config in _configs(each)}
    return sum(map(_hours, every.values()))


@cache
def bench(measure: str, setting: str = "", unit: str = "images/s", column: str = "fast") -> float:
    """A figure of the benchmark of ViT-B/16 on an H200."""
    with BENCH.open() as file:
        for line in csv.DictReader(file):
            if (line["measure"], line["unit"], line["column"]) == (measure, unit, column) and setting in line[
                "setting"
            ]:
                return float(line["value"])
    raise LookupError(f"{BENCH.name} has no {measure} {setting} in {unit}")


class Work(NamedTuple):
    """The work of some runs.

    Attributes:
        runs: how many.
        added: hours of learning and answering, added up run by run.
        busy: hours in which at least one of them was under way.
        at_once: how many were under way at the same time, at most.
    """

    runs: int
    added: float
    busy: float
    at_once: int


def work_of(records: Sequence[Record]) -> Work:
    """What their timings and dates say."""
    timings = [record["timings"] for record in records]
    added = sum(sum(each["learn_s"]) + sum(each["evaluate_s"]) for each in timings)
    changes = []
    for record in records:
        started, finished = (datetime.fromisoformat(record["dates"][name]) for name in ("started", "finished"))
        changes += [(started, 1), (finished, -1)]
    busy, under_way, most, before = 0.0, 0, 0, None
    for now, change in sorted(changes):
        if under_way and before:
            busy += (now - before).total_seconds()
        under_way, before = under_way + change, now
        most = max(most, under_way)
    return Work(len(records), added / 3600, busy / 3600, most)


def committed_runs() -> Work:
    """The work behind docs/results."""
    return work_of(load_records(evidence.RESULTS))
