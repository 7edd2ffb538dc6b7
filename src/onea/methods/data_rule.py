# SPDX-License-Identifier: Apache-2.0
"""How long to train and on how many images at a time: one rule that looks at the data, the same for all methods.

It knows numbers only: images, classes and tasks. What a dataset is called plays no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Two anchors, found by hand with a ViT-S before there was a rule: 15 epochs for 30 images of a class (CUB-200), and 5
# for 500 (CIFAR-100). The power of the ratio that joins them is 0.4.
_EPOCHS, _IMAGES_OF_CLASS, _POWER = 15, 30, 0.4
_FEWEST, _MOST = 3, 25
# Bounds of the epochs of a single task, as shares of those for a task of average size.
_SMALL_TASK, _LARGE_TASK = 0.55, 1.65
_GROWTH = 0.5  # as One-A publishes it: epochs grow with the root of the number of classes
# Images of an average task from which on a step takes more of them.
_BATCHES = ((1200, 128), (75, 64), (0, 32))


@dataclass(frozen=True)
class DataShape:
    """The numbers of a stream that the rule looks at.

    Attributes:
        images: to train on, in all tasks together.
        classes: in all tasks together.
        tasks: how many.
    """

    images: int
    classes: int
    tasks: int


def data_rule(shape: DataShape, epochs: int | None = None) -> dict[str, Any]:
    """Batch size and epochs for a stream of this shape; bounds are those of ``epochs`` where somebody has chosen them.

    The fewer images a class has, the more often they are seen. Larger tasks are trained longer than smaller ones
    (``task_epochs``), whatever the method, so that all methods see every image equally often.

    >>> data_rule(DataShape(images=50_000, classes=100, tasks=10))
    {'batch_size': 128, 'epochs': 5, 'min_epochs': 3, 'max_epochs': 8, 'epoch_growth': 0.5}
    >>> data_rule(DataShape(images=5_994, classes=200, tasks=20))
    {'batch_size': 64, 'epochs': 15, 'min_epochs': 8, 'max_epochs': 25, 'epoch_growth': 0.5}
    """
    images = max(shape.images, 1)
    wanted = _EPOCHS * (_IMAGES_OF_CLASS * shape.classes / images) ** _POWER
    average = epochs or min(max(round(wanted), _FEWEST), _MOST)
    return {
        "batch_size": next(batch for least, batch in _BATCHES if images >= least * shape.tasks),
        "epochs": average,
        "min_epochs": max(1, round(_SMALL_TASK * average)),
        "max_epochs": max(1, round(_LARGE_TASK * average)),
        "epoch_growth": _GROWTH,
    }
