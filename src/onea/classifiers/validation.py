# SPDX-License-Identifier: Apache-2.0
"""Scores of images by a classifier that has not seen them."""

from __future__ import annotations

import torch
from torch import Tensor

from onea.classifiers.contract import Classifier, Statistics


def cross_validated_scores(
    classifier: Classifier, known: Statistics, views: Tensor, rows: Tensor, classes: int, folds: int = 5
) -> Tensor:
    """Scores ``[N, classes]`` of each image by what is known and all other folds of these images.

    Every class keeps some of its images in every fold. Of the features ``[views, N, width]`` the first view of an image
    is judged, by all views of others.
    """
    fold = torch.empty(len(rows), dtype=torch.int64)
    for row in rows.unique():
        own = (rows == row).nonzero()[:, 0]
        fold[own] = torch.arange(len(own)) % folds
    scores = torch.empty(len(rows), classes)
    for part in fold.unique():
        here = fold == part
        others = known.add(views[:, ~here].flatten(0, 1), rows[~here].repeat(len(views)))
        scores[here] = classifier.fit(others)(views[0, here])
    return scores
