# SPDX-License-Identifier: Apache-2.0
"""Number of epochs, learning rate schedules, and training defaults that depend on the size of a dataset."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# 10 epochs for 500 images per class (CIFAR-100), 20 for 30 (CUB-200) or fewer, as One-A+ was developed.
_EPOCHS, _IMAGES_PER_CLASS, _EXPONENT = 10, 500, 0.25
_MIN_EPOCHS, _MAX_EPOCHS = 10, 20
_SMALL_TASK, _LARGE_TASK = 0.5, 1.5  # bounds of the epochs of a single task, relative to a task of average size
_GROWTH = 0.5  # exponent of the number of classes, as published
_BATCH_SIZES = ((2500, 128), (75, 64), (0, 32))  # minimum images of an average task, and batch size


def task_epochs(
    classes: int, reference_epochs: int, reference_classes: float, min_epochs: int, max_epochs: int, growth: float = 0.5
) -> int:
    """The number of epochs for a task: more for tasks with more classes, within bounds (Eq. 19).

    Rounds half to even before clamping, as published.

    >>> [task_epochs(n, 25, 10, 20, 40) for n in (1, 9, 14, 36)]
    [20, 24, 30, 40]
    """
    epochs: float = reference_epochs * (classes / reference_classes) ** growth
    return min(max(round(epochs), min_epochs), max_epochs)


def cosine(epoch: int, epochs: int) -> float:
    """Cosine annealing: factor on the learning rate in an epoch (counted from 0), from one towards zero.

    >>> cosine(0, 4), round(cosine(2, 4), 3)
    (1.0, 0.5)
    """
    return 0.5 * (1 + math.cos(math.pi * epoch / epochs))


def cosine_to(last: float) -> Callable[[int, int], float]:
    """Cosine annealing from one towards ``last`` instead of zero.

    >>> cosine_to(0.5)(0, 4), round(cosine_to(0.5)(2, 4), 3)
    (1.0, 0.75)
    """
    return lambda epoch, epochs: last + (1 - last) * cosine(epoch, epochs)


def get_schedule(name: str) -> Callable[[int, int], float]:
    """The schedule of this name: ``cosine`` or ``late-cosine``."""
    return {"cosine": cosine, "late-cosine": late_cosine}[name]


def constant(epoch: int, epochs: int) -> float:
    """The full learning rate in every epoch."""
    return 1.0


def late_cosine(epoch: int, epochs: int) -> float:
    """The cosine of CODA-Prompt and InfLoRA as published: full rate in the first two epochs, then a quarter period.

    >>> [round(late_cosine(epoch, 20), 3) for epoch in (0, 1, 2, 19)]
    [1.0, 1.0, 0.997, 0.097]
    """
    if epochs == 1:
        return 1.0
    return math.cos(99 * math.pi * max(epoch - 1, 0) / (200 * (epochs - 1)))


@dataclass(frozen=True)
class DatasetSize:
    """The size of a stream of tasks.

    Attributes:
        images: number of training images of all tasks.
        classes: number of classes of all tasks.
        tasks: number of tasks.
    """

    images: int
    classes: int
    tasks: int


def training_defaults(size: DatasetSize, epochs: int | None = None) -> dict[str, Any]:
    """Batch size and epochs for a stream of this size, the same for all methods and datasets.

    The fewer images per class, the more epochs. Larger tasks are trained longer than smaller ones (``task_epochs``).

    Args:
        size: the size of the stream.
        epochs: epochs of a task of average size, which also determine the bounds; None for the default.

    >>> training_defaults(DatasetSize(images=50_000, classes=100, tasks=10))
    {'batch_size': 128, 'epochs': 10, 'min_epochs': 5, 'max_epochs': 15, 'epoch_growth': 0.5}
    >>> training_defaults(DatasetSize(images=5_994, classes=200, tasks=20))
    {'batch_size': 64, 'epochs': 20, 'min_epochs': 10, 'max_epochs': 30, 'epoch_growth': 0.5}
    """
    images = max(size.images, 1)
    exact = _EPOCHS * (_IMAGES_PER_CLASS * size.classes / images) ** _EXPONENT
    average = epochs or min(max(round(exact), _MIN_EPOCHS), _MAX_EPOCHS)
    return {
        "batch_size": next(batch for min_images, batch in _BATCH_SIZES if images >= min_images * size.tasks),
        "epochs": average,
        "min_epochs": max(1, round(_SMALL_TASK * average)),
        "max_epochs": max(1, round(_LARGE_TASK * average)),
        "epoch_growth": _GROWTH,
    }
