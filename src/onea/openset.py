# SPDX-License-Identifier: Apache-2.0
"""How well familiarity tells images of known classes from others: ROC area, error rates and the open-set curve.

Stateless functions on the familiarity of each image, a number that is larger the more an image looks like something
known. An image counts as familiar if it reaches a threshold, and as unknown below it. Shares lie between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onea.errors import OneaError


@dataclass(frozen=True)
class OpenSetCurve:
    """Two shares as the threshold falls from above every image to below every image (OSCR, Dhamija et al. 2018).

    >>> OpenSetCurve(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.0, 0.8, 0.8])).area
    0.6000000238418579

    Attributes:
        false_positives: share of unknown images that count as familiar, ``float64 [points]``, from 0 to 1.
        correct: share of known images that count as familiar and whose class is right, from 0 to the accuracy.
    """

    false_positives: Tensor
    correct: Tensor

    @property
    def area(self) -> float:
        """Area below the curve; at most the accuracy on known images."""
        return float(torch.trapezoid(self.correct, self.false_positives))


def auroc(known: Tensor, unknown: Tensor) -> float:
    """Probability that a known image is more familiar than an unknown one; a tie counts half.

    >>> auroc(torch.tensor([3.0, 2.0]), torch.tensor([2.0, 1.0]))
    0.875
    """
    known, unknown = _checked(known), _checked(unknown).sort().values
    lower = torch.searchsorted(unknown, known).sum() + torch.searchsorted(unknown, known, right=True).sum()
    return int(lower) / (2 * len(known) * len(unknown))


def fpr_at_tpr(known: Tensor, unknown: Tensor, percent: int = 95) -> float:
    """Share of unknown images as familiar as the threshold that this percentage of the known images reaches.

    >>> fpr_at_tpr(torch.arange(100.0), torch.tensor([3.0, 4.0, 5.0, 6.0]))
    0.5
    """
    if not 1 <= percent <= 100:
        raise OneaError(f"percent is {percent}; it must lie between 1 and 100.")
    known, unknown = _checked(known), _checked(unknown)
    needed = -(-percent * len(known) // 100)  # in whole numbers: 0.95 n can round to just above one
    threshold = known.sort(descending=True).values[needed - 1]
    return int((unknown >= threshold).sum()) / len(unknown)


def rejection_rate(familiarity: Tensor, threshold: float) -> float:
    """Share of images below a threshold: the known ones there are false alarms, the unknown ones are caught.

    >>> rejection_rate(torch.tensor([1.0, 2.0, 3.0, 4.0]), 2.0)
    0.25
    """
    return int((_checked(familiarity) < threshold).sum()) / len(familiarity)


def oscr_curve(known: Tensor, right: Tensor, unknown: Tensor) -> OpenSetCurve:
    """The open-set curve, one point for each familiarity that occurs.

    Args:
        known: familiarity of each known image.
        right: for each of them, whether its class is right.
        unknown: familiarity of each unknown image.

    >>> curve = oscr_curve(torch.tensor([3.0, 2.0]), torch.tensor([True, False]), torch.tensor([2.0, 1.0]))
    >>> curve.false_positives.tolist(), curve.correct.tolist(), curve.area
    ([0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 0.5, 0.5], 0.5)
    """
    known, unknown = _checked(known), _checked(unknown)
    if right.shape != known.shape:
        raise OneaError(f"{right.numel()} answers for {known.numel()} known images; give one for each.")
    thresholds = torch.cat([known, unknown]).unique().flip(0)
    positives, correct = (
        torch.cat([torch.zeros(1, dtype=torch.int64), _reaching(images, thresholds)]).double() / total
        for images, total in ((unknown, len(unknown)), (known[right.bool()], len(known)))
    )
    return OpenSetCurve(positives, correct)


def _reaching(familiarity: Tensor, thresholds: Tensor) -> Tensor:
    """How many images reach each threshold."""
    return len(familiarity) - torch.searchsorted(familiarity.sort().values, thresholds)


def _checked(familiarity: Tensor) -> Tensor:
    """Numbers of one precision, so that sides of different ones compare exactly."""
    if familiarity.dim() != 1 or not len(familiarity):
        raise OneaError(
            f"Familiarity of shape {list(familiarity.shape)}; give one number for each image, at least one."
        )
    if bool(familiarity.isnan().any()):
        raise OneaError("The familiarity of some images is not a number; judge them again, or leave them out.")
    return familiarity.detach().to("cpu", torch.float64)
