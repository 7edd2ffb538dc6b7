# SPDX-License-Identifier: Apache-2.0
"""How well a model does on images whose class is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onea.errors import OneaError
from onea.model.answers import Snapshot
from onea.model.images import read_labelled


@dataclass(frozen=True)
class Evaluation:
    """What a model answered on labelled images.

    Attributes:
        classes: of the images, in natural order, then those only answered.
        confusion: ``int64 [classes, classes]``: images of a class (row) by the nearest class (column).
        unknown_of: images of each class that were answered ``unknown``.
        never_taught: classes of images that the model does not know; whatever it answers for them is wrong.
    """

    classes: tuple[str, ...]
    confusion: npt.NDArray[np.int64]
    unknown_of: npt.NDArray[np.int64]
    never_taught: tuple[str, ...]
    version: int

    @property
    def images(self) -> npt.NDArray[np.int64]:
        """Images of each class."""
        total: npt.NDArray[np.int64] = self.confusion.sum(1)
        return total

    @property
    def right(self) -> npt.NDArray[np.int64]:
        """Images of each class whose nearest class is their own."""
        return np.diagonal(self.confusion)

    @property
    def accuracy(self) -> float:
        """Share of images whose nearest class is their own, whether or not they were answered ``unknown``."""
        return float(self.right.sum() / self.images.sum())

    @property
    def balanced_accuracy(self) -> float:
        """The same, each class with equal weight."""
        shown = self.images > 0
        return float((self.right[shown] / self.images[shown]).mean())

    @property
    def unknown(self) -> float:
        """Share of images of known classes that were answered ``unknown``."""
        taught = np.array([name not in self.never_taught for name in self.classes])
        return float(self.unknown_of[taught].sum() / max(1, self.images[taught].sum()))

    def worst_first(self) -> list[tuple[str, int, int, int]]:
        """Class, images, right ones and unknown ones of each class that has images, the worst first."""
        rows = zip(self.classes, self.images.tolist(), self.right.tolist(), self.unknown_of.tolist(), strict=True)
        return sorted((row for row in rows if row[1]), key=lambda row: (row[2] / row[1], row[0]))

    def confusions(self, most: int = 10) -> list[tuple[str, str, int]]:
        """The most frequent mistakes: class, answer, images."""
        wrong = self.confusion - np.diag(self.right)
        found = [(self.classes[i], self.classes[j], int(wrong[i, j])) for i, j in np.argwhere(wrong)]
        return sorted(found, key=lambda mistake: (-mistake[2], mistake[0], mistake[1]))[:most]


def evaluate(model: Snapshot, images: Any, labels: Any = None) -> Evaluation:
    """Ask a model about images whose class is known: a folder of class folders, or images and labels."""
    batch = read_labelled(images, labels, model.side)
    assert batch.labels is not None
    answers = model.answers(batch, k=1)
    shown = sorted(set(batch.labels))
    if not set(shown) & set(model.classes):
        raise OneaError(
            f"The model knows none of the classes in these images ({', '.join(shown[:5])}); check the names."
        )
    nearest = [answer.top[0][0] for answer in answers]
    classes = (*shown, *sorted(set(nearest) - set(shown)))
    row = {name: index for index, name in enumerate(classes)}
    confusion = np.zeros((len(classes), len(classes)), np.int64)
    unknown_of = np.zeros(len(classes), np.int64)
    for truth, found, answer in zip(batch.labels, nearest, answers, strict=True):
        confusion[row[truth], row[found]] += 1
        unknown_of[row[truth]] += answer.unknown
    never = tuple(name for name in shown if name not in model.classes)
    return Evaluation(classes, confusion, unknown_of, never, model.version)
