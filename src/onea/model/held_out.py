# SPDX-License-Identifier: Apache-2.0
"""Stored features of held-out images, to measure the accuracy on all classes after each update.

Once an update is evaluated, its held-out images are added to the statistics, because they improve them. Later
evaluations remove all held-out images from the statistics together, not one by one: whole series are held out, and an
image must not be compared with others of its series.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onea.classifiers.base import Classifier
from onea.classifiers.gaussian import MANY_CLASSES
from onea.classifiers.statistics import ClassStatistics
from onea.model.learning.fingerprints import find_copies

MAX_PER_CLASS, MIN_PER_CLASS, _MAX_IMAGES = 16, 4, 512  # images whose features are stored
_MAX_SAMPLE = 512  # of very many classes
_BATCH = 512  # images that are scored at a time
MIN_IMAGES = 20  # on fewer, the accuracy would be misleading


@dataclass(frozen=True)
class Accuracy:
    """The number of correct predictions, of images, and of classes of these images."""

    correct: int
    images: int
    classes: int

    @classmethod
    def from_predictions(cls, predicted: Tensor, rows: Tensor) -> Accuracy:
        """Count correct predictions, from the predicted and the true class of each image."""
        return cls(int((predicted == rows).sum()), len(rows), len(rows.unique()))

    @property
    def value(self) -> float | None:
        """The accuracy; None for fewer than ``MIN_IMAGES``."""
        return self.correct / self.images if self.images >= MIN_IMAGES else None


@dataclass(frozen=True)
class HeldOutImages:
    """Images held out of training, newest first.

    Attributes:
        features: features of each image, ``[H, views, width]``.
        rows: class of each image, ``[H]``.
        fingerprints: fingerprint of each image, ``[H, 2]``, to hold it out again if it is taught again.
    """

    features: Tensor
    rows: Tensor
    fingerprints: Tensor

    def __getitem__(self, index: Tensor) -> HeldOutImages:
        return HeldOutImages(self.features[index], self.rows[index], self.fingerprints[index])

    def with_newer(self, newer: HeldOutImages) -> HeldOutImages:
        """The newest images of both: at most ``MAX_PER_CLASS`` of a class, fewer if there are many classes.

        Of very many classes, a random sample of bounded size.
        """
        features = torch.cat([newer.features, self.features]) if len(self.rows) else newer.features
        rows, fingerprints = torch.cat([newer.rows, self.rows]), torch.cat([newer.fingerprints, self.fingerprints])
        if not len(rows):
            return newer
        classes = rows.unique()
        limit = max(MIN_PER_CLASS, min(MAX_PER_CLASS, _MAX_IMAGES // len(classes)))
        kept = newest_of_each_class(rows, limit)
        if len(classes) > MANY_CLASSES:
            # The low bits of a hash are as good as random, and the same images stay in later updates.
            kept = kept[_mix(fingerprints[kept, 0]).argsort()[:_MAX_SAMPLE].sort().values]
        return HeldOutImages(features, rows, fingerprints)[kept]

    def contains(self, rows: Tensor, fingerprints: Tensor) -> Tensor:
        """Which images with these classes and fingerprints are stored, ``bool [N]``."""
        copy = find_copies(fingerprints, self.fingerprints)
        contained = copy >= 0
        contained[contained.clone()] = self.rows[copy[contained]] == rows[contained]
        return contained

    def has_none_of(self, fingerprints: Tensor) -> Tensor:
        """Which stored images have none of these fingerprints, ``bool [H]``."""
        return find_copies(self.fingerprints, fingerprints) < 0

    def recompute_features(self, views: Tensor, rows: Tensor, fingerprints: Tensor, classes: Tensor) -> HeldOutImages:
        """Replace the features of repeated images of these classes by their new features ``[views, N, width]``."""
        copy = find_copies(self.fingerprints, fingerprints)
        repeated = ((copy >= 0) & torch.isin(self.rows, classes)).nonzero()[:, 0]
        repeated = repeated[rows[copy[repeated]] == self.rows[repeated]]
        if not len(repeated):
            return self
        features = self.features.index_copy(0, repeated, views[:, copy[repeated]].transpose(0, 1))
        return replace(self, features=features)


def _mix(words: Tensor) -> Tensor:
    """A pseudo-random permutation of 64-bit words (the finaliser of splitmix64)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return words


def newest_of_each_class(rows: Tensor, limit: int) -> Tensor:
    """Positions of the first ``limit`` images of each class, in ascending order.

    >>> newest_of_each_class(torch.tensor([1, 0, 1, 1]), 2).tolist()
    [0, 1, 2]
    """
    order = rows.argsort(stable=True)
    starts = torch.searchsorted(rows[order], rows[order])  # of the class of each image, in this order
    return order[torch.arange(len(rows)) - starts < limit].sort().values


def evaluate_held_out(classifier: Classifier, statistics: ClassStatistics, held_out: HeldOutImages) -> Accuracy:
    """Accuracy on held-out images among all classes; the statistics include these images."""
    return Accuracy.from_predictions(*predict_held_out(classifier, statistics, held_out))


def predict_held_out(
    classifier: Classifier, statistics: ClassStatistics, held_out: HeldOutImages
) -> tuple[Tensor, Tensor]:
    """Predicted and true class of each held-out image; the statistics include these images."""
    others, features, rows = remove_held_out(statistics, held_out)
    if not len(rows):
        return rows, rows
    scorer = classifier.fit(others)
    return torch.cat([scorer(part).argmax(1) for part in features.split(_BATCH)]), rows


def remove_held_out(statistics: ClassStatistics, held_out: HeldOutImages) -> tuple[ClassStatistics, Tensor, Tensor]:
    """Statistics without held-out images, the features of these images ``[R, width]``, and their classes.

    A class that would lose all its images keeps them.
    """
    features, rows = held_out.features, held_out.rows
    removed = features.shape[1] * torch.bincount(rows, minlength=statistics.classes)
    removable = (statistics.counts > removed)[rows]
    features, rows = features[removable], rows[removable]
    if not len(rows):
        return statistics, features.new_empty(0, statistics.width), rows
    views = features.shape[1]
    others = statistics.remove(features.flatten(0, 1), rows.repeat_interleave(views))
    return others, features[:, 0], rows
