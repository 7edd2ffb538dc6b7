# SPDX-License-Identifier: Apache-2.0
"""Accuracy, defined once: the share of images that are answered with their class."""

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


def is_correct(labels: Sequence[str], answers: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which images are answered with their class, by the labels of ``Answer``.

    An unsure answer counts by its most probable class. ``unknown`` is not correct.

    >>> is_correct(["kiwi", "kiwi", "lemon"], ["kiwi", "unknown", "lime"]).tolist()
    [True, False, False]
    """
    found: npt.NDArray[np.bool_] = np.asarray(labels, dtype=np.str_) == np.asarray(answers, dtype=np.str_)
    return found


@dataclass(frozen=True)
class Counts:
    """How images whose classes are known were answered: correct, wrong or ``unknown``, which add up to all.

    >>> found = Counts.of(["kiwi"] * 4, ["kiwi", "kiwi", "lemon", "unknown"])
    >>> found, found.wrong, found.accuracy
    (Counts(images=4, correct=2, unknown=1), 1, 0.5)

    Attributes:
        images: their number.
        correct: those answered with their class.
        unknown: those answered ``unknown``.
    """

    images: int
    correct: int
    unknown: int

    @classmethod
    def of(cls, labels: Sequence[str], answers: Sequence[str]) -> Counts:
        """From the class and the answer of each image."""
        unknown = sum(answer == UNKNOWN for answer in answers)
        return cls(len(labels), int(is_correct(labels, answers).sum()), unknown)

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.images + other.images, self.correct + other.correct, self.unknown + other.unknown)

    @property
    def wrong(self) -> int:
        """Those answered with another class."""
        return self.images - self.correct - self.unknown

    @property
    def accuracy(self) -> float:
        """Share of the images that are correct."""
        return self.correct / self.images

    def __str__(self) -> str:
        """Percentages that add up to 100 as they are printed: only their sums are rounded.

        >>> str(Counts(images=3, correct=1, unknown=1))
        '33.3 % correct, 33.4 % wrong, 33.3 % unknown'
        """
        tenths = [round(1000 * part / self.images) for part in (self.correct, self.correct + self.wrong)]
        parts = zip((tenths[0], tenths[1] - tenths[0], 1000 - tenths[1]), ("correct", "wrong", "unknown"), strict=True)
        return ", ".join(f"{part / 10:.1f} % {name}" for part, name in parts)


@dataclass(frozen=True)
class OpenSet:
    """How well a model tells images of classes that it knows from images of nothing that it was taught.

    Attributes:
        known: familiarity of each image of a known class.
        nearest: whether the most probable class of each of them is its own.
        unknown: familiarity of each image of nothing that was taught.
        threshold: the familiarity below which the model answers ``unknown``; minus infinity where it never does.
    """

    known: Tensor
    nearest: Tensor
    unknown: Tensor
    threshold: float

    @property
    def answers_unknown(self) -> bool:
        """Whether the model answers ``unknown`` at all."""
        return self.threshold > -math.inf

    @property
    def auroc(self) -> float:
        """Probability that a known image looks more familiar than an unknown one."""
        return openset.auroc(self.known, self.unknown)

    @property
    def false_positive_rate(self) -> float:
        """Share of unknown images that look familiar where 95 % of the known ones do."""
        return openset.fpr_at_tpr(self.known, self.unknown)

    @property
    def unknown_rejected(self) -> float:
        """Share of unknown images that the model answers ``unknown``."""
        return openset.rejection_rate(self.unknown, self.threshold)

    @property
    def known_rejected(self) -> float:
        """Share of known images that the model answers ``unknown``."""
        return openset.rejection_rate(self.known, self.threshold)

    @property
    def correct(self) -> float:
        """Share of known images that the model answers with their own class: its accuracy."""
        return float((self.nearest & (self.known >= self.threshold)).double().mean())

    def as_json(self) -> dict[str, Any]:
        """The measures by name; those at the model's threshold are null where it has none."""
        own = self.answers_unknown
        return {
            "known_images": len(self.known),
            "unknown_images": len(self.unknown),
            "auroc": self.auroc,
            "fpr95": self.false_positive_rate,
            "oscr": self.curve.area,
            "unknown_rejected": self.unknown_rejected if own else None,
            "known_rejected": self.known_rejected if own else None,
        }

    @property
    def curve(self) -> openset.OpenSetCurve:
        """Known images answered with their class against unknown ones taken for known, as the threshold moves."""
        return openset.oscr_curve(self.known, self.nearest, self.unknown)


RECOMMENDED_PHOTOS = 2_000
"""Photos that tell a small loss from luck."""

MOST_LOST = 0.005
LEAST_SAME = 0.97
_ONE_SIDED = 1.645  # standard deviations: 95 % of a normal distribution lie below


@dataclass(frozen=True)
class Quality:
    """A model and a file made of it, asked about the same photos.

    Attributes:
        photos: their number.
        correct: those that the model answers with their class.
        lost: of those, the ones that the file does not.
        won: those that only the file does.
        same: those with the same answer, a class or ``unknown``.
    """

    photos: int
    correct: int
    lost: int
    won: int
    same: int

    @classmethod
    def of(cls, labels: Sequence[str], model: Sequence[str], file: Sequence[str]) -> Quality:
        """From the true classes, and the answers of the model and of the file.

        >>> Quality.of(["a", "b", "c"], ["a", "b", "b"], ["a", "unknown", "b"])
        Quality(photos=3, correct=2, lost=1, won=0, same=2)
        """
        before, after = is_correct(labels, model), is_correct(labels, file)
        same = sum(one == other for one, other in zip(model, file, strict=True))
        return cls(len(labels), int(before.sum()), int((before & ~after).sum()), int((~before & after).sum()), same)

    @property
    def accuracy(self) -> tuple[float, float]:
        """Of the model and of the file."""
        return self.correct / self.photos, (self.correct - self.lost + self.won) / self.photos

    @property
    def loss(self) -> float:
        """Accuracy that is lost; below 0 where some is won."""
        return (self.lost - self.won) / self.photos

    @property
    def agreement(self) -> float:
        """Share of the photos with the same answer."""
        return self.same / self.photos

    @property
    def good(self) -> bool:
        """Whether the file may be kept."""
        return self.loss <= MOST_LOST and self.agreement >= LEAST_SAME

    def check(self) -> None:
        """Refuse a file that lost too much.

        Raises:
            OneaError: it did; the sentence says what.
        """
        if not self.good:
            before, after = self.accuracy
            raise OneaError(
                f"In eight bits {100 * after:.1f} % of {self.photos:,} photos are correct instead of {100 * before:.1f}"
                f" % (at most {100 * MOST_LOST:g} points may be lost) and {100 * self.agreement:.1f} % get the same "
                f"answer ({100 * LEAST_SAME:g} % must), so no file was written; export without --precision int8."
            )

    @property
    def promised(self) -> tuple[float, float]:
        """The largest loss and the smallest agreement that these photos leave possible, each with 95 % confidence.

        The loss after Agresti and Min (half a photo added to each of four cells), the agreement after Wilson.

        >>> loss, agreement = Quality(photos=100, correct=80, lost=0, won=0, same=100).promised
        >>> round(loss, 3), round(agreement, 3)
        (0.016, 0.974)
        """
        count, lost, won = self.photos + 2, self.lost + 0.5, self.won + 0.5
        gap = (lost - won) / count
        loss = gap + _ONE_SIDED * math.sqrt(((lost + won) / count - gap**2) / count)
        z, share = _ONE_SIDED**2 / self.photos, self.agreement
        agreement = (share + z / 2 - math.sqrt(z * (share * (1 - share) + z / 4))) / (1 + z)
        return loss, agreement
