# SPDX-License-Identifier: Apache-2.0
"""The guard: images held out of a task's training say whether its adapter makes answers worse."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onea import seeds
from onea.classifiers.contract import Classifier, Statistics
from onea.tasks import Task

_WATCHED = 200  # images tell whether a task's adapter does harm


def held_out_images(task: Task, share: float) -> Tensor:
    """Which images of a task are held out of its training, ``bool [N]``: this share of them, about 200 at most.

    Of every class the same share, but never one of its last two; one of some classes where that would be none.
    """
    held_out = torch.zeros(len(task), dtype=torch.bool)
    share = min(share, _WATCHED / len(task))
    order = torch.randperm(len(task), generator=seeds.generator(task.seed, task.index, "guard"))
    spare = []  # an image of each class that can do without one more
    for position in task.classes:
        own = order[task.labels[order] == position]
        count = max(0, min(round(share * len(own)), len(own) - 2))
        held_out[own[:count]] = True
        spare += own[count : count + 1].tolist() if len(own) > count + 2 else []
    if not held_out.any():  # the share is less than half an image of a class
        held_out[spare[: max(1, round(share * len(task)))]] = True
    return held_out


def held_out_accuracy(
    classifier: Classifier, known: Statistics, features: Tensor, labels: Tensor, held_out: Tensor
) -> float:
    """The share of held-out images that are answered right among all classes; 0 where there are none.

    Args:
        classifier: answers.
        known: what it knows without any of these images.
        features: of all images, ``[N, width]``; those that are not held out join what is known.
        labels: the class of each.
        held_out: which are held out, ``bool [N]``.
    """
    if not held_out.any():
        return 0.0
    known = known.add(features[~held_out], labels[~held_out])
    answers = classifier.fit(known).to(features.device)(features[held_out]).argmax(1).cpu()
    return float((answers == labels[held_out]).double().mean())


def fallen(before: float, after: float, images: int) -> bool:
    """Whether a share of right answers has fallen by more than chance: by two deviations of the smaller share.

    >>> fallen(0.9, 0.85, images=50), fallen(0.9, 0.6, images=50)
    (False, True)
    """
    return before - after > 2 * math.sqrt(max(after * (1 - after), 1 / images) / images)
