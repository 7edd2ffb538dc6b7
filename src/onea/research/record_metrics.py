# SPDX-License-Identifier: Apache-2.0
"""The metrics of a run, each declared once for terminal, tables, trackers, reports and the paper.

A metric is a function of a record. Other packages can add metrics by entry points in the group ``onea.metrics``.
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
    """A number that is computed from a record.

    >>> last = Metric("A_T", "accuracy after the last task", lambda record: record["metrics"]["A_T"], "%")
    >>> last.heading, last.text({"metrics": {"A_T": 81.234}}), last.text({})
    ('A_T %', '81.23', '–')

    Attributes:
        title: title of the table column.
        meaning: explanation in one line.
        read: function that computes the number from a record; None where it is missing.
        unit: unit after the title, such as ``%``.
        higher_is_better: whether higher values are better.
        digits: digits after the decimal point.
        headline: shown in summaries, reports and trackers by default.
        optional: recorded only on request; left out where no record has it.
        machine_dependent: depends on the machine; values from different machines cannot be compared.
        relative: shown in the paper's tables as a multiple of One-A's value for the same stream and seed.
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
        """The number of a record; None where fields are missing, and for NaN and infinity.

        Metrics of other packages may return tensors.
        """
        try:
            number = self.read(record)
            number = number if number is None or isinstance(number, int | float) else float(number)
            return number if number is not None and math.isfinite(number) else None
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None

    def text(self, record: Record) -> str:
        """The formatted number of a record."""
        value = self.value(record)
        return "–" if value is None else f"{value:.{self.digits}f}"


def _recorded(name: str) -> Callable[[Record], float | None]:
    """A number in the record's ``metrics``."""
    return lambda record: record["metrics"].get(name)


def _cost(name: str, divisor: float = 1.0) -> Callable[[Record], float]:
    """The cost per image after the last task."""
    return lambda record: record["cost"][-1][name] / divisor


def _inference_milliseconds(record: Record) -> float:
    return float(1000 * record["timings"]["evaluate_s"][-1] / sum(record["total"]))


def _mean_open_set_auroc(record: Record) -> float:
    return fmean(auroc for auroc in record["open_set"] if auroc is not None)


def _num_tasks(record: Record) -> float:
    return len(record["stream"]["sizes"])


def _num_adapters(record: Record) -> float:
    """Number of adapters that are used for inference after the last task."""
    from onea.options import make_options
    from onea.research.methods import method_class  # imports torch, which other metrics do not need

    method_type = method_class(record["config"]["method"])
    options: Any = make_options(method_type.Options, record["options"])
    return method_type.adapters_used(options, len(record["stream"]["sizes"]))


_BUILT_IN = {
    "A_T": Metric("A_T", "accuracy over all classes after the last task", _recorded("A_T"), "%", headline=True),
    "mean_A": Metric(
        "mean A", "mean over all tasks of the accuracy over the classes seen", _recorded("mean_A"), "%", headline=True
    ),
    "weighted_mean_A": Metric(
        "weighted mean A",
        "the same mean, each task weighted by the classes seen, relative to a balanced stream",
        _recorded("weighted_mean_A"),
        "%",
        headline=True,
    ),
    "F": Metric(
        "F",
        "forgetting: percentage points below a task's best accuracy, mean over tasks; lower is better",
        _recorded("F"),
        higher_is_better=False,
        headline=True,
    ),
    "balanced_A_T": Metric(
        "class-balanced A_T",
        "mean of the classes' accuracies after the last task",
        _recorded("balanced_A_T"),
        "%",
        headline=True,
    ),
    "open_set": Metric(
        "open-set AUROC",
        "AUROC of seen against unseen classes, mean over tasks; 50 is chance",
        _mean_open_set_auroc,
        "%",
        headline=True,
        optional=True,
    ),
    "training_s": Metric(
        "training",
        "seconds of training, without evaluation",
        lambda record: sum(record["timings"]["learn_s"]),
        "s",
        higher_is_better=False,
        digits=1,
        headline=True,
        machine_dependent=True,
    ),
    "inference_ms": Metric(
        "ms per image",
        "milliseconds per image in the last evaluation",
        _inference_milliseconds,
        higher_is_better=False,
        machine_dependent=True,
    ),
    "flops": Metric(
        "FLOPs",
        "floating-point operations per image, as a multiple of One-A's",
        _cost("flops_per_image"),
        higher_is_better=False,
        relative=True,
    ),
    "gflops": Metric(
        "GFLOPs per image",
        "billions of floating-point operations per image",
        _cost("flops_per_image", 1e9),
        higher_is_better=False,
    ),
    "passes": Metric(
        "passes",
        "forward passes per image",
        _cost("passes_per_image"),
        higher_is_better=False,
        digits=1,
    ),
    "state_mb": Metric(
        "state",
        "size of the state that a method stores between tasks",
        _cost("state_bytes", 1e6),
        "MB",
        higher_is_better=False,
        digits=1,
    ),
    "adapters": Metric(
        "adapters", "adapters that are used for inference", _num_adapters, higher_is_better=False, digits=0
    ),
    "tasks": Metric("tasks", "number of tasks", _num_tasks, higher_is_better=False, digits=0),
}

METRICS = Registry("metric", "onea.metrics", _BUILT_IN)


def metric(key: str) -> Metric:
    """A metric by its key."""
    loaded = METRICS.load(key)
    if not isinstance(loaded, Metric):
        raise OneaError(f"The metric '{key}' is a {type(loaded).__name__}; its package must register a Metric.")
    return loaded


def all_metrics() -> dict[str, Metric]:
    """All metrics by key; objects of other types that packages have registered are left out."""
    return {key: value for key, value in METRICS.load_all().items() if isinstance(value, Metric)}


def headline_metrics(records: Collection[Record] = (), *, machine_dependent: bool = True) -> dict[str, Metric]:
    """The metrics that are shown by default, by key.

    Args:
        records: records to show; an optional metric that none of them has is left out.
        machine_dependent: include metrics that depend on the machine.
    """
    return {
        key: metric
        for key, metric in all_metrics().items()
        if metric.headline
        and (machine_dependent or not metric.machine_dependent)
        and (not metric.optional or any(metric.value(record) is not None for record in records))
    }


def forgetting_curve(record: Record) -> list[float]:
    """Forgetting F after each task from the second on."""
    from onea.metrics import forgetting  # imports NumPy, which is slow

    matrix = [[float("nan") if value is None else value for value in row] for row in record["metrics"]["matrix"]]
    curve = (forgetting([row[:steps] for row in matrix[:steps]]) for steps in range(2, len(matrix) + 1))
    return [value for value in curve if value is not None]
