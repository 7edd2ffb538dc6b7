# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run from counts of correct predictions: A_t, A_T, their means, and forgetting.

Pure functions on plain numbers. Accuracies are percentages and are not rounded. Tasks and steps count from 0 in code;
``correct[j][k]`` is the number of correctly classified test images of task j after learning task k (k >= j), and
``total[j]`` is the number of test images of task j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt

from onea.errors import OneaError

Floats = npt.NDArray[np.float64]

LEVEL = 0.95  # of all confidence intervals
_Z = 1.959964  # the quantile of the normal distribution for this level


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """The 95 % confidence interval of a proportion, such as an accuracy between 0 and 1 (Wilson, 1927).

    >>> low, high = wilson_interval(9, 9)
    >>> round(low, 3), high
    (0.701, 1.0)
    """
    if not total:
        return 0.0, 1.0
    rate, z = correct / total, _Z**2 / total
    middle = (rate + z / 2) / (1 + z)
    half = (z * (rate * (1 - rate) + z / 4)) ** 0.5 / (1 + z)
    return (middle - half if correct else 0.0), (middle + half if correct < total else 1.0)  # no rounding at 0 and 1


def t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of a mean by Student's t; None for a single value.

    To compare two configurations, pass the differences by seed (a paired test).

    >>> [round(end, 2) for end in t_interval([1.0, 2.0, 3.0])], t_interval([2.0])
    ([-0.48, 4.48], None)
    """
    if len(values) < 2:
        return None
    middle = fmean(values)
    half = _t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return middle - half, middle + half


def _t_quantile(df: int) -> float:
    """The two-sided 95 % quantile of Student's t distribution.

    For whole degrees of freedom the distribution function is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    It increases with the angle whose tangent is t / sqrt(degrees of freedom).

    >>> [round(_t_quantile(df), 3) for df in (1, 2, 4, 30)]
    [12.706, 4.303, 2.776, 2.042]
    """
    odd = df % 2

    def probability(angle: float) -> float:
        term, total = (math.cos(angle) if odd else 1.0), 0.0
        for n in range(2 + odd, df + 1, 2):
            total += term
            term *= math.cos(angle) ** 2 * (n - 1) / n
        return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total

    low, high = 0.0, math.pi / 2
    for _ in range(60):  # bisection, down to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < LEVEL else (low, middle)
    return math.tan(low) * math.sqrt(df)


def accuracy_matrix(correct: npt.ArrayLike, total: npt.ArrayLike) -> Floats:
    """Accuracy in percent on task j after learning task k, at ``[j, k]``; NaN where task j was not learned yet.

    >>> accuracy_matrix([[8, 6], [0, 3]], [10, 4])
    array([[80., 60.],
           [nan, 75.]])
    """
    hits, images = _counts(correct, total)
    matrix = 100.0 * hits / images[:, None]
    matrix[np.tril_indices(len(images), k=-1)] = np.nan
    return matrix


def step_accuracies(correct: npt.ArrayLike, total: npt.ArrayLike) -> Floats:
    """A_t: accuracy in percent on the test images of all classes seen, after each task.

    >>> step_accuracies([[8, 6], [0, 3]], [10, 5])
    array([80., 60.])
    """
    hits, images = _counts(correct, total)
    return np.asarray(100.0 * np.triu(hits).sum(axis=0) / np.cumsum(images), dtype=np.float64)


def last_accuracy(A: npt.ArrayLike) -> float:
    """A_T: accuracy in percent over all classes after the last task.

    >>> last_accuracy([80.0, 60.0])
    60.0
    """
    return float(_steps(A)[-1])


def mean_accuracy(A: npt.ArrayLike) -> float:
    """The mean of A_t over the steps.

    >>> mean_accuracy([80.0, 60.0])
    70.0
    """
    return float(_steps(A).mean())


def weighted_mean_accuracy(A: npt.ArrayLike, sizes: Sequence[int]) -> float:
    """The mean of A_t, each step weighted by the classes seen relative to a balanced stream.

    ``w_t = T K_t / (C t)``, where K_t of C classes are seen after t of T tasks. A balanced stream gives the plain mean.

    >>> weighted_mean_accuracy([80.0, 60.0], [1, 3])  # weights 1/2 and 1
    66.66666666666667
    """
    steps = _steps(A)
    if len(sizes) != len(steps):
        raise OneaError(f"{len(steps)} accuracies for {len(sizes)} tasks; give one accuracy per task.")
    seen = np.cumsum(np.asarray(sizes, dtype=np.float64))
    weights = len(steps) * seen / (seen[-1] * np.arange(1, len(steps) + 1))
    return float((weights * steps).sum() / weights.sum())


def forgetting_per_task(matrix: npt.ArrayLike) -> Floats:
    """The best earlier accuracy of each task but the last, minus its final accuracy; negative where it improved.

    >>> forgetting_per_task([[80, 90, 60], [float("nan"), 75, 80], [float("nan"), float("nan"), 50]])
    array([30., -5.])
    """
    table = np.asarray(matrix, dtype=np.float64)
    if table.ndim != 2 or table.shape[0] != table.shape[1]:
        raise OneaError(f"An accuracy matrix must be square, not {table.shape}; give one row and one column per task.")
    last = len(table) - 1
    return np.array([table[j, j:last].max() - table[j, last] for j in range(last)], dtype=np.float64)


def forgetting(matrix: npt.ArrayLike) -> float | None:
    """F: the mean of ``forgetting_per_task``; None with a single task.

    >>> forgetting([[80, 90, 60], [float("nan"), 75, 80], [float("nan"), float("nan"), 50]])
    12.5
    >>> forgetting([[80]]) is None
    True
    """
    drops = forgetting_per_task(matrix)
    return float(drops.mean()) if len(drops) else None


def forgetting_per_step(matrix: npt.ArrayLike) -> Floats:
    """The accuracy that earlier tasks lose in each step but the first, divided by the number of tasks but the last.

    The sum is the mean loss of a task since it was learned, which equals F if no task improved in between.

    >>> forgetting_per_step([[80, 90, 60], [float("nan"), 75, 80], [float("nan"), float("nan"), 50]])
    array([-5. , 12.5])
    """
    table = np.asarray(matrix, dtype=np.float64)
    last = len(table) - 1
    return np.array([(table[:k, k - 1] - table[:k, k]).sum() / last for k in range(1, last + 1)], dtype=np.float64)


def balanced_accuracy(correct_per_class: npt.ArrayLike, total_per_class: npt.ArrayLike) -> float:
    """The mean of the accuracies of the classes (macro recall), in percent; classes without test images are left out.

    >>> balanced_accuracy([9, 1], [10, 2])  # 90 % and 50 %; plain accuracy is 83 %
    70.0
    """
    hits, images = _pair(correct_per_class, total_per_class)
    tested = images > 0
    if not tested.any():
        raise OneaError("No class has a test image, so there is no accuracy; add test images for at least one class.")
    return float((100.0 * hits[tested] / images[tested]).mean())


def task_counts(
    correct_per_class: Sequence[Sequence[int]], total_per_class: Sequence[int], sizes: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Counts by task from counts by class: ``correct[j, k]`` (0 where k < j) and ``total[j]``.

    >>> correct, total = task_counts([[4], [3, 5, 1]], [5, 6, 4], [1, 2])
    >>> correct.tolist(), total.tolist()
    ([[4, 3], [0, 6]], [5, 10])
    """
    steps = len(correct_per_class)
    offsets = [0, *accumulate(sizes)]
    correct = np.zeros((steps, steps), dtype=np.int64)
    for k, hits in enumerate(correct_per_class):
        for j in range(k + 1):
            correct[j, k] = sum(hits[offsets[j] : offsets[j + 1]])
    total = [sum(total_per_class[offsets[j] : offsets[j + 1]]) for j in range(steps)]
    return correct, np.asarray(total, dtype=np.int64)


