# SPDX-License-Identifier: Apache-2.0
"""Numbers and tables from the records below docs/results: means with intervals, paired differences, costs.

Every method of the result tables is one entry of ``METHODS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from onea.metrics import t_interval
from onea.research.methods import method_class
from onea.research.record import Record
from onea.research.record_metrics import metric
from onea.research.report.records import load_records, split_by_classifier, with_default_options

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
DATA = {"cifar100": "CIFAR-100, 10 tasks", "cub200": "CUB-200, 20 tasks"}
PLUS, ONE_A, MOS, JOINT = "one-a-plus", "one-a", "mos", "joint"
HIGHLIGHTED = (PLUS, ONE_A, MOS)
NOT_RUN = "not run"
_COUNTS = ("no seeds", "one seed", "two seeds", "three seeds", "four seeds", "five seeds")
_SPACE = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Method:
    """A row of the result tables: its title, and the method and options of its runs."""

    title: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)

    def matches(self, record: Record) -> bool:
        """Whether a record is a run of this method with these options."""
        options = record["options"]
        return bool(record["config"]["method"] == self.method) and self.options.items() <= options.items()


METHODS = {
    PLUS: Method("One-A+", "one-a-plus", {"classifier": "rgda", "min_share": 0.25}),
    JOINT: Method("joint training (upper bound)", "joint"),
    "frozen-gaussian": Method("frozen features + Gaussian", "simplecil", {"classifier": "rgda"}),
    "first-task-gaussian": Method("first task + Gaussian", "first-task", {"classifier": "rgda"}),
    "ranpac-first": Method("RanPAC (first task)", "ranpac-first"),
    MOS: Method("MOS", "mos"),
    ONE_A: Method("One-A", "one-a", {"classifier": "ncm"}),
    "simplecil": Method("SimpleCIL", "simplecil", {"classifier": "ncm"}),
    "slda": Method("SLDA", "slda"),
}


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with its 95 % confidence interval by Student's t; a single run has none."""

    value: float
    low: float | None = None
    high: float | None = None
    count: int = 1

    def text(self, sign: bool = False, digits: int = 1) -> str:
        """The mean and its interval, without line breaks.

        >>> Mean(5.19, 4.02, 6.36, 3).text(sign=True), Mean(1.14, 0.02, 2.26, 5).text()
        ('+5.2\xa0(+4.0\xa0to\xa0+6.4)', '1.1\xa0(0.0\xa0to\xa02.3)')
        """
        value = _number(self.value, sign, digits)
        if self.low is None or self.high is None:
            return value
        return f"{value} ({_number(self.low, sign, digits)} to {_number(self.high, sign, digits)})".replace(" ", _SPACE)


def _number(value: float, sign: bool, digits: int) -> str:
    if not round(value, digits):
        return f"{0:.{digits}f}"
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def mean(values: Sequence[float]) -> Mean:
    """Mean and interval.

    >>> mean([1.0, 2.0, 3.0]).text()
    '2.0\xa0(−0.5\xa0to\xa04.5)'
    """
    low, high = t_interval(values) or (None, None)
    return Mean(fmean(values), low, high, len(values))


@dataclass(frozen=True)
class Runs:
    """The runs of a method on one dataset, by seed."""

    title: str
    seeds: dict[int, Record]

    def values(self, name: str) -> list[float]:
        """A metric of all seeds that have it."""
        numbers = (metric(name).value(record) for record in self.seeds.values())
        return [number for number in numbers if number is not None]

    def of(self, name: str) -> Mean:
        """A metric over the seeds."""
        return mean(self.values(name))

    def cost(self, name: str) -> float | None:
        """A cost of inference after the last task: the median, because some seeds train nothing.

        It is None for classifiers that were only scored in addition to another one.
        """
        values = self.values(name)
        return median(values) if values else None

    @property
    def has_updates(self) -> bool:
        """Whether the classes came in several tasks; in one task there is no mean over tasks and no forgetting."""
        return all(len(record["stream"]["sizes"]) > 1 for record in self.seeds.values())

    def curve(self) -> list[float]:
        """Accuracy after each task, mean over the seeds."""
        lines = (record["metrics"]["A"] for record in self.seeds.values())
        return [fmean(step) for step in zip(*lines, strict=True)]


