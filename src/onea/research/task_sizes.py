# SPDX-License-Identifier: Apache-2.0
"""The number of classes of each task, and of images of each class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onea.errors import OneaError, short

MOST_CLASSES = 1_000_000  # more than any dataset has, and few enough to be listed
FEWEST_SAMPLES = 2  # a long tail never leaves a class with fewer images than this


def step_imbalanced(classes: int, tasks: int, gamma: float) -> tuple[int, ...]:
    """Task sizes that decay exponentially from head to tail, largest first.

    Task k weighs ``gamma ** (k / (tasks - 1))``. Every task first gets one class, so that none is empty; the others are
    shared by weight.

    >>> step_imbalanced(100, 10, 0.01)
    (36, 23, 14, 9, 6, 4, 3, 2, 2, 1)
    >>> step_imbalanced(100, 10, 1.0)
    (10, 10, 10, 10, 10, 10, 10, 10, 10, 10)
    """
    _check_counts(classes, tasks)
    if not 0 < gamma <= 1:
        raise OneaError(
            f"gamma is the smallest task's weight relative to the largest and cannot be {gamma:g}; "
            "choose a number above 0 and up to 1 (1 is balanced, 0.01 is the paper's)."
        )
    weights = np.power(float(gamma), np.arange(tasks) / max(tasks - 1, 1))
    shared = np.round(weights / weights.sum() * (classes - tasks)).astype(int)
    sizes = _settle([1 + int(n) for n in shared], classes)
    # Taking a class from one of several equal head tasks would leave it behind the others.
    return tuple(sorted(sizes, reverse=True))


def balanced(classes: int, tasks: int) -> tuple[int, ...]:
    """Task sizes as equal as they can be; the first tasks take the remainder.

    >>> balanced(10, 3)
    (4, 3, 3)
    """
    _check_counts(classes, tasks)
    each, left = divmod(classes, tasks)
    return (each + 1,) * left + (each,) * (tasks - left)


def parse_sizes(text: str, classes: int | None = None) -> tuple[int, ...]:
    """Task sizes written by hand, checked against the number of classes where that is known.

    >>> parse_sizes("36,1,14")
    (36, 1, 14)
    """
    words = text.replace(",", " ").split()
    try:
        sizes = tuple(int(word) for word in words)
    except ValueError:
        raise OneaError(
            f"Cannot read '{short(text)}' as task sizes; write whole numbers with commas between them, such as 36,1,14."
        ) from None
    check_sizes(sizes, sum(sizes) if classes is None else classes)
    return sizes


def check_sizes(sizes: Sequence[int], classes: int) -> None:
    """Complain unless every task has a class and together they have them all."""
    if not sizes:
        raise OneaError("A stream needs at least one task; give at least one task size.")
    if min(sizes) < 1:
        raise OneaError(f"A task cannot have {short(min(sizes))} classes; give every task at least one.")
    if sum(sizes) > MOST_CLASSES:
        raise OneaError(f"The task sizes add up to more than {MOST_CLASSES:,} classes; give smaller ones.")
    if sum(sizes) != classes:
        raise OneaError(
            f"The task sizes add up to {sum(sizes)} but there are {classes} classes; "
            f"{'add' if sum(sizes) < classes else 'take away'} {abs(classes - sum(sizes))}."
        )


def long_tailed(n_max: int, classes: int, mu: float = 0.1) -> tuple[int, ...]:
    """Training images per class, by position: ``n_max`` for the first, decaying to ``n_max * mu`` for the last.

    >>> long_tailed(500, 5, mu=0.1)
    (500, 281, 158, 89, 50)
    """
    at_least_one("n_max", n_max)
    at_least_one("classes", classes)
    if not 0 < mu <= 1:
        raise OneaError(
            f"mu is the rarest class's share of the commonest one's images and cannot be {mu:g}; "
            "choose a number above 0 and up to 1."
        )
    last = max(classes - 1, 1)
    return tuple(max(FEWEST_SAMPLES, round(n_max * mu ** (c / last))) for c in range(classes))


def _settle(sizes: list[int], classes: int) -> list[int]:
    """Share out what rounding left over or took too much, one class at a time, cycling from the largest task."""
    left = classes - sum(sizes)
    task = 0
    while left:
        if left > 0 or sizes[task] > 1:
            step = 1 if left > 0 else -1
            sizes[task] += step
            left -= step
        task = (task + 1) % len(sizes)
    return sizes


def _check_counts(classes: int, tasks: int) -> None:
    at_least_one("classes", classes)
    at_least_one("tasks", tasks)
    if classes > MOST_CLASSES:
        raise OneaError(f"{short(classes)} classes are too many; give at most {MOST_CLASSES:,}.")
    if tasks > classes:
        raise OneaError(
            f"{classes} classes cannot fill {short(tasks)} tasks, as each task needs at least one; "
            f"ask for {classes} tasks or fewer."
        )


def at_least_one(name: str, value: int) -> None:
    """Complain about a number that must be positive."""
    if value < 1:
        raise OneaError(f"{name} must be at least 1, not {short(value)}; give a positive whole number.")
