# SPDX-License-Identifier: Apache-2.0
"""The fields that a record needs to be shown, reported or continued; a record without them is damaged."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from types import UnionType
from typing import Any

_NUMBER = int | float
_MOST = 2**53  # of any number: beyond, not every whole number can be told from the next
_STEPS = {"A": [_NUMBER], "balanced_A": [_NUMBER], "matrix": [[_NUMBER | None]]}

# What tables, curves and pages read; a name with a question mark may be missing.
_SHOWN: dict[str, Any] = {
    "status": str,
    "config": {"method": str, "seed": int, "options?": dict},
    "data": {"name": str, "classes?": [str], "train_images?": int, "test_images?": int, "skipped?": list},
    "backbone": {"name": str, "input?": int, "width?": int, "licence?": str},
    "stream": {"class_order": [int], "sizes": [int], "names?": [str], "samples?": [int]},
    "options?": dict,
    "runtime?": dict,
    "environment?": dict,
    "total": [int],
    "tasks": [{"name": str, "classes": int, "images": int}],
    "metrics": _STEPS
    | {"A_T": _NUMBER, "mean_A": _NUMBER, "weighted_mean_A": _NUMBER, "F": _NUMBER | None, "balanced_A_T?": _NUMBER},
    "open_set?": [_NUMBER | None],
    "cost?": [{"flops_per_image": _NUMBER, "passes_per_image": _NUMBER, "state_bytes": _NUMBER}],
    "timings": {"learn_s": [_NUMBER], "evaluate_s": [_NUMBER]},
    "dates?": {"resumed?": [str]},
}
# What is read besides when a run is continued.
_CONTINUED: dict[str, Any] = {
    "data": {"fingerprint": str, "task_images?": int},
    "backbone": {"sha256": str, "width": int},
    "preprocess": {"size": int},
    "options": dict,
    "runtime": {"precision": str, "threads": int},
    "correct": [[int]],
    "cost": list,
    "memory": {"peak_bytes": list},
    "dates": {"resumed": list, "finished": str | None},
    "checkpoint": {"file": str, "sha256": str},
}


def can_be_shown(record: Any) -> bool:
    """Whether a report can be made of it: every finished task has left its part, and the stream fits the classes."""
    if not _fits(record, _SHOWN) or record["status"] not in ("running", "finished"):
        return False
    sizes, metrics = record["stream"]["sizes"], record["metrics"]
    steps = len(record["tasks"])
    parts = (*(metrics[name] for name in _STEPS), *record["timings"].values(), *metrics["matrix"])
    if any(not isinstance(part, list) or len(part) != steps for part in parts) or not 1 <= steps <= len(sizes):
        return False
    if record.get("open_set") and not _open_set(record["open_set"], steps):
        return False
    classes = {len(record["total"]), len(record["stream"]["class_order"]), sum(sizes)}
    return min(sizes) >= 1 and len(classes) == 1 and _compared(record, list(accumulate(sizes))[:steps])


def _open_set(areas: list[float | None], steps: int) -> bool:
    """Whether there is an area in percent after each task."""
    return len(areas) == steps and all(area is None or 0 <= area <= 100 for area in areas)


def _compared(record: Any, seen: list[int]) -> bool:
    """Whether the counts of further classifiers, where there are any, are of the classes seen after each task."""
    counts = record.get("classifiers") or {}
    if not isinstance(counts, dict) or not all(_fits(steps, [[int]]) for steps in counts.values()):
        return False
    return all([len(step) for step in steps] == seen and _possible(steps, record["total"]) for steps in counts.values())


def _possible(steps: list[list[int]], total: list[int]) -> bool:
    """Whether no class has more right answers than images."""
    return all(0 <= right <= total[row] for step in steps for row, right in enumerate(step))


def can_be_continued(record: Any) -> bool:
    """Whether a run can go on from it; the name of its checkpoint leads nowhere else."""
    if not can_be_shown(record) or not _fits(record, _CONTINUED):
        return False
    steps, file = len(record["tasks"]), record["checkpoint"]["file"]
    return {len(record["correct"]), len(record["memory"]["peak_bytes"])} == {steps} and Path(file).name == file


def _fits(value: Any, shape: Any) -> bool:
    """Whether a value from JSON has a shape: a type, a list of one shape, or a dictionary with these keys and more.

    >>> _fits({"a": [1, 2.5]}, {"a": [_NUMBER], "b?": str}), _fits({"a": None}, {"a?": int}), _fits(True, int)
    (True, True, False)
    """
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(_has(value, name, inner) for name, inner in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(item, shape[0]) for item in value)
    if isinstance(value, bool) or not isinstance(value, shape):
        return False
    return not isinstance(value, int | float) or abs(value) < _MOST  # which NaN is not


def _has(value: dict[str, Any], name: str, shape: type | UnionType | list[Any] | dict[str, Any]) -> bool:
    """Whether there is such a part; nothing is as good as none where it may be missing."""
    plain = name.removesuffix("?")
    return (plain != name and value.get(plain) is None) or (plain in value and _fits(value[plain], shape))
