# SPDX-License-Identifier: Apache-2.0
"""Whether a file in eight bits answers well enough to be kept: labelled photos decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onea.errors import OneaError
from onea.model.accuracy import is_correct

ENOUGH = 2_000
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
