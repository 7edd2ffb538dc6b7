# SPDX-License-Identifier: Apache-2.0
"""Open-set metrics against numbers computed by hand, and against plain loops over all pairs on random numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onea.errors import OneaError
from onea.openset import auroc, fpr_at_tpr, oscr_curve, rejection_rate

# Few different values make many ties; the others, and infinities, come from anywhere.
VALUES = st.integers(-2, 2).map(float) | st.floats(allow_nan=False, width=32)
SIDE = st.lists(VALUES, min_size=1, max_size=12)
ANSWERED = st.lists(st.tuples(VALUES, st.booleans()), min_size=1, max_size=12)


def pairs_won(known: list[float], unknown: list[float]) -> float:
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a in known for b in unknown)


@given(SIDE, SIDE)
def test_auroc_is_the_share_of_correctly_ordered_pairs(known: list[float], unknown: list[float]) -> None:
    found = auroc(torch.tensor(known), torch.tensor(unknown))
    assert found == pairs_won(known, unknown) / (len(known) * len(unknown))
    assert found + auroc(torch.tensor(unknown), torch.tensor(known)) == pytest.approx(1)


@given(SIDE, SIDE, st.integers(1, 100))
def test_fpr_is_taken_at_the_highest_threshold_that_enough_known_images_reach(
    known: list[float], unknown: list[float], percent: int
) -> None:
    reached = [t for t in known if 100 * sum(value >= t for value in known) >= percent * len(known)]
    expected = sum(value >= max(reached) for value in unknown) / len(unknown)
    assert fpr_at_tpr(torch.tensor(known), torch.tensor(unknown), percent) == expected


@given(SIDE, VALUES)
def test_an_image_at_the_threshold_is_not_rejected(values: list[float], threshold: float) -> None:
    assert rejection_rate(torch.tensor(values), threshold) == sum(v < threshold for v in values) / len(values)


@given(ANSWERED, SIDE)
def test_every_point_of_the_curve_and_its_area(answered: list[tuple[float, bool]], unknown: list[float]) -> None:
    known, right = [value for value, _ in answered], [correct for _, correct in answered]
    curve = oscr_curve(torch.tensor(known), torch.tensor(right), torch.tensor(unknown))
    thresholds = sorted({*known, *unknown}, reverse=True)
    assert curve.fpr.tolist() == [0, *(sum(u >= t for u in unknown) / len(unknown) for t in thresholds)]
    assert curve.ccr.tolist() == [0, *(sum(r and v >= t for v, r in answered) / len(known) for t in thresholds)]
    won = pairs_won([value for value, correct in answered if correct], unknown)
    assert curve.area == pytest.approx(won / (len(known) * len(unknown)), abs=1e-12)
    assert all(a <= b for line in (curve.fpr, curve.ccr) for a, b in pairwise(line.tolist()))


def test_with_correct_predictions_the_oscr_curve_is_the_roc_curve() -> None:
    known, unknown = torch.randn(50) + 1, torch.randn(40)
    assert oscr_curve(known, torch.ones(50, dtype=torch.bool), unknown).area == pytest.approx(auroc(known, unknown))
    assert oscr_curve(known, torch.zeros(50, dtype=torch.bool), unknown).area == 0


def test_separable_scores_have_perfect_metrics() -> None:
    known, unknown = torch.arange(10.0) + 100, torch.arange(7.0)
    assert auroc(known, unknown) == 1
    assert fpr_at_tpr(known, unknown) == 0
    assert auroc(torch.ones(3), torch.ones(5)) == 0.5, "all are tied"


def test_scores_of_different_precision_are_compared_exactly() -> None:
    low = torch.tensor([1.0], dtype=torch.bfloat16)
    assert auroc(low, torch.tensor([1 - 1e-9], dtype=torch.float64)) == 1


@pytest.mark.parametrize("wrong", [torch.zeros(0), torch.zeros(2, 2), torch.tensor([0.0, float("nan")])])
def test_empty_and_nan_scores_are_refused(wrong: Tensor) -> None:
    fine = torch.ones(2)
    for call in (
        lambda: auroc(wrong, fine),
        lambda: auroc(fine, wrong),
        lambda: fpr_at_tpr(wrong, fine),
        lambda: fpr_at_tpr(fine, wrong),
        lambda: rejection_rate(wrong, 0.0),
        lambda: oscr_curve(wrong, torch.ones(wrong.shape, dtype=torch.bool), fine),
        lambda: oscr_curve(fine, torch.ones(2, dtype=torch.bool), wrong),
    ):
        with pytest.raises(OneaError):
            call()
    with pytest.raises(OneaError, match="3 predictions for 2 known images"):
        oscr_curve(fine, torch.ones(3, dtype=torch.bool), fine)
    with pytest.raises(OneaError, match="tpr_percent is 0"):
        fpr_at_tpr(fine, fine, tpr_percent=0)
