# SPDX-License-Identifier: Apache-2.0
"""Images held out of an update's training: which they are, and whether its adapter answers them worse."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onea import seeds
from onea.classifiers.contract import Classifier, Statistics
from onea.learner.tasks import Task

_CHECKED = 200  # images are enough to tell whether an adapter does harm
_TRAINED = 2  # images of a class that are always trained on


def hold_out(orders: Sequence[Tensor], share: float, groups: Tensor | None = None, least: int = 0) -> Tensor:
    """The images that are held out of training: about the same share of every class.

    >>> hold_out([torch.tensor([3, 0, 2, 1]), torch.tensor([5, 4])], share=0.5).tolist()
    [3, 0]
    >>> hold_out([torch.tensor([3, 0, 2, 1])], share=0.5, groups=torch.tensor([7, 8, 8, 7])).tolist()
    [0, 3]

    Args:
        orders: the images of each class in random order.
        share: of the images of a class.
        groups: of images taken in series, a number for each image. Whole groups are held out: next to an image of the
            same series, the answer to a held-out one would be no surprise. Of a group that is larger than the share,
            one stretch is held out.
        least: images of each class at least, as far as two remain.
    """
    chosen = [torch.empty(0, dtype=torch.int64)]
    for own in orders:
        count = max(0, min(max(least, round(share * len(own))), len(own) - _TRAINED))
        chosen.append(own[:count] if groups is None else _whole_groups(own, groups, count))
    return torch.cat(chosen)


def _whole_groups(own: Tensor, groups: Tensor, count: int) -> Tensor:
    """Members of groups of a class that are together about this many images; groups in the order of their images."""
    if not count:
        return own[:0]
    images, places = own.sort()
    parts = _stretches(groups[images], count)
    sizes, chosen = torch.bincount(parts), torch.zeros(len(images), dtype=torch.bool)
    for number in dict.fromkeys(parts[places.argsort()].tolist()):
        total, size = int(chosen.sum()), int(sizes[number])
        if abs(total + size - count) < abs(total - count) and total + size <= len(images) - _TRAINED:
            chosen |= parts == number
    return images[chosen]


def _stretches(groups: Tensor, count: int) -> Tensor:
    """The same groups, numbered from 0; those of twice this many members, or nearly all, are cut into stretches of it.

    >>> _stretches(torch.tensor([7, 7, 3, 7, 7, 7, 3, 3]), 2).tolist()
    [1, 1, 0, 2, 2, 3, 0, 0]
    """
    found = torch.empty_like(groups, dtype=torch.int64)
    start = 0
    for number in groups.unique():
        own = (groups == number).nonzero()[:, 0]
        whole = len(own) < min(2 * count, len(groups) - 1)
        found[own] = start + torch.arange(len(own)) // (len(own) if whole else count)
        start = int(found[own[-1]]) + 1
    return found


def held_out_of_task(task: Task, share: float) -> Tensor:
    """Which images of a task are held out of its training, ``bool [N]``: this share of them, about 200 at most.

    Where the share is less than half an image of a class, one image of some classes is held out.
    """
    share = min(share, _CHECKED / len(task))
    order = torch.randperm(len(task), generator=seeds.generator(task.seed, task.index, "guard"))
    orders = [order[task.labels[order] == position] for position in task.classes]
    chosen = hold_out(orders, share)
    if not len(chosen):
        spare = [int(own[0]) for own in orders if len(own) > _TRAINED]
        chosen = torch.tensor(spare[: max(1, round(share * len(task)))], dtype=torch.int64)
    return torch.zeros(len(task), dtype=torch.bool).index_fill(0, chosen, True)


def held_out_accuracy(
    classifier: Classifier, known: Statistics, features: Tensor, labels: Tensor, held_out: Tensor
) -> float:
    """The accuracy on held-out images among all classes; 0 where there are none.

    Args:
        classifier: answers.
        known: statistics without any of these images.
        features: of all images, ``[N, width]``; those that are not held out are added to the statistics.
        labels: the class of each.
        held_out: which are held out, ``bool [N]``.
    """
    if not held_out.any():
        return 0.0
    known = known.add(features[~held_out], labels[~held_out])
    answers = classifier.fit(known).to(features.device)(features[held_out]).argmax(1).cpu()
    return float((answers == labels[held_out]).double().mean())


def dropped_significantly(before: float, after: float, images: int) -> bool:
    """Whether an accuracy has dropped by more than chance: by two standard errors of the lower one.

    >>> dropped_significantly(0.9, 0.85, images=50), dropped_significantly(0.9, 0.6, images=50)
    (False, True)
    """
    return before - after > 2 * math.sqrt(max(after * (1 - after), 1 / images) / images)
