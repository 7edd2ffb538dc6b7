# SPDX-License-Identifier: Apache-2.0
"""The numbers that describe a run, each declared once for terminal, tables, trackers, reports and the paper.

A metric is a function of a record. Installed packages add theirs by an entry point in the group ``onea.metrics``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from onea.errors import OneaError
from onea.registry import Registry
from onea.research.record import Record


@dataclass(frozen=True)
class Metric:
    """A number of a record.

    >>> last = Metric("A_T", "right after the last task", lambda record: record["metrics"]["A_T"], "%")
    >>> last.heading, last.text({"metrics": {"A_T": 81.234}}), last.text({})
    ('A_T %', '81.23', '–')

    Attributes:
        title: as tables head it.
        meaning: one line for a reader who has never heard of it.
        read: takes the number from a record; None where it has none.
        unit: behind the title, such as ``%``.
        higher_is_better: which way is better.
        digits: behind the decimal point.
        headline: whether summaries, reports and trackers show it without being asked.
        optional: whether runs have it on request only; where none of the records shown has it, it is left out.
        machine_dependent: whether it depends on the machine, so that runs of different machines do not compete in it.
        relative: whether the paper's tables show it as a multiple of One-A's in the same column and of the same seed.
    """

    title: str
    meaning: str
    read: Callable[[Record], float | None]
    unit: str = ""
    higher_is_better: bool = True
    digits: int = 2
    headline: bool = False
    optional: bool = False
    machine_dependent: bool = False
    relative: bool = False

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title} {self.unit}".rstrip()

    def value(self, record: Record) -> float | None:
        """The number of a record; None also where the record lacks what ``read`` asks for, as an older one may.

        A metric of somebody else may give a tensor, or something that no mean can be taken of, such as NaN.
        """
        try:
            found = self.read(record)
            number = found if found is None or isinstance(found, int | float) else float(found)
            return number if number is not None and math.isfinite(number) else None
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None

    def text(self, record: Record) -> str:
        """The number of a record as it is printed."""
        value = self.value(record)
        return "–" if value is None else f"{value:.{self.digits}f}"

    def best(self, *values: float) -> float:
        """The best of some numbers."""
        return max(values) if self.higher_is_better else min(values)


def _stored(name: str) -> Callable[[Record], float | None]:
    """A number that the run itself has computed."""
    return lambda record: record["metrics"].get(name)


def _cost(name: str, unit: float = 1.0) -> Callable[[Record], float | None]:
    """A measured cost of an answer after the last task."""

    def read(record: Record) -> float | None:
        return record["cost"][-1][name] / unit if record.get("cost") else None

    return read


def _learning_seconds(record: Record) -> float:
    return float(sum(record["timings"]["learn_s"]))


def _answer_milliseconds(record: Record) -> float:
    return float(1000 * record["timings"]["evaluate_s"][-1] / sum(record["total"]))


def _open_set(record: Record) -> float:
    return fmean(area for area in record["open_set"] if area is not None)


def _tasks(record: Record) -> float:
    return float(len(record["stream"]["sizes"]))


def _adapters(record: Record) -> float:
    """Adapters that answers draw on after the last task, as the method declares them."""
    from onea.options import make_options
    from onea.research.methods import method_class  # reading a record needs no torch otherwise

    kind = method_class(record["config"]["method"])
    options: Any = make_options(kind.Options, record["options"])
    return float(kind.adapters_used(options, len(record["stream"]["sizes"])))


_OWN = {
    "A_T": Metric("A_T", "right over all classes after the last task", _stored("A_T"), "%", headline=True),
    "mean_A": Metric("mean A", "mean of that accuracy over all tasks", _stored("mean_A"), "%", headline=True),
    "weighted_mean_A": Metric(
        "weighted mean A",
        "the same mean, but a step weighs more if more classes have been seen by then than in a balanced stream",
        _stored("weighted_mean_A"),
        "%",
        headline=True,
    ),
    "F": Metric(
        "F",
        "points a task has lost since its best, mean over tasks; lower is better",
        _stored("F"),
        higher_is_better=False,
        headline=True,
    ),
    "balanced_A_T": Metric(
        "class-balanced A_T", "A_T with every class counting the same", _stored("balanced_A_T"), "%", headline=True
    ),
    "open_set": Metric(
        "open-set AUROC",
        "test images of classes yet to come told from those of classes seen, mean over tasks; 50 is guessing",
        _open_set,
        "%",
        headline=True,
        optional=True,
    ),
    "training_s": Metric(
        "training",
        "seconds spent learning, evaluation left out",
        _learning_seconds,
        "s",
        higher_is_better=False,
        digits=1,
        headline=True,
        machine_dependent=True,
    ),
    "inference_ms": Metric(
        "ms per image",
        "milliseconds of an answer in the last evaluation",
        _answer_milliseconds,
        higher_is_better=False,
        machine_dependent=True,
    ),
    "flops": Metric(
        "FLOPs",
        "floating-point operations of an answer, as a multiple of One-A's",
        _cost("flops_per_image"),
        higher_is_better=False,
        relative=True,
    ),
    "gflops": Metric(
        "GFLOPs per image",
        "billions of floating-point operations of an answer",
        _cost("flops_per_image", 1e9),
        higher_is_better=False,
    ),
    "passes": Metric(
        "passes",
        "passes through the network for an answer",
        _cost("passes_per_image"),
        higher_is_better=False,
        digits=1,
    ),
    "state_mb": Metric(
        "state",
        "size of what a method keeps from task to task",
        _cost("state_bytes", 1e6),
        "MB",
        higher_is_better=False,
        digits=1,
    ),
    "adapters": Metric("adapters", "adapters that an answer draws on", _adapters, higher_is_better=False, digits=0),
    "tasks": Metric("tasks", "number of tasks", _tasks, higher_is_better=False, digits=0),
}

METRICS = Registry("metric", "onea.metrics", _OWN)


def metric(key: str) -> Metric:
    """A metric by its key."""
    found = METRICS.load(key)
    if not isinstance(found, Metric):
        raise OneaError(f"The metric '{key}' is a {type(found).__name__}; its package must give a Metric.")
    return found


def all_metrics() -> dict[str, Metric]:
    """Every metric by key; what other packages register and is none is left out."""
    return {key: one for key, one in METRICS.load_all().items() if isinstance(one, Metric)}


def headline_metrics(records: Collection[Record] = (), *, machine_dependent: bool = True) -> dict[str, Metric]:
    """The metrics that are shown of some records without being asked for, by key.

    Args:
        records: which are shown; an optional metric that none of them has is left out.
        machine_dependent: whether metrics that depend on the machine are among them.
    """
    return {
        key: one
        for key, one in all_metrics().items()
        if one.headline
        and (machine_dependent or not one.machine_dependent)
        and (not one.optional or any(one.value(record) is not None for record in records))
    }


def forgetting_curve(record: Record) -> list[float]:
    """F after every task from the second on: how far the tasks before it have fallen from their best."""
    from onea.metrics import forgetting  # numpy takes a while

    matrix = [[float("nan") if value is None else value for value in row] for row in record["metrics"]["matrix"]]
    found = (forgetting([row[:steps] for row in matrix[:steps]]) for steps in range(2, len(matrix) + 1))
    return [value for value in found if value is not None]
