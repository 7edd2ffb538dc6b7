# SPDX-License-Identifier: Apache-2.0
"""The images that are held out of an update's training: their selection, and a test for a drop in their accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onea import seeds
from onea.classifiers.base import Classifier, Statistics
from onea.learner.tasks import Task

_MAX_HELD_OUT = 200  # images of a task, which suffice to detect a harmful adapter
_MIN_TRAINED = 2  # images of each class that are not held out


def hold_out(orders: Sequence[Tensor], share: float, groups: Tensor | None = None, min_per_class: int = 0) -> Tensor:
    """Select images to hold out: about the same share of every class.

    >>> hold_out([torch.tensor([3, 0, 2, 1]), torch.tensor([5, 4])], share=0.5).tolist()
    [3, 0]
    >>> hold_out([torch.tensor([3, 0, 2, 1])], share=0.5, groups=torch.tensor([7, 8, 8, 7])).tolist()
    [0, 3]

    Args:
        orders: the images of each class in random order.
        share: share of the images of a class.
        groups: the group of each image, such as a series of photos. Whole groups are held out, because an image is easy
            to predict after training on others of its group. Of much larger groups, consecutive images are held out.
        min_per_class: number of images of each class to hold out at least, if two images remain for training.
    """
    selected = [torch.empty(0, dtype=torch.int64)]
    for members in orders:
        count = max(0, min(max(min_per_class, round(share * len(members))), len(members) - _MIN_TRAINED))
        selected.append(members[:count] if groups is None else _select_groups(members, groups, count))
    return torch.cat(selected)


def _select_groups(members: Tensor, groups: Tensor, count: int) -> Tensor:
    """About ``count`` images of whole groups of a class; groups in the random order of their first images."""
    if not count:
        return members[:0]
    images, positions = members.sort()
    parts = _split_large_groups(groups[images], count)
    sizes, selected = torch.bincount(parts), torch.zeros(len(images), dtype=torch.bool)
    for number in dict.fromkeys(parts[positions.argsort()].tolist()):
        total, size = int(selected.sum()), int(sizes[number])
        if abs(total + size - count) < abs(total - count) and total + size <= len(images) - _MIN_TRAINED:
            selected |= parts == number
    return images[selected]


def _split_large_groups(groups: Tensor, count: int) -> Tensor:
    """Renumber the groups from 0, and split those of ``2 * count`` images or nearly the whole class into parts.

    >>> _split_large_groups(torch.tensor([7, 7, 3, 7, 7, 7, 3, 3]), 2).tolist()
    [1, 1, 0, 2, 2, 3, 0, 0]
    """
    parts = torch.empty_like(groups, dtype=torch.int64)
    start = 0
    for number in groups.unique():
        members = (groups == number).nonzero()[:, 0]
        whole = len(members) < min(2 * count, len(groups) - 1)
        parts[members] = start + torch.arange(len(members)) // (len(members) if whole else count)
        start = int(parts[members[-1]]) + 1
    return parts


def held_out_mask(task: Task, share: float) -> Tensor:
    """Mask of the images of a task to hold out, ``bool [N]``: this share of them, at most about 200.

    If the share is less than half an image per class, one image of each of some classes is held out.
    """
    share = min(share, _MAX_HELD_OUT / len(task))
    order = torch.randperm(len(task), generator=seeds.generator(task.seed, task.index, "guard"))
    orders = [order[task.labels[order] == label] for label in task.classes]
    selected = hold_out(orders, share)
    if not len(selected):
        candidates = [int(members[0]) for members in orders if len(members) > _MIN_TRAINED]
        selected = torch.tensor(candidates[: max(1, round(share * len(task)))], dtype=torch.int64)
    return torch.zeros(len(task), dtype=torch.bool).index_fill(0, selected, True)


def held_out_accuracy(
    classifier: Classifier, statistics: Statistics, features: Tensor, labels: Tensor, held_out: Tensor
) -> float:
    """The accuracy on held-out images with all classes as candidates; 0 without held-out images.

    The classifier is fitted to the statistics of earlier images and the new images that are not in the mask
    ``held_out``, with features ``[N, width]``.
    """
    if not held_out.any():
        return 0.0
    statistics = statistics.add(features[~held_out], labels[~held_out])
    predictions = classifier.fit(statistics).to(features.device)(features[held_out]).argmax(1).cpu()
    return float((predictions == labels[held_out]).double().mean())


def dropped_significantly(before: float, after: float, images: int) -> bool:
    """Whether an accuracy dropped by more than two standard errors of the lower one.

    >>> dropped_significantly(0.9, 0.85, images=50), dropped_significantly(0.9, 0.6, images=50)
    (False, True)
    """
    return before - after > 2 * math.sqrt(max(after * (1 - after), 1 / images) / images)