@cache
def records() -> tuple[Record, ...]:
    """All committed records, then one for each further classifier of a run."""
    loaded = [record for group in groups() for record in load_records(RESULTS / group / "runs")]
    further = [copy for record in loaded for copy in split_by_classifier(record)[1:]]
    return tuple(with_default_options([*loaded, *further]))


def groups() -> list[str]:
    """Folders of runs in docs/results."""
    return sorted(folder.parent.name for folder in RESULTS.glob("*/runs"))


@cache
def runs(data: str) -> dict[str, Runs]:
    """The methods that have been run on a dataset, the most accurate first."""
    methods = {}
    for key, method in METHODS.items():
        seeds: dict[int, Record] = {}
        for record in records():
            if record["data"]["name"] == data and method.matches(record):
                seeds.setdefault(record["config"]["seed"], record)
        if seeds:
            methods[key] = Runs(method.title, dict(sorted(seeds.items())))
    return dict(sorted(methods.items(), key=lambda item: -item[1].of("A_T").value))


def difference(first: Runs, second: Runs, name: str = "A_T") -> Mean:
    """A metric of the second minus that of the first, paired by seed."""
    value = metric(name).value
    common = sorted(first.seeds.keys() & second.seeds.keys())
    pairs = [(value(first.seeds[seed]), value(second.seeds[seed])) for seed in common]
    return mean([b - a for a, b in pairs if a is not None and b is not None])


# numbers in the text of pages, or `not run`


def _if_run(number: Callable[..., str]) -> Callable[..., str]:
    def read(*words: str) -> str:
        data, methods = words[-1], words[:-1]
        missing = [method for method in methods if method not in runs(data)]
        return NOT_RUN if missing else number(*(runs(data)[method] for method in methods))

    return read


def accuracy(method_runs: Runs) -> str:
    """A_T in percent."""
    return f"{method_runs.of('A_T').value:.1f}"


def accuracy_and_deviation(method_runs: Runs) -> str:
    """A_T with its sample standard deviation."""
    values = method_runs.values("A_T")
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def gap(first: Runs, second: Runs) -> str:
    """The paired difference in A_T, second minus first, with its confidence interval."""
    return difference(first, second).text(sign=True).replace(_SPACE, " ")


def stored_megabytes(method_runs: Runs) -> str:
    """Megabytes that a method stores between tasks."""
    return _cost(method_runs, "state_mb", ".1f")


def seeds(method: str) -> str:
    """The number of seeds of a method, for each dataset if they differ."""
    methods = {title: runs(data).get(method) for data, title in DATA.items()}
    counts = {title: _COUNTS[len(known.seeds) if known else 0] for title, known in methods.items()}
    if len(set(counts.values())) == 1:
        return next(iter(counts.values()))
    return " and ".join(f"{count} on {title.partition(',')[0]}" for title, count in counts.items())


def network() -> str:
    """The network of the records."""
    names = {record["config"]["backbone"].removesuffix(".safetensors") for record in records()}
    return ", ".join(f"`{name}`" for name in sorted(names))


# tables


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int | None = None) -> str:
    """A Markdown table; bars inside cells are escaped.

    Args:
        heads: headings of the columns.
        rows: cells of the rows.
        words: number of left-aligned columns; the others hold numbers and are right-aligned. By default, all are left.
    """
    left = len(heads) if words is None else words
    rule = "".join("---|" if column < left else "---:|" for column in range(len(heads)))
    lines = ["| " + " | ".join(map(_cell, cells)) + " |" for cells in (heads, *rows)]
    return "\n".join([lines[0], f"|{rule}", *lines[1:]])


