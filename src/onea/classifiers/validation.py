# SPDX-License-Identifier: Apache-2.0
"""Scores of images by a classifier that has not seen them."""

from __future__ import annotations

import torch
from torch import Tensor

from onea.classifiers.contract import Classifier, Statistics

FOLDS = 5


def cross_validated_scores(
    classifier: Classifier, known: Statistics, views: Tensor, rows: Tensor, classes: int
) -> Tensor:
    """Scores ``[N, classes]`` of each image by what is known and all other folds of these images.

    Every class keeps some of its images in every fold. Of the features ``[views, N, width]`` the first view of an image
    is judged, by all views of others.
    """
    fold = group_folds(rows, torch.arange(len(rows)))
    scores = torch.empty(len(rows), classes)
    for part in fold.unique():
        here = fold == part
        others = known.add(views[:, ~here].flatten(0, 1), rows[~here].repeat(len(views)))
        scores[here] = classifier.fit(others)(views[0, here])
    return scores


def group_folds(rows: Tensor, groups: Tensor, folds: int = FOLDS) -> Tensor:
    """The fold of each image, ``int64 [N]``: groups of a class stay whole, and its folds are as even as they can be.

    The largest groups are dealt first, each to the smallest fold.

    >>> group_folds(torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 1, 0, 2, 0, 1]), folds=2).tolist()
    [0, 1, 0, 1, 0, 1]
    """
    fold = torch.empty(len(rows), dtype=torch.int64)
    for row in rows.unique():
        own = (rows == row).nonzero()[:, 0]
        names, member, sizes = groups[own].unique(return_inverse=True, return_counts=True)
        filled, place = [0] * folds, torch.empty(len(names), dtype=torch.int64)
        for group in sizes.argsort(descending=True, stable=True).tolist():
            place[group] = smallest = min(range(folds), key=filled.__getitem__)
            filled[smallest] += int(sizes[group])
        fold[own] = place[member]
    return fold
