"""The numbers that tables and figures read off a record, by the metric's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """One number of a record.

    Attributes:
        read: from a finished record; None where it has no such number.
        relative: shown as a multiple of One-A's in the same column and of the same seed.
    """

    read: Callable[[Record], float | None]
    higher_is_better: bool = True
    digits: int = 2
    relative: bool = False


def _metric(name: str) -> Callable[[Record], float | None]:
    return lambda record: record["metrics"].get(name)


def _cost(name: str, unit: float = 1.0) -> Callable[[Record], float | None]:
    """A measured cost of an answer after the last task."""

    def read(record: Record) -> float | None:
        return record["cost"][-1][name] / unit if record.get("cost") else None

    return read


def _milliseconds(record: Record) -> float:
    return float(1000 * record["timings"]["evaluate_s"][-1] / sum(record["total"]))


def _tasks(record: Record) -> float:
    return float(len(record["stream"]["sizes"]))


def _adapters(record: Record) -> float:
    """Adapters that answers draw on after the last task, as the method declares them."""
    from onea.methods import method_class
    from onea.options import build

    kind = method_class(record["config"]["method"])
    options: Any = build(kind.Options, record["options"])
    return float(kind.adapters_used(options, len(record["stream"]["sizes"])))


def forgetting_curve(record: Record) -> list[float]:
    """F after every task from the second on: how far the tasks before it have fallen from their best."""
    from onea.metrics import forgetting

    matrix = [[float("nan") if value is None else value for value in row] for row in record["metrics"]["matrix"]]
    found = (forgetting([row[:steps] for row in matrix[:steps]]) for steps in range(2, len(matrix) + 1))
    return [value for value in found if value is not None]


READINGS: dict[str, Reading] = {
    "A_T": Reading(_metric("A_T")),
    "mean_A": Reading(_metric("mean_A")),
    "weighted_mean_A": Reading(_metric("weighted_mean_A")),
    "F": Reading(_metric("F"), higher_is_better=False),
    "flops": Reading(_cost("flops_per_image"), higher_is_better=False, relative=True),
    "gflops": Reading(_cost("flops_per_image", 1e9), higher_is_better=False),
    "passes": Reading(_cost("passes_per_image"), higher_is_better=False, digits=1),
    "state_mb": Reading(_cost("state_bytes", 1e6), higher_is_better=False, digits=1),
    "adapters": Reading(_adapters, higher_is_better=False, digits=0),
    "inference_ms": Reading(_milliseconds, higher_is_better=False),
    "tasks": Reading(_tasks, higher_is_better=False, digits=0),
}
