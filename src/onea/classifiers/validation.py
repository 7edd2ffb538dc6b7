# SPDX-License-Identifier: Apache-2.0
"""Images judged by what has not seen them: folds, statistics of all others, and scores from these."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from onea.classifiers.contract import Classifier
from onea.classifiers.statistics import ClassStatistics

FOLDS = 5


def left_out(
    known: ClassStatistics, views: Tensor, rows: Tensor, groups: Tensor, folds: int = FOLDS
) -> Iterator[tuple[Tensor, ClassStatistics]]:
    """Folds of images, ``bool [N]``, each with the statistics of what is known and all other folds.

    Args:
        known: statistics without any of these images.
        views: their features, ``[views, N, width]``.
        rows: their classes.
        groups: images of a class with the same number here are in the same fold.
        folds: at most so many.
    """
    fold = group_folds(rows, groups, folds)
    for number in fold.unique():
        here = fold == number
        yield here, known.add(views[:, ~here].flatten(0, 1), rows[~here].repeat(len(views)))


def classes_left_out(
    known: ClassStatistics, views: Tensor, rows: Tensor, groups: Tensor, honest: Tensor, folds: int = FOLDS
) -> Iterator[tuple[Tensor, Tensor, ClassStatistics]]:
    """Images of other classes, images of classes left out (both ``bool [N]``), and statistics that have seen neither.

    Only classes that are new with these images can be left out, a part of them at a time; where nothing else is known,
    none is.

    Args:
        known: statistics without any of these images.
        views: their features, ``[views, N, width]``.
        rows: their classes.
        groups: images of a class with the same number here are in the same fold.
        honest: images that may be judged, ``bool [N]``; where there is none, all may.
        folds: at most so many.
    """
    classes = rows.unique()
    new = classes[known.counts[classes] == 0]
    parts = min(folds, len(new))
    fold = group_folds(rows, groups, max(2, parts))
    everyone = not bool(honest.any())
    for number in range(parts):
        out = torch.isin(rows, new[number::parts])
        here = ~out & (fold == number if everyone else honest)
        rest = ~out & ~here
        others = known.add(views[:, rest].flatten(0, 1), rows[rest].repeat(len(views)))
        others = others.keep((others.counts > 0).nonzero()[:, 0])
        if others.classes:
            yield here, out if everyone else out & honest, others


def cross_validated_scores(
    classifier: Classifier,
    known: ClassStatistics,
    features: Tensor,
    rows: Tensor,
    classes: int,
    groups: Tensor | None = None,
) -> Tensor:
    """Scores ``[N, classes]`` of each image by what is known and all other folds of these images.

    They are dealt one by one, or by ``groups`` as ``left_out`` has them.
    """
    scores = torch.empty(len(rows), classes)
    for here, others in left_out(known, features[None], rows, torch.arange(len(rows)) if groups is None else groups):
        scores[here] = classifier.fit(others)(features[here])
    return scores


def group_folds(rows: Tensor, groups: Tensor, folds: int = FOLDS) -> Tensor:
    """The fold of each image, ``int64 [N]``: groups of a class stay whole, and its folds are as even as they can be.

    The largest groups are dealt first, each to the smallest fold. A class of one group is dealt image by image: whoever
    is left out must leave others behind.

    >>> group_folds(torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 1, 0, 2, 7, 7]), folds=2).tolist()
    [0, 1, 0, 1, 0, 1]
    """
    fold = torch.empty(len(rows), dtype=torch.int64)
    for row in rows.unique():
        own = (rows == row).nonzero()[:, 0]
        member = groups[own].unique(return_inverse=True)[1]
        if not member.any():
            member = torch.arange(len(own))
        sizes = torch.bincount(member)
        filled, place = [0] * folds, torch.empty(len(sizes), dtype=torch.int64)
        for group in sizes.argsort(descending=True, stable=True).tolist():
            place[group] = smallest = min(range(folds), key=filled.__getitem__)
            filled[smallest] += int(sizes[group])
        fold[own] = place[member]
    return fold
