# SPDX-License-Identifier: Apache-2.0
"""Metrics of a model: accuracy (share of correctly classified images), open-set metrics, and quality of an export."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from onea import openset
from onea.errors import OneaError
from onea.model.names import UNKNOWN


def is_correct(labels: Sequence[str], predictions: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which images are correctly classified, by the labels of ``Answer``.

    The label of an unsure answer is its most probable class. ``unknown`` is never correct.

    >>> is_correct(["kiwi", "kiwi", "lemon"], ["kiwi", "unknown", "lime"]).tolist()
    [True, False, False]
    """
    correct: npt.NDArray[np.bool_] = np.asarray(labels, dtype=np.str_) == np.asarray(predictions, dtype=np.str_)
    return correct


@dataclass(frozen=True)
class Counts:
    """The number of labelled images, of correctly classified ones, and of those that are classified as ``unknown``.

    >>> counts = Counts.from_predictions(["kiwi"] * 4, ["kiwi", "kiwi", "lemon", "unknown"])
    >>> counts, counts.wrong, counts.accuracy
    (Counts(images=4, correct=2, unknown=1), 1, 0.5)
    """

    images: int
    correct: int
    unknown: int

    @classmethod
    def from_predictions(cls, labels: Sequence[str], predictions: Sequence[str]) -> Counts:
        """Count the predictions of labelled images."""
        unknown = sum(prediction == UNKNOWN for prediction in predictions)
        return cls(len(labels), int(is_correct(labels, predictions).sum()), unknown)

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.images + other.images, self.correct + other.correct, self.unknown + other.unknown)

    @property
    def wrong(self) -> int:
        """The number of images that are classified as another class."""
        return self.images - self.correct - self.unknown

    @property
    def accuracy(self) -> float:
        """The share of the images that are correctly classified."""
        return self.correct / self.images

    def __str__(self) -> str:
        """Percentages, rounded so that they add up to 100.

        >>> str(Counts(images=3, correct=1, unknown=1))
        '33.3 % correct, 33.4 % wrong, 33.3 % unknown'
        """
        tenths = [round(1000 * part / self.images) for part in (self.correct, self.correct + self.wrong)]
        parts = zip((tenths[0], tenths[1] - tenths[0], 1000 - tenths[1]), ("correct", "wrong", "unknown"), strict=True)
        return ", ".join(f"{part / 10:.1f} % {name}" for part, name in parts)


@dataclass(frozen=True)
class OpenSet:
    """Open-set recognition: how well the familiarity separates images of known classes from unknown images.

    Attributes:
        known: familiarity of each image of a known class.
        classified: whether the most probable class of each known image is correct.
        unknown: familiarity of each unknown image.
        threshold: the familiarity below which the model predicts ``unknown``; minus infinity if it never does.
    """

    known: Tensor
    classified: Tensor
    unknown: Tensor
    threshold: float

    @property
    def has_threshold(self) -> bool:
        """Whether the model predicts ``unknown`` at all."""
        return self.threshold > -math.inf

    @property
    def auroc(self) -> float:
        """The probability that a known image is more familiar than an unknown one."""
        return openset.auroc(self.known, self.unknown)

    @property
    def false_positive_rate(self) -> float:
        """The share of unknown images above the threshold that 95 % of the known images reach."""
        return openset.fpr_at_tpr(self.known, self.unknown)

    @property
    def unknown_rejected(self) -> float:
        """The share of unknown images that are predicted as ``unknown``."""
        return openset.rejection_rate(self.unknown, self.threshold)

    @property
    def known_rejected(self) -> float:
        """The share of known images that are predicted as ``unknown``."""
        return openset.rejection_rate(self.known, self.threshold)

    @property
    def accuracy(self) -> float:
        """The share of known images that are correctly classified and not rejected at the threshold."""
        return float((self.classified & (self.known >= self.threshold)).double().mean())

    @property
    def curve(self) -> openset.OpenSetCurve:
        """Correctly classified known images against accepted unknown images, for all thresholds."""
        return openset.oscr_curve(self.known, self.classified, self.unknown)

    def as_json(self) -> dict[str, Any]:
        """All metrics; those at the threshold are null if the model has none."""
        return {
            "known_images": len(self.known),
            "unknown_images": len(self.unknown),
            "auroc": self.auroc,
            "fpr95": self.false_positive_rate,
            "oscr": self.curve.area,
            "unknown_rejected": self.unknown_rejected if self.has_threshold else None,
            "known_rejected": self.known_rejected if self.has_threshold else None,
        }


