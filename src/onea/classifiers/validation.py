# SPDX-License-Identifier: Apache-2.0
"""Scores of images by a classifier that has not seen them."""

from __future__ import annotations

import torch
from torch import Tensor

from onea.classifiers.contract import Classifier, Statistics


def cross_validated_scores(
    classifier: Classifier, known: Statistics, features: Tensor, rows: Tensor, classes: int, folds: int = 5
) -> Tensor:
    """Scores ``[N, classes]`` of each image by what is known and all other folds of these images.

    Every class keeps some of its images in every fold.
    """
    fold = torch.empty(len(rows), dtype=torch.int64)
    for row in rows.unique():
        own = (rows == row).nonzero()[:, 0]
        fold[own] = torch.arange(len(own)) % folds
    scores = torch.empty(len(rows), classes)
    for part in fold.unique():
        here = fold == part
        scores[here] = classifier.fit(known.add(features[~here], rows[~here]))(features[here])
    return scores
