# SPDX-License-Identifier: Apache-2.0
"""How long to train and on how many images at a time: one rule that looks at the data, the same for all methods.

It knows numbers only: images, classes and tasks. What a dataset is called plays no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# As One-A+ was developed: 10 epochs where a class has 500 images (CIFAR-100), 20 where it has 30 (CUB-200) or fewer.
_EPOCHS, _IMAGES_OF_CLASS, _POWER = 10, 500, 0.25
_FEWEST, _MOST = 10, 20
# Bounds of the epochs of a single task, as shares of those for a task of average size.
_SMALL_TASK, _LARGE_TASK = 0.5, 1.5
_GROWTH = 0.5  # as One-A publishes it: epochs grow with the root of the number of classes
# Images of an average task from which on a step takes more of them.
_BATCHES = ((2500, 128), (75, 64), (0, 32))


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
    {'batch_size': 128, 'epochs': 10, 'min_epochs': 5, 'max_epochs': 15, 'epoch_growth': 0.5}
    >>> data_rule(DataShape(images=5_994, classes=200, tasks=20))
    {'batch_size': 64, 'epochs': 20, 'min_epochs': 10, 'max_epochs': 30, 'epoch_growth': 0.5}
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
