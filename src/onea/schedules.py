# SPDX-License-Identifier: Apache-2.0
"""Schedules: the number of epochs of a task, and the learning rate over them."""

from __future__ import annotations

import math
from collections.abc import Callable


def task_epochs(
    classes: int, reference_epochs: int, reference_classes: float, smallest: int, largest: int, growth: float = 0.5
) -> int:
    """The number of epochs for a task: more for tasks with more classes, within bounds (Eq. 19).

    Rounds half to even before clamping, as published.

    >>> [task_epochs(n, 25, 10, 20, 40) for n in (1, 9, 14, 36)]
    [20, 24, 30, 40]
    """
    epochs: float = reference_epochs * (classes / reference_classes) ** growth
    return min(max(round(epochs), smallest), largest)


def cosine(epoch: int, epochs: int) -> float:
    """Factor on the learning rate in an epoch (counted from 0): from one towards zero along a cosine.

    >>> cosine(0, 4), round(cosine(2, 4), 3)
    (1.0, 0.5)
    """
    return 0.5 * (1 + math.cos(math.pi * epoch / epochs))


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
