# SPDX-License-Identifier: Apache-2.0
"""A figure over all classes: features of some images held out of training, of every class, judged anew at each update.

Held-out images join the statistics after they were measured, because a class needs all its images. To be judged later,
they are taken out again, all together: whole series were held out, and no image shall be compared with one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onea.classifiers.contract import Classifier
from onea.classifiers.removal import without_images
from onea.classifiers.statistics import ClassStatistics

MOST_OF_CLASS, LEAST_OF_CLASS, _ALL = 16, 4, 512  # images whose features are kept


@dataclass(frozen=True)
class Overall:
    """How many held-out images of all classes are answered right.

    Attributes:
        right: of them.
        images: that were judged.
        classes: that they show.
    """

    right: int
    images: int
    classes: int


def newest_held(new: Tensor, rows: Tensor, earlier: Tensor, earlier_rows: Tensor) -> tuple[Tensor, Tensor]:
    """The features that are kept, ``[H, views, width]``, newest first, and their classes."""
    held, rows = torch.cat([new, earlier]) if len(earlier) else new, torch.cat([rows, earlier_rows])
    if not len(rows):
        return held, rows
    classes = rows.unique()
    most = max(LEAST_OF_CLASS, min(MOST_OF_CLASS, _ALL // len(classes)))
    kept = torch.cat([(rows == row).nonzero()[:most, 0] for row in classes]).sort().values
    return held[kept], rows[kept]


def measure(classifier: Classifier, known: ClassStatistics, held: Tensor, rows: Tensor) -> Overall:
    """Judge held-out images among all classes, by statistics that have them.

    Args:
        classifier: answers.
        known: statistics of all images, these among them.
        held: their features, ``[H, views, width]``.
        rows: their classes.
    """
    others, features, rows = taken_out(known, held, rows)
    if not len(rows):
        return Overall(0, 0, 0)
    right = classifier.fit(others)(features).argmax(1) == rows
    return Overall(int(right.sum()), len(rows), len(rows.unique()))


def taken_out(known: ClassStatistics, held: Tensor, rows: Tensor) -> tuple[ClassStatistics, Tensor, Tensor]:
    """Statistics without held-out images, the features of these images ``[R, width]``, and their classes.

    Images of a class of which nothing would be left stay where they are.
    """
    taken = held.shape[1] * torch.bincount(rows, minlength=known.classes)
    here = (known.counts > taken)[rows]
    held, rows = held[here], rows[here]
    if not len(rows):
        return known, held.new_empty(0, known.width), rows
    return without_images(known, held.flatten(0, 1), rows.repeat_interleave(held.shape[1])), held[:, 0], rows
