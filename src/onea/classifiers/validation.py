# SPDX-License-Identifier: Apache-2.0
"""Cross-validation on features: each image is scored by statistics without the images of its group."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from onea.classifiers.base import Classifier
from onea.classifiers.statistics import ClassStatistics
from onea.tensors import rows_of_each

FOLDS = 5
_MAX_CLASSES, _MAX_IMAGES = 256, 4096  # of one validation


def sample_for_validation(labels: Tensor, groups: Tensor) -> Tensor:
    """Images that are enough for cross-validation, ``bool [N]``: whole groups of a bounded number of classes.

    >>> sample_for_validation(torch.tensor([4, 4, 7]), torch.tensor([0, 0, 1])).tolist()
    [True, True, True]
    """
    classes = labels.unique()
    sampled = torch.isin(labels, classes[:: max(1, -(-len(classes) // _MAX_CLASSES))])
    series, members = torch.stack([labels, groups], 1)[sampled].unique(dim=0, return_inverse=True)
    step = -(-int(sampled.sum()) // _MAX_IMAGES)
    if step > 1 and len(series) >= step:
        sampled[sampled.clone()] = members % step == 0
    return sampled


def leave_folds_out(
    statistics: ClassStatistics, views: Tensor, labels: Tensor, groups: Tensor, folds: int = FOLDS
) -> Iterator[tuple[Tensor, ClassStatistics]]:
    """For each fold, its images, ``bool [N]``, and statistics of earlier images and all other folds.

    Args:
        statistics: statistics of earlier images.
        views: features of the images, ``[views, N, width]``.
        labels: classes of the images.
        groups: images of a class with the same group are in the same fold.
        folds: maximum number of folds.
    """
    assigned = assign_folds(labels, groups, folds)
    for fold in assigned.unique():
        test = assigned == fold
        yield test, statistics.add(views[:, ~test].flatten(0, 1), labels[~test].repeat(len(views)))


def leave_classes_out(
    statistics: ClassStatistics, views: Tensor, labels: Tensor, groups: Tensor, held_out: Tensor, folds: int = FOLDS
) -> Iterator[tuple[Tensor, Tensor, ClassStatistics]]:
    """In each round, test images, images of left-out classes (both ``bool [N]``), and statistics without both.

    Only classes without earlier images are left out, each once. The test images belong to the other classes; there is
    no round if there are none.

    Args:
        statistics: statistics of earlier images.
        views: features of the images, ``[views, N, width]``.
        labels: classes of the images.
        groups: images of a class with the same group are in the same fold.
        held_out: images that the adapter was not trained on; only these are tested, or all images if there are none.
        folds: maximum number of folds.
    """
    classes = labels.unique()
    new = classes[statistics.counts[classes] == 0]
    rounds = min(folds, len(new))
    assigned = assign_folds(labels, groups, max(2, rounds))
    test_all = not bool(held_out.any())
    for index in range(rounds):
        left_out = torch.isin(labels, new[index::rounds])
        test = ~left_out & (assigned == index if test_all else held_out)
        rest = ~left_out & ~test
        others = statistics.add(views[:, rest].flatten(0, 1), labels[rest].repeat(len(views)))
        others = others.select_classes((others.counts > 0).nonzero()[:, 0])
        if others.classes:
            yield test, left_out if test_all else left_out & held_out, others


def cross_validated_scores(
    classifier: Classifier,
    statistics: ClassStatistics,
    features: Tensor,
    labels: Tensor,
    classes: int,
    groups: Tensor | None = None,
) -> Tensor:
    """Scores ``[N, classes]`` of each image by a classifier fitted to earlier images and all other folds.

    Without ``groups``, each image is a group.
    """
    scores = torch.empty(len(labels), classes)
    groups = torch.arange(len(labels)) if groups is None else groups
    for test, others in leave_folds_out(statistics, features[None], labels, groups):
        scores[test] = classifier.fit(others)(features[test])
    return scores


def assign_folds(labels: Tensor, groups: Tensor, folds: int = FOLDS) -> Tensor:
    """The fold of each image, ``int64 [N]``, without splitting groups; each class is divided evenly over the folds.

    The largest groups come first, each is assigned to the smallest fold: as in
    ``sklearn.model_selection.GroupKFold``, but class by class. A class with a single group is split by image, so that
    other folds have images of it.

    >>> assign_folds(torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 1, 0, 2, 7, 7]), folds=2).tolist()
    [0, 1, 0, 1, 0, 1]
    """
    fold_of_image = torch.empty(len(labels), dtype=torch.int64)
    for _, members in rows_of_each(labels):
        group = groups[members].unique(return_inverse=True)[1]
        if not group.any():
            group = torch.arange(len(members))
        sizes = torch.bincount(group)
        fold_sizes, fold_of_group = [0] * folds, torch.empty(len(sizes), dtype=torch.int64)
        for number in sizes.argsort(descending=True, stable=True).tolist():
            fold_of_group[number] = smallest = min(range(folds), key=fold_sizes.__getitem__)
            fold_sizes[smallest] += int(sizes[number])
        fold_of_image[members] = fold_of_group[group]
    return fold_of_image