def summarise(
    correct_per_class: Sequence[Sequence[int]], total_per_class: Sequence[int], sizes: Sequence[int]
) -> dict[str, Any]:
    """Every metric of a run, as values for JSON.

    Args:
        correct_per_class: one list per learned task: the correct predictions of each class seen, by position.
        total_per_class: the number of test images of each class, by position.
        sizes: the stream's task sizes. With fewer steps than tasks, the metrics cover the stream so far.

    Returns:
        ``A``, ``A_T``, ``mean_A``, ``weighted_mean_A``, ``F`` and ``F_per_task``; ``balanced_A``, ``balanced_A_T`` and
        ``mean_balanced_A`` (macro-averaged over classes); ``matrix`` (``[j][k]``, None where k < j).

    >>> block = summarise([[4], [3, 5, 1]], [5, 6, 4], [1, 2])
    >>> block["A"], block["F"], block["matrix"]
    ([80.0, 60.0], 20.0, [[80.0, 60.0], [None, 60.0]])
    """
    _check_steps(correct_per_class, total_per_class, sizes)
    correct, total = task_counts(correct_per_class, total_per_class, sizes)
    A = step_accuracies(correct, total)
    matrix = accuracy_matrix(correct, total)
    balanced = [balanced_accuracy(hits, total_per_class[: len(hits)]) for hits in correct_per_class]
    return {
        "A": A.tolist(),
        "A_T": last_accuracy(A),
        "mean_A": mean_accuracy(A),
        "weighted_mean_A": weighted_mean_accuracy(A, sizes[: len(A)]),
        "F": forgetting(matrix),
        "F_per_task": forgetting_per_task(matrix).tolist(),
        "balanced_A": balanced,
        "balanced_A_T": balanced[-1],
        "mean_balanced_A": mean_accuracy(balanced),
        # NaN is not JSON
        "matrix": [[None if k < j else value for k, value in enumerate(row)] for j, row in enumerate(matrix.tolist())],
    }


