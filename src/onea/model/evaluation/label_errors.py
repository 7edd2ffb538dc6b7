# SPDX-License-Identifier: Apache-2.0
"""Label errors: photos that more likely show another class, by cross-validated scores and nearest neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.classifiers import make_classifier
from onea.classifiers.base import Classifier
from onea.classifiers.statistics import ClassStatistics
from onea.classifiers.validation import cross_validated_scores
from onea.model.calibration import fit_temperature
from onea.model.learning.series import groups_by_class
from onea.model.learning.update_images import MIN_TO_HOLD_OUT

# Chosen on the Grocery photos (benchmarks/models/check_labels.py).
_MAX_SERIES = 24  # of a class
_NUM_NEIGHBOURS = 5
_TEMPERATURE = 0.1  # of the cosine similarities that weight the neighbours
_SMOOTHING = 0.02  # additional votes, spread over all classes
_BLOCK = 1024  # photos that are compared with all photos at a time


@dataclass(frozen=True)
class LabelErrors:
    """How likely each photo shows another class than its label.

    Attributes:
        ratio: log of the likelihood ratio of the best other class to the label, ``[N]``; minus infinity for photos of
            classes that are too small for cross-validation.
        likelier: row of that class, ``int64 [N]``.
        neighbours: positions of the nearest photos outside the photo's series, nearest first, ``int64 [N, k]``.
    """

    ratio: Tensor
    likelier: Tensor
    neighbours: Tensor


def find_label_errors(known: ClassStatistics, features: Tensor, rows: Tensor) -> LabelErrors:
    """Compare the label of each photo with the other photos, and with statistics of classes without photos.

    Statistics of a model may include a mislabelled photo, so those of classes with photos are computed again, by
    cross-validation. Photos of the same series are not counted as neighbours, so that a mislabelled series is found as
    well; in the statistics of a class, a series has too little weight to matter.

    Args:
        known: statistics of classes without photos; may be empty.
        features: features of the photos, ``[N, width]``.
        rows: the label of each photo, as a row of the statistics.
    """
    classes = max(known.classes, int(rows.max()) + 1)
    photos = torch.bincount(rows, minlength=classes)
    whitening = known.add(features, rows).whitening()
    neighbours, similarity = _nearest_neighbours(features, whitening, groups_by_class(features, rows, _MAX_SERIES))
    ratio, likelier = torch.full((len(rows),), -torch.inf, dtype=torch.float64), rows.clone()
    tested = photos[rows] >= MIN_TO_HOLD_OUT
    if bool(tested.any()):
        others, labels = known.add(features[~tested], rows[~tested]), rows[tested]
        scores = cross_validated_scores(label_error_classifier(), others, features[tested], labels, classes)
        votes = _neighbour_votes(rows[neighbours], similarity, classes)[tested]
        ratio[tested], likelier[tested] = _likelihood_ratio(scores, votes, labels, photos == 0)
    return LabelErrors(ratio, likelier, neighbours)


def label_error_classifier() -> Classifier:
    """The classifier for cross-validation; of those that are cheap to refit, it found the most label errors."""
    return make_classifier("whitened")


def _nearest_neighbours(features: Tensor, whitening: Tensor, series: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the nearest photos outside a photo's series and their cosine after whitening, both ``[N, k]``.

    Where there are fewer than ``k``, the cosine is minus infinity.
    """
    unit = F.normalize((features.double() - features.double().mean(0)) @ whitening, dim=1).float()
    indices, values = [], []
    for part, part_series in zip(unit.split(_BLOCK), series.split(_BLOCK), strict=True):
        similarity = (part @ unit.T).masked_fill(part_series[:, None] == series, -torch.inf)
        nearest = similarity.topk(min(_NUM_NEIGHBOURS, len(unit)), dim=1)
        indices.append(nearest.indices)
        values.append(nearest.values)
    return torch.cat(indices), torch.cat(values)


def _neighbour_votes(labels: Tensor, similarity: Tensor, classes: int) -> Tensor:
    """Log of the weighted share of each class among the neighbours of each photo, ``[N, classes]``.

    >>> _neighbour_votes(torch.tensor([[1, 1]]), torch.tensor([[0.5, 0.5]]), 2).exp()
    tensor([[0.0098, 0.9902]], dtype=torch.float64)
    """
    weights = (similarity.double() / _TEMPERATURE).softmax(1).nan_to_num(0.0)  # NaN for photos without neighbours
    votes = torch.zeros(len(weights), classes, dtype=torch.float64).scatter_add(1, labels, weights)
    return ((votes + _SMOOTHING / classes) / (1 + _SMOOTHING)).log()


def _likelihood_ratio(scores: Tensor, votes: Tensor, labels: Tensor, without_photos: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the likelihood ratio of the best other class to the label, and that class.

    The likelihood is that of the calibrated scores times the votes of the neighbours. Classes without photos get no
    votes, so for these the largest number of votes is used.

    Args:
        scores: cross-validated, ``[N, classes]``.
        votes: from ``_neighbour_votes``.
        labels: labels of the photos, ``[N]``.
        without_photos: classes without photos, ``bool [classes]``.
    """
    likelihood = (scores.double() / fit_temperature(scores, labels)).log_softmax(1)
    likelihood = likelihood + votes.where(~without_photos, votes.amax(1, keepdim=True))
    columns = labels[:, None]
    best_other = likelihood.scatter(1, columns, -torch.inf).max(1)
    return best_other.values - likelihood.gather(1, columns)[:, 0], best_other.indices
