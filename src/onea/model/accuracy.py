# SPDX-License-Identifier: Apache-2.0
"""Accuracy, defined once: the share of images that are answered with their class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