RECOMMENDED_PHOTOS = 2_000
"""The number of photos that suffices to measure a small loss of accuracy."""

MAX_LOSS = 0.005
MIN_AGREEMENT = 0.97
_ONE_SIDED = 1.645  # standard deviations: 95 % of a normal distribution lie below


@dataclass(frozen=True)
class Quality:
    """The predictions of a model and of an exported file on the same photos.

    Attributes:
        photos: number of photos.
        correct: number of photos that the model classifies correctly.
        lost: number of photos that only the model classifies correctly.
        won: number of photos that only the file classifies correctly.
        same: number of photos with the same prediction.
    """

    photos: int
    correct: int
    lost: int
    won: int
    same: int

    @classmethod
    def compare(cls, labels: Sequence[str], model: Sequence[str], file: Sequence[str]) -> Quality:
        """Compare the predictions of a model and of a file with the labels.

        >>> Quality.compare(["a", "b", "c"], ["a", "b", "b"], ["a", "unknown", "b"])
        Quality(photos=3, correct=2, lost=1, won=0, same=2)
        """
        before, after = is_correct(labels, model), is_correct(labels, file)
        same = sum(predicted == exported for predicted, exported in zip(model, file, strict=True))
        return cls(len(labels), int(before.sum()), int((before & ~after).sum()), int((~before & after).sum()), same)

    @property
    def accuracy(self) -> tuple[float, float]:
        """The accuracy of the model and of the file."""
        return self.correct / self.photos, (self.correct - self.lost + self.won) / self.photos

    @property
    def loss(self) -> float:
        """The accuracy of the model minus that of the file."""
        return (self.lost - self.won) / self.photos

    @property
    def agreement(self) -> float:
        """The share of photos with the same prediction."""
        return self.same / self.photos

    def check(self) -> None:
        """Refuse a file that loses too much accuracy or agrees too rarely.

        Raises:
            OneaError: the file must not be kept.
        """
        if self.loss > MAX_LOSS or self.agreement < MIN_AGREEMENT:
            before, after = self.accuracy
            raise OneaError(
                f"int8 lowers the accuracy on {self.photos:,} photos from {100 * before:.1f} to {100 * after:.1f} % "
                f"(at most {100 * MAX_LOSS:g} points may be lost) and keeps {100 * self.agreement:.1f} % of answers "
                f"({100 * MIN_AGREEMENT:g} % are required), so no file was written; leave out --precision int8."
            )

    @property
    def confidence_bounds(self) -> tuple[float, float]:
        """The upper bound of the loss and the lower bound of the agreement, each with 95 % confidence.

        The bound of the loss is that of Agresti and Min (half a photo is added to each of four cells), the bound of the
        agreement that of Wilson.

        >>> loss, agreement = Quality(photos=100, correct=80, lost=0, won=0, same=100).confidence_bounds
        >>> round(loss, 3), round(agreement, 3)
        (0.016, 0.974)
        """
        count, lost, won = self.photos + 2, self.lost + 0.5, self.won + 0.5
        gap = (lost - won) / count
        loss = gap + _ONE_SIDED * math.sqrt(((lost + won) / count - gap**2) / count)
        z, share = _ONE_SIDED**2 / self.photos, self.agreement
        agreement = (share + z / 2 - math.sqrt(z * (share * (1 - share) + z / 4))) / (1 + z)
        return loss, agreement
