# SPDX-License-Identifier: Apache-2.0
"""Open-set recognition metrics: AUROC, false positive rate at a true positive rate, and the OSCR curve.

Pure functions on a familiarity score for each image, which is higher for known classes. Below a threshold the
prediction is *unknown*. Rates lie between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onea.errors import OneaError


@dataclass(frozen=True)
class OpenSetCurve:
    """The open-set classification rate curve (OSCR, Dhamija et al. 2018), over decreasing thresholds.

    >>> OpenSetCurve(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.0, 0.8, 0.8])).area
    0.6000000238418579

    Attributes:
        fpr: false positive rate, the fraction of unknown images at or above the threshold, ``float64 [points]``.
        ccr: correct classification rate, the fraction of known images that are at or above the threshold and correctly
            classified; its last value is the accuracy.
    """

    fpr: Tensor
    ccr: Tensor

    @property
    def area(self) -> float:
        """Area under the curve; at most the accuracy on known images."""
        return float(torch.trapezoid(self.ccr, self.fpr))


def auroc(known: Tensor, unknown: Tensor) -> float:
    """Area under the ROC curve: the probability that a known image scores higher than an unknown one; ties count half.

    >>> auroc(torch.tensor([3.0, 2.0]), torch.tensor([2.0, 1.0]))
    0.875
    """
    known, unknown = _check_scores(known), _check_scores(unknown).sort().values
    lower = torch.searchsorted(unknown, known).sum() + torch.searchsorted(unknown, known, right=True).sum()
    return int(lower) / (2 * len(known) * len(unknown))


def fpr_at_tpr(known: Tensor, unknown: Tensor, tpr_percent: int = 95) -> float:
    """False positive rate at the threshold that ``tpr_percent`` % of the known images reach (FPR95).

    >>> fpr_at_tpr(torch.arange(100.0), torch.tensor([3.0, 4.0, 5.0, 6.0]))
    0.5
    """
    if not 1 <= tpr_percent <= 100:
        raise OneaError(f"tpr_percent is {tpr_percent}; it must lie between 1 and 100.")
    known, unknown = _check_scores(known), _check_scores(unknown)
    needed = -(-tpr_percent * len(known) // 100)  # in integers, as 0.95 n may be rounded up
    threshold = known.sort(descending=True).values[needed - 1]
    return int((unknown >= threshold).sum()) / len(unknown)


def rejection_rate(scores: Tensor, threshold: float) -> float:
    """Fraction of images below a threshold, which are predicted as *unknown*.

    >>> rejection_rate(torch.tensor([1.0, 2.0, 3.0, 4.0]), 2.0)
    0.25
    """
    return int((_check_scores(scores) < threshold).sum()) / len(scores)


def oscr_curve(known: Tensor, correct: Tensor, unknown: Tensor) -> OpenSetCurve:
    """The OSCR curve, with one point for each distinct score.

    Args:
        known: scores of images of known classes.
        correct: whether each of these images is correctly classified.
        unknown: scores of images of unknown classes.

    >>> curve = oscr_curve(torch.tensor([3.0, 2.0]), torch.tensor([True, False]), torch.tensor([2.0, 1.0]))
    >>> curve.fpr.tolist(), curve.ccr.tolist(), curve.area
    ([0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 0.5, 0.5], 0.5)
    """
    known, unknown = _check_scores(known), _check_scores(unknown)
    if correct.shape != known.shape:
        raise OneaError(f"{correct.numel()} predictions for {known.numel()} known images; give one for each.")
    thresholds = torch.cat([known, unknown]).unique().flip(0)
    fpr, ccr = (
        torch.cat([torch.zeros(1, dtype=torch.int64), _count_at_least(images, thresholds)]).double() / total
        for images, total in ((unknown, len(unknown)), (known[correct.bool()], len(known)))
    )
    return OpenSetCurve(fpr, ccr)


def _count_at_least(scores: Tensor, thresholds: Tensor) -> Tensor:
    """The number of scores at or above each threshold."""
    return len(scores) - torch.searchsorted(scores.sort().values, thresholds)


def _check_scores(scores: Tensor) -> Tensor:
    """Scores in float64, so that different precisions compare exactly."""
    if scores.dim() != 1 or not len(scores):
        raise OneaError(f"Scores have shape {list(scores.shape)}; give one number for each of one or more images.")
    if bool(scores.isnan().any()):
        raise OneaError("The scores of some images are NaN; compute them again, or leave these images out.")
    return scores.detach().to("cpu", torch.float64)
