# SPDX-License-Identifier: Apache-2.0
"""What the committed records say: methods on the two main streams, means with intervals, paired differences.

Pages, charts and the test of every printed number ask here, so a number has one source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

from onea.metrics import t_interval
from onea.options import with_defaults
from onea.research.methods import method_class
from onea.research.paper.names import METHODS as PAPER_NAMES
from onea.research.record import Record
from onea.research.record_metrics import metric
from onea.research.report.load import by_classifier, load_records, with_present_options
from onea.research.runs.config import make_config

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
DATA = {"cifar100": "CIFAR-100, 10 tasks", "cub200": "CUB-200, 20 tasks"}
PLUS, ONE_A, MOS, JOINT, SEQUENTIAL = "one-a-plus", "one-a", "mos", "joint", "sequential"
HIGHLIGHTED = (PLUS, ONE_A, MOS)
NETWORK = "vit_small_patch14_112"  # as it comes with onea; earlier runs had the same in a file, in half precision
SEEDS = frozenset(range(1, 6))  # those of the main streams
IN_PAPER = {name: title for title, name in PAPER_NAMES.items()}
# Where One-A's switches stand by default; the runs of the paper's ablations differ in these alone.
USUAL: dict[str, Any] = {
    "alignment": True,
    "weights": "classes",
    "gating": True,
    "kappa": 2.0,
    "quantile": 0.3,
    "rank": 64,
}
_SHORT = {"joint": "joint training", "sequential": "sequential", "per-task": "per-task adapter"}


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with its 95 % interval; a single run has none."""

    value: float
    low: float | None
    high: float | None
    count: int

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def negative(self) -> Mean:
        """The same difference the other way round."""
        low, high = (None if end is None else -end for end in (self.high, self.low))
        return Mean(-self.value, low, high, self.count)

    def text(self, sign: bool = False, digits: int = 1) -> str:
        """As pages print it, on one line; what would look like zero though zero is left out has more digits.

        >>> Mean(5.19, 4.02, 6.36, 3).text(sign=True), Mean(1.14, 0.02, 2.26, 5).text()
        ('+5.2\xa0(+4.0\xa0to\xa0+6.4)', '1.1\xa0(0.02\xa0to\xa02.3)')
        """
        shown = self._shown(self.value, sign, digits)
        if self.low is None or self.high is None:
            return shown
        told = f"{shown} ({self._shown(self.low, sign, digits)} to {self._shown(self.high, sign, digits)})"
        return told.replace(" ", "\N{NO-BREAK SPACE}")

    def _shown(self, value: float, sign: bool, digits: int) -> str:
        while self.decided and value and not round(value, digits):
            digits += 1
        return _text(value, sign, digits)


def _text(value: float, sign: bool, digits: int) -> str:
    if not round(value, digits):
        return f"{0:.{digits}f}"
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def mean(values: Sequence[float]) -> Mean:
    """Mean and interval, by Student's t.

    >>> mean([1.0, 2.0, 3.0]).text()
    '2.0\xa0(−0.5\xa0to\xa04.5)'
    """
    low, high = t_interval(values) or (None, None)
    return Mean(fmean(values), low, high, len(values))


@dataclass(frozen=True)
class Runs:
    """One configuration of a method on one stream, over its seeds."""

    method: str
    records: tuple[Record, ...]

    @property
    def title(self) -> str:
        """What charts call it."""
        return _SHORT.get(self.method) or method_class(self.method).title

    @property
    def earlier(self) -> bool:
        """Whether these are runs of an earlier preset or of the network in another precision."""
        return not all(map(is_current, self.records))

    @property
    def seeds(self) -> dict[int, Record]:
        """Records by seed."""
        return {record["config"]["seed"]: record for record in self.records}

    def of(self, name: str) -> Mean:
        """A metric over the seeds."""
        return mean([value for record in self.records if (value := metric(name).value(record)) is not None])

    def cost(self, name: str) -> float:
        """A measured cost of an answer after the last task: the median, because some seeds train nothing."""
        return median(value for record in self.records if (value := metric(name).value(record)) is not None)

    def curve(self) -> list[float]:
        """Accuracy after each task, mean over the seeds."""
        return [fmean(step) for step in zip(*(record["metrics"]["A"] for record in self.records), strict=True)]


