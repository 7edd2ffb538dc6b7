# SPDX-License-Identifier: Apache-2.0
"""Which photos look mislabelled: judged by the other photos, never by themselves."""

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
SERIES = 24  # of a class at most: a series is a few photos taken one after the other
NEIGHBOURS = 5
_SHARPNESS = 0.1  # a neighbour whose cosine is that much larger counts e times as much
_DOUBT = 0.02  # share of the votes that all classes have without any neighbour, so that no class is impossible
_ROWS = 1024  # photos that are compared with all others at a time


@dataclass(frozen=True)
class Neighbours:
    """The most similar photos of each photo, the nearest first; minus infinity where there are fewer.

    Attributes:
        rows: numbers of the neighbours, ``int64 [N, k]``.
        similarity: their cosine in the whitened space, ``[N, k]``.
    """

    rows: Tensor
    similarity: Tensor


@dataclass(frozen=True)
class Suspicion:
    """How much each photo looks like another class than the one it was given.

    Attributes:
        ratio: logarithm of how many times likelier the best other class is, ``[N]``; below 0 the given one is.
        likelier: the row of that other class, ``int64 [N]``.
    """

    ratio: Tensor
    likelier: Tensor


@dataclass(frozen=True)
class LabelErrors:
    """Photos that were judged by each other.

    Attributes:
        suspicion: against each photo; minus infinity for photos of a class with too few to judge.
        near: the neighbours of each photo, those of its own series left out.
    """

    suspicion: Suspicion
    near: Neighbours


def find_label_errors(known: ClassStatistics, features: Tensor, rows: Tensor) -> LabelErrors:
    """Judge photos by each other and by what is known of classes that have none here.

    A mislabelled photo has done its harm to the class that it was taught as, so the classes of the photos are learned
    from these photos alone, in parts: a photo is judged by the parts without it. Look-alikes under the same name do not
    vouch for each other as neighbours, so that a whole series under a wrong name is found as well; in the statistics of
    a class they weigh too little to matter.

    Args:
        known: statistics of classes without photos here; may be empty.
        features: of the photos, ``[N, width]``.
        rows: the class that each photo was given, as a row of the statistics.
    """
    classes = max(known.classes, int(rows.max()) + 1)
    photos = torch.bincount(rows, minlength=classes)
    near = neighbours(features, known.add(features, rows).whitening(), groups_by_class(features, rows, SERIES))
    ratio, likelier = torch.full((len(rows),), -torch.inf, dtype=torch.float64), rows.clone()
    judged = photos[rows] >= MIN_TO_HOLD_OUT
    if bool(judged.any()):
        rest, own = known.add(features[~judged], rows[~judged]), rows[judged]
        scores = cross_validated_scores(classifier(), rest, features[judged], own, classes)
        votes = neighbour_votes(near, rows, classes)[judged]
        found = suspicion(scores, votes, own, silent=(photos == 0).nonzero()[:, 0])
        ratio[judged], likelier[judged] = found.ratio, found.likelier
    return LabelErrors(Suspicion(ratio, likelier), near)


def classifier() -> Classifier:
    """The rule that photos are judged by: of those that are cheap to fit anew, it found the most wrong names."""
    return make_classifier("whitened")


def neighbours(features: Tensor, whitening: Tensor, groups: Tensor, count: int = NEIGHBOURS) -> Neighbours:
    """The nearest photos of each photo by the cosine of whitened features, those of its own series left out."""
    unit = F.normalize((features.double() - features.double().mean(0)) @ whitening, dim=1).float()
    found = []
    for part, own in zip(unit.split(_ROWS), groups.split(_ROWS), strict=True):
        similarity = (part @ unit.T).masked_fill(own[:, None] == groups, -torch.inf)
        found.append(similarity.topk(min(count, len(unit)), dim=1))
    return Neighbours(torch.cat([part.indices for part in found]), torch.cat([part.values for part in found]))


def neighbour_votes(near: Neighbours, labels: Tensor, classes: int) -> Tensor:
    """Logarithm of the share of each class among the neighbours of each photo, ``[N, classes]``.

    >>> near = Neighbours(torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]]))
    >>> neighbour_votes(near, torch.tensor([0, 1, 1]), 2).exp()
    tensor([[0.0098, 0.9902]], dtype=torch.float64)
    """
    weights = (near.similarity.double() / _SHARPNESS).softmax(1).nan_to_num(0.0)  # of no neighbour at all
    votes = torch.zeros(len(weights), classes, dtype=torch.float64).scatter_add(1, labels[near.rows], weights)
    return ((votes + _DOUBT / classes) / (1 + _DOUBT)).log()


def suspicion(scores: Tensor, votes: Tensor, labels: Tensor, silent: Tensor) -> Suspicion:
    """The suspicion against each photo, from scores that have not seen it and the votes of its neighbours.

    Scores become probabilities by the temperature that fits them best. Both kinds of evidence are logarithms and add
    up: statistics know a class as a whole, neighbours know the corner of it in which the photo lies.

    Args:
        scores: of each photo for every class, ``[N, classes]``.
        votes: as ``neighbour_votes`` gives them.
        labels: the row of the class that each photo was given.
        silent: rows of classes without photos here; neighbours have no say between them and the class they favour.
    """
    likely = (scores.double() / fit_temperature(scores, labels)).log_softmax(1)
    own = labels[:, None]
    evidence = likely + votes.index_copy(1, silent, votes.amax(1, keepdim=True).expand(-1, len(silent)))
    best = evidence.scatter(1, own, -torch.inf).max(1)
    return Suspicion(best.values - evidence.gather(1, own)[:, 0], best.indices)
