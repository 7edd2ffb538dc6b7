# SPDX-License-Identifier: Apache-2.0
"""Metrics against numbers computed by hand, and against an implementation with plain loops on random counts."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from onea.errors import OneaError
from onea.metrics import (
    accuracy_matrix,
    balanced_accuracy,
    forgetting,
    forgetting_per_task,
    last_accuracy,
    mean_accuracy,
    step_accuracies,
    summarise,
    t_interval,
    task_counts,
    weighted_mean_accuracy,
)

# Three tasks of 2, 1 and 3 classes. Test images per class: 10, 10 | 20 | 5, 5, 10.
SIZES = (2, 1, 3)
TOTAL = (10, 10, 20, 5, 5, 10)
CORRECT = (
    (9, 7),  # A_1 = 16 / 20 = 80
    (8, 6, 18),  # A_2 = 32 / 40 = 80
    (7, 5, 19, 4, 1, 6),  # A_3 = 42 / 60 = 70
)


def test_by_hand() -> None:
    block = summarise(CORRECT, TOTAL, SIZES)
    assert block["A"] == [80.0, 80.0, 70.0]
    assert block["A_T"] == 70.0
    assert block["mean_A"] == pytest.approx(230 / 3)
    # K = 2, 3, 6 of C = 6 in T = 3: w = 3*2/(6*1) = 1, 3*3/(6*2) = 3/4, 3*6/(6*3) = 1
    assert block["weighted_mean_A"] == pytest.approx((80 + 0.75 * 80 + 70) / 2.75)
    # task 1: 80, 70, 60; task 2: 90, 95; task 3: 55
    assert block["matrix"] == [[80.0, 70.0, 60.0], [None, 90.0, 95.0], [None, None, 55.0]]
    # f_1 = max(80, 70) - 60 = 20; f_2 = 90 - 95 = -5
    assert block["F_per_task"] == pytest.approx([20.0, -5.0])
    assert block["F"] == pytest.approx(7.5)
    # classes: 90, 70 | 80, 60, 90 | 70, 50, 95, 80, 20, 60
    assert block["balanced_A"] == pytest.approx([80.0, 230 / 3, 375 / 6])
    assert block["balanced_A_T"] == pytest.approx(62.5)
    assert block["mean_balanced_A"] == pytest.approx((80 + 230 / 3 + 62.5) / 3)


def test_forgetting_is_relative_to_the_best_earlier_accuracy() -> None:
    nan = float("nan")
    matrix = [[50, 70, 90, 60], [nan, 80, 75, 70], [nan, nan, 40, 45], [nan, nan, nan, 99]]
    assert forgetting_per_task(matrix).tolist() == [30, 10, -5]
    assert forgetting(matrix) == pytest.approx(35 / 3)


def test_forgetting_can_be_negative() -> None:
    assert forgetting([[50, 60], [float("nan"), 10]]) == -10.0


def test_forgetting_of_a_single_task_is_none() -> None:
    block = summarise([[3, 1]], [4, 4], [2])
    assert block["F"] is None
    assert block["F_per_task"] == []
    assert block["A_T"] == block["mean_A"] == block["weighted_mean_A"] == 50.0


def test_weighted_mean_of_a_balanced_stream_is_the_mean() -> None:
    A = [90.0, 60.0, 30.0, 50.0]
    assert weighted_mean_accuracy(A, [5, 5, 5, 5]) == pytest.approx(mean_accuracy(A))


def test_weighted_mean_by_hand() -> None:
    # K = 3, 4 of 4 in 2 tasks: w = 2*3/(4*1) = 3/2, 2*4/(4*2) = 1
    assert weighted_mean_accuracy([100.0, 50.0], [3, 1]) == pytest.approx((1.5 * 100 + 50) / 2.5)


def test_balanced_accuracy_leaves_out_classes_without_images() -> None:
    assert balanced_accuracy([9, 0, 1], [10, 0, 2]) == 70.0


def test_metrics_of_an_unfinished_stream() -> None:
    assert summarise(CORRECT[:2], TOTAL, SIZES) == summarise(CORRECT[:2], TOTAL[:3], SIZES[:2])


def test_counts_below_the_diagonal_are_ignored() -> None:
    assert step_accuracies([[8, 6], [99, 3]], [10, 5]).tolist() == [80.0, 60.0]
    assert step_accuracies([[8, 6], [float("nan"), 3]], [10, 5]).tolist() == [80.0, 60.0]
    assert math.isnan(accuracy_matrix([[8, 6], [99, 3]], [10, 5])[1, 0])


# ---- an independent reference ---------------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    total = draw(st.lists(st.integers(1, 30), min_size=sum(sizes), max_size=sum(sizes)))
    correct = []
    for t in range(1, len(sizes) + 1):
        correct.append([draw(st.integers(0, n)) for n in total[: sum(sizes[:t])]])
    return correct, total, sizes


def naive(correct: list[list[int]], total: list[int], sizes: list[int]) -> dict[str, object]:
    """The paper's formulas, with indices from 1."""
    T, C = len(sizes), sum(sizes)
    task = [j for j in range(1, T + 1) for _ in range(sizes[j - 1])]

    def acc(j: int, k: int) -> float:
        mine = [c for c in range(C) if task[c] == j]
        return 100 * sum(correct[k - 1][c] for c in mine) / sum(total[c] for c in mine)

    A, even, weight = [], [], []
    for t in range(1, T + 1):
        seen = [c for c in range(C) if task[c] <= t]
        A.append(100 * sum(correct[t - 1][c] for c in seen) / sum(total[c] for c in seen))
        even.append(sum(100 * correct[t - 1][c] / total[c] for c in seen) / len(seen))
        weight.append(T * len(seen) / (C * t))
    f = [max(acc(j, k) for k in range(j, T)) - acc(j, T) for j in range(1, T)]
    return {
        "A": A,
        "A_T": A[-1],
        "mean_A": sum(A) / T,
        "weighted_mean_A": sum(w * a for w, a in zip(weight, A, strict=True)) / sum(weight),
        "F": sum(f) / (T - 1) if T > 1 else None,
        "F_per_task": f,
        "balanced_A": even,
        "balanced_A_T": even[-1],
        "mean_balanced_A": sum(even) / T,
    }


