# SPDX-License-Identifier: Apache-2.0
"""Statistics that have not seen some of the images, so that these can be judged by them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from onea.classifiers.statistics import ClassStatistics

_FOLDS = 10  # a tenth fewer images of a class than in the end; with a fifth fewer, answers are noticeably worse


def left_out(
    known: ClassStatistics, views: Tensor, rows: Tensor, groups: Tensor, folds: int = _FOLDS
) -> Iterator[tuple[Tensor, ClassStatistics]]:
    """Folds of images, ``bool [N]``, each with the statistics of what is known and all other folds.

    Args:
        known: statistics without any of these images.
        views: their features, ``[views, N, width]``.
        rows: their classes.
        groups: images of a class with the same number here are in the same fold.
        folds: at most so many.
    """
    fold = fold_of(rows, groups, folds)
    for number in fold.unique():
        here = fold == number
        yield here, known.add(views[:, ~here].flatten(0, 1), rows[~here].repeat(len(views)))


def fold_of(rows: Tensor, groups: Tensor, folds: int) -> Tensor:
    """The fold of each image: groups of a class from the largest to the smallest, each where its class has the fewest.

    >>> fold_of(torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 2, 0, 0]), 2).tolist()
    [0, 0, 1, 1, 0, 1]
    """
    fold = torch.empty(len(rows), dtype=torch.int64)
    for row in rows.unique():
        own = (rows == row).nonzero()[:, 0]
        apart = groups[own].unique(return_inverse=True)[1]
        if not apart.any():  # one group: whoever is left out leaves others behind
            apart = torch.arange(len(own))
        sizes, filled = torch.bincount(apart), [0] * folds
        for group in sizes.argsort(descending=True, stable=True).tolist():
            least = min(range(folds), key=filled.__getitem__)
            fold[own[apart == group]] = least
            filled[least] += int(sizes[group])
    return fold
