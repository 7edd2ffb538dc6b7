# SPDX-License-Identifier: Apache-2.0
"""What a class's photos have brought: how many held-out ones are right when only some of the others are used."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onea import seeds
from onea.classifiers.contract import Classifier
from onea.classifiers.statistics import ClassStatistics
from onea.classifiers.validation import group_folds

SHARES = (0.25, 0.5, 0.75, 1.0)
_DRAWS = 4  # orders in which the series of a class may have arrived


@dataclass(frozen=True)
class LearningCurves:
    """What was measured.

    Attributes:
        right: of each class the share of held-out photos that are right with each of ``SHARES`` of the others,
            ``[C, 4]``; NaN for a class without photos.
        scores: of each photo for every class, by all photos outside its fold, ``[N, C]``.
    """

    right: Tensor
    scores: Tensor


def learning_curves(
    classifier: Classifier, known: ClassStatistics, features: Tensor, rows: Tensor, groups: Tensor
) -> LearningCurves:
    """How many held-out photos of each class are right when only some of its others are used.

    All other classes keep all of their photos, so a class's curve is about its own photos alone. They arrive series by
    series (``groups``), in several random orders. Whole series are held out, as they stand for tomorrow's photos.

    Args:
        classifier: fitted anew to every choice of photos.
        known: statistics of what is known besides these photos.
        features: of the photos, ``[N, width]``.
        rows: the class of each photo.
        groups: the series of each photo.
    """
    classes = max(known.classes, int(rows.max()) + 1)
    right, held = torch.zeros(classes, len(SHARES), dtype=torch.float64), torch.bincount(rows, minlength=classes)
    unseen, fold = torch.empty(len(rows), classes), group_folds(rows, groups)
    for part in fold.unique():
        here = fold == part
        full = known.add(features[~here], rows[~here])
        judged = rows[here]
        taught = {row: (~here & (rows == row)).nonzero()[:, 0] for row in judged.unique().tolist()}
        chosen = [
            _arrived(own, groups[own], draw, row)[: math.ceil(share * len(own))]
            for row, own in taught.items()
            for share in SHARES[:-1]
            for draw in range(_DRAWS)
        ]
        scores = classifier.fit(_with_variants(full, features, chosen))(features[here])
        place = torch.searchsorted(torch.tensor(list(taught)), judged)
        own, rivals = scores.gather(1, judged[:, None]), scores[:, :classes].scatter(1, judged[:, None], -torch.inf)
        variants = scores[:, classes:].reshape(len(judged), len(taught), len(SHARES) - 1, _DRAWS)
        partly = variants[torch.arange(len(judged)), place] > rivals.amax(1)[:, None, None]
        wholly = own > rivals.amax(1, keepdim=True)
        right.index_add_(0, judged, torch.cat([partly.double().mean(2), wholly.double()], dim=1))
        unseen[here] = scores[:, :classes]
    return LearningCurves(right / held.where(held > 0, torch.nan)[:, None], unseen)


def _arrived(own: Tensor, groups: Tensor, draw: int, row: int) -> Tensor:
    """A class's photos in an order in which they may have arrived: series by series."""
    generator = seeds.generator(0, draw, f"learning curve/{row}")
    names, member = groups.unique(return_inverse=True)
    place, order = torch.randperm(len(names), generator=generator), torch.randperm(len(own), generator=generator)
    return own[order[place[member[order]].argsort(stable=True)]]


def _with_variants(full: ClassStatistics, features: Tensor, chosen: list[Tensor]) -> ClassStatistics:
    """The statistics with one more row for each choice of photos; the spread of all classes stays as it is."""
    if not chosen:
        return full
    numbers = torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor([len(one) for one in chosen]))
    means = ClassStatistics.empty(full.width, scatter=False).add(features[torch.cat(chosen)], numbers)
    return replace(full.combine(means), scatter=full.scatter, freedom=full.freedom)
