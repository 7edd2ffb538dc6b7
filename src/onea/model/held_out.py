# SPDX-License-Identifier: Apache-2.0
"""A figure over all classes: features of some images held out of training, of every class, judged anew at each update.

Held-out images join the statistics after they were measured, because a class needs all its images. To be judged later,
they are taken out again, all together: whole series were held out, and no image shall be compared with one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onea.classifiers.base import Classifier
from onea.classifiers.statistics import ClassStatistics
from onea.model.learning.fingerprints import first_copies

MOST_OF_CLASS, LEAST_OF_CLASS, _ALL = 16, 4, 512  # images whose features are kept
_AT_ONCE = 512  # images whose scores for all classes are held at a time
ENOUGH = 20  # images; a share of fewer misleads


@dataclass(frozen=True)
class Measured:
    """How many images were answered right, of all that were judged, and how many classes they show."""

    right: int
    images: int
    classes: int

    @classmethod
    def of(cls, answers: Tensor, rows: Tensor) -> Measured:
        """Answers compared with the classes that images show."""
        return cls(int((answers == rows).sum()), len(rows), len(rows.unique()))

    @property
    def share(self) -> float | None:
        """Of right answers; None where they are of too few images."""
        return self.right / self.images if self.images >= ENOUGH else None


@dataclass(frozen=True)
class HeldOut:
    """Images held out of training, newest first.

    Attributes:
        features: of each, ``[H, views, width]``.
        rows: the class that each of them shows, ``[H]``.
        prints: their fingerprints, ``[H, 2]``, so that one that is taught again is held out again.
    """

    features: Tensor
    rows: Tensor
    prints: Tensor

    def __getitem__(self, chosen: Tensor) -> HeldOut:
        return HeldOut(self.features[chosen], self.rows[chosen], self.prints[chosen])

    def behind(self, newer: HeldOut) -> HeldOut:
        """The newest of both: so many of each class that all of them take little room."""
        features = torch.cat([newer.features, self.features]) if len(self.rows) else newer.features
        both = HeldOut(features, torch.cat([newer.rows, self.rows]), torch.cat([newer.prints, self.prints]))
        if not len(both.rows):
            return both
        classes = both.rows.unique()
        most = max(LEAST_OF_CLASS, min(MOST_OF_CLASS, _ALL // len(classes)))
        return both[torch.cat([(both.rows == row).nonzero()[:most, 0] for row in classes]).sort().values]

    def shown_by(self, rows: Tensor, prints: Tensor) -> Tensor:
        """Which photos with these classes and fingerprints are among them, ``bool [N]``."""
        found = first_copies(prints, self.prints)
        shown = found >= 0
        shown[shown.clone()] = self.rows[found[shown]] == rows[shown]
        return shown

    def unseen_by(self, trained: Tensor) -> Tensor:
        """Which are none of the photos with these fingerprints, that an adapter was trained on, ``bool [H]``."""
        return first_copies(self.prints, trained) < 0

    def seen_anew(self, views: Tensor, rows: Tensor, prints: Tensor, classes: Tensor) -> HeldOut:
        """The same with the features of these images, ``[views, N, width]``, for those of some classes among them."""
        found = first_copies(self.prints, prints)
        here = ((found >= 0) & torch.isin(self.rows, classes)).nonzero()[:, 0]
        here = here[rows[found[here]] == self.rows[here]]
        if not len(here):
            return self
        return replace(self, features=self.features.index_copy(0, here, views[:, found[here]].transpose(0, 1)))


def measure(classifier: Classifier, known: ClassStatistics, held: HeldOut) -> Measured:
    """Judge held-out images among all classes, by statistics that have them."""
    return Measured.of(*answered(classifier, known, held))


def answered(classifier: Classifier, known: ClassStatistics, held: HeldOut) -> tuple[Tensor, Tensor]:
    """The classes that held-out images are taken for, by statistics that have them, and those that they show."""
    others, features, rows = taken_out(known, held)
    if not len(rows):
        return rows, rows
    fitted = classifier.fit(others)
    return torch.cat([fitted(part).argmax(1) for part in features.split(_AT_ONCE)]), rows


def taken_out(known: ClassStatistics, held: HeldOut) -> tuple[ClassStatistics, Tensor, Tensor]:
    """Statistics without held-out images, the features of these images ``[R, width]``, and their classes.

    Images of a class of which nothing would be left stay where they are.
    """
    features, rows = held.features, held.rows
    taken = features.shape[1] * torch.bincount(rows, minlength=known.classes)
    here = (known.counts > taken)[rows]
    features, rows = features[here], rows[here]
    if not len(rows):
        return known, features.new_empty(0, known.width), rows
    views = features.shape[1]
    return known.remove(features.flatten(0, 1), rows.repeat_interleave(views)), features[:, 0], rows