def difference(
    first: Runs, second: Runs, read: Callable[[Record], float] = lambda record: record["metrics"]["A_T"]
) -> Mean:
    """Second minus first, paired by the seeds that both have."""
    a, b = first.seeds, second.seeds
    return mean([read(b[seed]) - read(a[seed]) for seed in sorted(a.keys() & b.keys())])


@cache
def records(folder: str) -> tuple[Record, ...]:
    """All records below a folder of docs/results, those of further classifiers included."""
    found = [each for record in load_records(RESULTS / folder) for each in by_classifier(record)]
    return tuple(with_present_options(found))


def select(
    among: Iterable[Record], method: str, data: str, seeds: Collection[int] | None = None, **options: Any
) -> Runs:
    """The runs of one configuration, at most one a seed, and never some of now beside some of an earlier preset.

    Args:
        among: records to choose from.
        method: of the runs.
        data: name of the images.
        seeds: those that runs of now must have to take the place of earlier ones; by default those that these have.
        options: of the method.
    """
    now: dict[int, Record] = {}
    before: dict[int, Record] = {}
    for record in among:
        if (
            record["config"]["method"] == method
            and record["data"]["name"] == data
            and all(record["options"].get(key) == value for key, value in options.items())
        ):
            (now if is_current(record) else before)[record["config"]["seed"]] = record
    if not now and not before:
        raise LookupError(f"no record of {method} on {data} with {options}")
    wanted = set(before if seeds is None else seeds)
    chosen = now if not before or wanted <= now.keys() else before
    return Runs(method, tuple(chosen[seed] for seed in sorted(chosen)))


def is_current(record: Record) -> bool:
    """Whether a run has the network that comes with onea, and the options that its configuration stands for today."""
    from onea.research.runs.setup import options_of, shape_of_record

    if record["config"]["backbone"] != NETWORK:
        return False
    # The record tells how images were stored in words that no configuration has.
    config = make_config({key: value for key, value in record["config"].items() if key != "store"})
    today = options_of(config, shape_of_record(record))
    # An option that came later has its default in earlier runs.
    return with_defaults(type(today), record["options"]) == dataclasses.asdict(today)


@cache
def main_runs(data: str) -> dict[str, Runs]:
    """Every method on one of the two main streams (gamma 0.01), the most accurate first."""
    others, plus = records("methods/runs"), records("one-a-plus/runs")
    names = dict.fromkeys(record["config"]["method"] for record in others)
    found = {name: select(others, name, data, seeds=SEEDS) for name in names}
    found[PLUS] = select(plus, PLUS, data, seeds=SEEDS, classifier="rgda", min_share=0.25)
    if len(found["simplecil"].records) < len(SEEDS):
        # Frozen features with the nearest mean, run again beside other classifiers: five seeds instead of one.
        single = found["simplecil"].records[0]
        more = select(plus, "simplecil", data, classifier="ncm").records
        found["simplecil"] = Runs("simplecil", tuple(record | {"cost": single["cost"]} for record in more))
    return dict(sorted(found.items(), key=lambda item: -item[1].of("A_T").value))


@cache
def parts(tasks: int, row: str) -> Runs:
    """One-A on CIFAR-100 with some of its parts, a row of the paper's Table 3."""
    from onea.research.paper.tables import ABLATION

    return _one_a(tasks, **ABLATION[row])


@cache
def proxy(row: str) -> Runs:
    """One-A on CIFAR-100 with another information proxy, a row of the paper's Table 5."""
    from onea.research.paper.tables import PROXIES

    return _one_a(10, weights=PROXIES[row])


def _one_a(tasks: int, **changed: Any) -> Runs:
    """One-A with these switches; the others stand where they do by default."""
    among = (record for record in records("runs") if len(record["stream"]["sizes"]) == tasks)
    return select(among, ONE_A, "cifar100", **USUAL | changed)