def _cell(text: str) -> str:
    r"""A cell; an interval in it is set small after a breakable space, so that it can wrap on a phone.

    >>> _cell("5.2\xa0(4.0\xa0to\xa06.4)")
    '5.2 <small>(4.0\xa0to 6.4)</small>'
    """
    value, bracket, interval = text.partition(f"{_SPACE}(")
    if bracket:
        low, _, high = interval.partition(f"{_SPACE}to{_SPACE}")
        text = f"{value} <small>({low}{_SPACE}to {high}</small>"
    return text.replace("|", "\\|")


def _bold(key: str, title: str) -> str:
    return f"**{title}**" if key in (PLUS, ONE_A) else title


def both_datasets() -> str:
    """All methods: accuracy on both datasets, number of seeds, forward passes."""
    rows = []
    for key in dict.fromkeys(key for data in DATA for key in runs(data)):
        by_data = [runs(data).get(key) for data in DATA]
        accuracies = (f"{known.of('A_T').value:.2f}" if known else NOT_RUN for known in by_data)
        available = [known for known in by_data if known]
        counts = " / ".join(dict.fromkeys(str(len(known.seeds)) for known in available))
        rows.append((_bold(key, METHODS[key].title), *accuracies, counts, _passes(key, available)))
    return table(("", *DATA.values(), "n", "passes"), rows, words=1)


def _cost(method_runs: Runs, name: str, digits: str) -> str:
    value = method_runs.cost(name)
    return "" if value is None else f"{value:{digits}}"


def _passes(key: str, by_data: Sequence[Runs]) -> str:
    """Forward passes of a prediction after the last task; MOS stops early when its prediction is stable."""
    counts = " / ".join(dict.fromkeys(_cost(known, "passes", "g") for known in by_data))
    return f"up to {counts}" if key == MOS else counts


def one_dataset(data: str) -> str:
    """Every method on a dataset: accuracy and forgetting with intervals, difference to One-A+, cost."""
    rows = []
    plus = runs(data).get(PLUS)
    for key, known in runs(data).items():
        ahead = difference(known, plus).text(sign=True) if plus and key != PLUS else ""
        over_tasks = (f"{known.of('mean_A').value:.1f}", known.of("F").text()) if known.has_updates else ("", "")
        cells = (known.of("A_T").text(), ahead, *over_tasks)
        costs = (_passes(key, [known]), _cost(known, "state_mb", ".1f"))
        rows.append((_bold(key, known.title), *cells, str(len(known.seeds)), *costs))
    heads = ("method", "A_T %", "One-A+ minus it", "mean A %", "F", "n", "passes", "MB kept")
    return table(heads, rows, words=1)


def expected() -> str:
    """Accuracy without training, with updates, and with all images at once."""
    rows = []
    for key, words in (
        ("simplecil", "nothing trained, nearest class mean"),
        ("frozen-gaussian", "nothing trained, the default classifier"),
        (PLUS, "**taught in updates** (One-A+)"),
        (JOINT, "all images at once"),
    ):
        numbers = [NUMBERS["accuracy"](key, data) for data in DATA]
        rows.append((words, *(f"**{number}**" if key == PLUS else number for number in numbers)))
    return table(("accuracy, %", *DATA.values()), rows, words=1)


def folders() -> str:
    """The folders of docs/results with their methods and numbers of runs."""
    rows = []
    for group in groups():
        loaded = load_records(RESULTS / group / "runs")
        titles = sorted({method_class(record["config"]["method"]).title for record in loaded})
        rows.append((f"[{group}]({group}/table.md)", "; ".join(titles), str(len(loaded))))
    return table(("table", "methods", "runs"), rows, words=2)


NUMBERS: dict[str, Callable[..., str]] = {
    "accuracy": _if_run(accuracy),
    "accuracy-and-deviation": _if_run(accuracy_and_deviation),
    "gap": _if_run(gap),
    "megabytes": _if_run(stored_megabytes),
    "seeds": seeds,
    "network": network,
}
TABLES: dict[str, Callable[..., str]] = {
    "methods": both_datasets,
    "folders": folders,
    "results": one_dataset,
    "expect": expected,
}