def _check_steps(correct: Sequence[Sequence[int]], total: Sequence[int], sizes: Sequence[int]) -> None:
    if not 1 <= len(correct) <= len(sizes):
        raise OneaError(
            f"There are counts after {len(correct)} steps for {len(sizes)} tasks; give them for every learned task."
        )
    for step, (hits, seen) in enumerate(zip(correct, accumulate(sizes), strict=False)):
        if len(hits) != seen or len(total) < seen:
            raise OneaError(
                f"After task {step + 1}, {seen} classes were seen, but {len(hits)} have counts and "
                f"{len(total)} have totals; give both for every class seen."
            )


def _counts(correct: npt.ArrayLike, total: npt.ArrayLike) -> tuple[Floats, Floats]:
    images = np.asarray(total, dtype=np.float64)
    hits = np.asarray(correct, dtype=np.float64)
    if images.ndim != 1 or not len(images) or hits.shape != (len(images), len(images)):
        raise OneaError(
            f"Counts of shape {hits.shape} do not fit totals of shape {images.shape}; give T x T counts and T totals."
        )
    if images.min() <= 0:
        raise OneaError(f"Task {int(images.argmin()) + 1} has no test images; give every task at least one.")
    upper = np.triu_indices(len(images))
    _pair(hits[upper], images[upper[0]])
    return hits, images


def _pair(correct: npt.ArrayLike, total: npt.ArrayLike) -> tuple[Floats, Floats]:
    hits, images = np.asarray(correct, dtype=np.float64), np.asarray(total, dtype=np.float64)
    if hits.shape != images.shape:
        raise OneaError(f"{hits.size} counts for {images.size} totals; give one of each per class.")
    if ((hits < 0) | (hits > images)).any():
        raise OneaError(
            "A count of correct predictions is negative or above its total; count the same test images for both."
        )
    return hits, images


def _steps(A: npt.ArrayLike) -> Floats:
    steps = np.asarray(A, dtype=np.float64)
    if steps.ndim != 1 or not len(steps):
        raise OneaError("There are no step accuracies; evaluate after at least one task.")
    return steps