@given(runs())
def test_agrees_with_plain_loops(run: tuple[list[list[int]], list[int], list[int]]) -> None:
    block, reference = summarise(*run), naive(*run)
    matrix = block.pop("matrix")
    assert block.keys() == reference.keys()
    for key, value in reference.items():
        assert block[key] == (value if value is None else pytest.approx(value, abs=1e-9)), key
    assert json.loads(json.dumps(block, allow_nan=False)) == block
    assert [row.count(None) for row in matrix] == list(range(len(matrix)))


@given(runs())
def test_the_summary_agrees_with_the_single_metrics(run: tuple[list[list[int]], list[int], list[int]]) -> None:
    correct, total = task_counts(*run)
    block = summarise(*run)
    A = step_accuracies(correct, total)
    assert A.tolist() == block["A"]
    assert last_accuracy(A) == block["A_T"]
    assert forgetting(accuracy_matrix(correct, total)) == block["F"]
    assert np.all((A >= 0) & (A <= 100))


# ---- sentences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: accuracy_matrix([[1, 2]], [3]), "do not fit"),
        (lambda: accuracy_matrix([[1]], [0]), "Task 1 has no test images"),
        (lambda: accuracy_matrix([[4]], [3]), "above its total"),
        (lambda: step_accuracies([[-1]], [3]), "negative"),
        (lambda: balanced_accuracy([1], [1, 2]), "1 counts for 2 totals"),
        (lambda: balanced_accuracy([0], [0]), "No class has a test image"),
        (lambda: mean_accuracy([]), "no step accuracies"),
        (lambda: weighted_mean_accuracy([1.0], [1, 2]), "1 accuracies for 2 tasks"),
        (lambda: forgetting([[1, 2]]), "square"),
        (lambda: summarise([], [1], [1]), "0 steps"),
        (lambda: summarise([[1], [1]], [1], [1]), "after 2 steps for 1 tasks"),
        (lambda: summarise([[1, 1]], [1, 1], [1, 1]), "After task 1, 1 classes"),
        (lambda: summarise([[1], [1, 1]], [1], [1, 1]), "After task 2, 2 classes"),
    ],
)
def test_invalid_arguments_are_refused(call, words: str) -> None:
    with pytest.raises(OneaError, match=words) as caught:
        call()
    assert "; " in str(caught.value), "why; the fix"


@pytest.mark.parametrize("count", [2, 3, 5, 10, 31, 200])
def test_the_interval_of_a_mean_equals_scipys(count: int) -> None:
    values = np.random.default_rng(count).normal(1.0, 2.0, count)
    expected = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    assert t_interval(values.tolist()) == pytest.approx(expected, rel=1e-9)
    assert t_interval(values[:1].tolist()) is None
