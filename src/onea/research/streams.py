# SPDX-License-Identifier: Apache-2.0
"""Streams of tasks: the order of the classes, the sizes of the tasks and their order, images per class.

All functions are pure. Each seed initialises a new ``numpy.random.RandomState``, the legacy generator that produced the
published orders of classes and tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from onea.errors import OneaError, did_you_mean, truncate

if TYPE_CHECKING:  # a stream is made without loading the data package
    from onea.data.dataset import Group

Kind = Literal["step", "balanced", "sizes", "natural"]
Order = Literal["shuffled", "descending", "given"]
MAX_CLASSES = 1_000_000  # more than any dataset has, and few enough to be listed
_MIN_SAMPLES = 2  # training images of the rarest class of a long tail


@dataclass(frozen=True)
class Stream:
    """All tasks in order. The position of a class is its index in order of arrival; its id is its label in the dataset.

    >>> stream = Stream(class_order=(2, 0, 1), sizes=(2, 1))
    >>> stream.tasks, stream.classes, stream.range_of(0)
    (2, 3, range(0, 2))

    Attributes:
        class_order: id of the class at each position, a permutation of ``0..classes-1``.
        sizes: number of classes of each task.
        names: one name per task, or empty.
        samples: maximum number of training images of each class, by position, if the stream is long-tailed.
    """

    class_order: tuple[int, ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()
    samples: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if sorted(self.class_order) != list(range(len(self.class_order))):
            raise OneaError(
                f"The class order must contain every class from 0 to {len(self.class_order) - 1} exactly once; "
                "rebuild the stream or correct its class_order."
            )
        check_sizes(self.sizes, self.classes)
        if self.names and len(self.names) != self.tasks:
            raise OneaError(f"{len(self.names)} task names for {self.tasks} tasks; give one name per task, or none.")
        counts = self.samples
        if counts is not None and len(counts) != self.classes:
            raise OneaError(f"{len(counts)} sample counts for {self.classes} classes; give one per class, or none.")
        if counts is not None and min(counts) < 1:
            raise OneaError(f"A class cannot be learned from {min(counts)} images; give every class at least one.")

    @property
    def classes(self) -> int:
        """The number of classes of all tasks."""
        return len(self.class_order)

    @property
    def tasks(self) -> int:
        """The number of tasks."""
        return len(self.sizes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first position of each task; one longer than ``sizes``, ending with ``classes``.

        >>> Stream((2, 0, 1), (2, 1)).offsets
        (0, 2, 3)
        """
        return tuple(accumulate(self.sizes, initial=0))

    def range_of(self, task: int) -> range:
        """The positions of the classes of a task, counted from 0.

        >>> Stream((2, 0, 1), (2, 1)).range_of(1)
        range(2, 3)
        """
        if not 0 <= task < self.tasks:
            raise IndexError(f"task {task} is outside 0..{self.tasks - 1}")
        return range(*self.offsets[task : task + 2])

    def to_json(self) -> dict[str, Any]:
        """Plain lists, for ``json.dumps``.

        >>> Stream((1, 0), (1, 1)).to_json()
        {'class_order': [1, 0], 'sizes': [1, 1], 'names': [], 'samples': None}
        """
        return {name: None if values is None else list(values) for name, values in vars(self).items()}


def class_order(classes: int, seed: int) -> tuple[int, ...]:
    """A random permutation of the class ids, by position.

    >>> class_order(5, seed=1)
    (2, 1, 4, 0, 3)
    """
    _check_positive("classes", classes)
    return tuple(_generator(seed).permutation(classes).tolist())


def order_sizes(sizes: Sequence[int], order: Order, seed: int) -> tuple[int, ...]:
    """Task sizes in the order in which the tasks arrive.

    >>> order_sizes((36, 23, 14, 9, 6, 4, 3, 2, 2, 1), "shuffled", seed=1)
    (14, 1, 3, 6, 36, 9, 23, 2, 2, 4)
    >>> order_sizes((1, 3, 2), "descending", seed=1)
    (3, 2, 1)
    """
    return tuple(sizes[i] for i in _task_order(sizes, order, seed))


def group_tasks(
    groups: Sequence[Group], classes: int, order: Order, seed: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    """Class order, sizes and task names of a stream whose tasks are the groups of a dataset.

    Within a group, classes are in the order of the random permutation of all classes.
    """
    _check_groups(groups, classes)
    rank = {c: position for position, c in enumerate(class_order(classes, seed))}
    ordered = [groups[i] for i in _task_order([len(g.classes) for g in groups], order, seed)]
    ids = tuple(c for group in ordered for c in sorted(group.classes, key=rank.__getitem__))
    return ids, tuple(len(g.classes) for g in ordered), tuple(g.name for g in ordered)


def make_stream(
    *,
    classes: int,
    tasks: int | None = None,
    kind: Kind = "step",
    gamma: float = 0.01,
    sizes: Sequence[int] | None = None,
    order: Order | None = None,
    seed: int = 1,
    groups: Sequence[Group] = (),
    long_tail: float | None = None,
    n_max: int | None = None,
) -> Stream:
    """A stream of any kind.

    Args:
        classes: number of classes.
        tasks: number of tasks; required for ``step`` and ``balanced``, otherwise the number of sizes or groups.
        kind: ``step`` (sizes decay exponentially), ``balanced``, ``sizes`` (given) or ``natural`` (groups of the data).
        gamma: for ``step``, the weight of the smallest task relative to the largest.
        sizes: for ``sizes``, the number of classes of each task.
        order: order of the tasks; None means shuffled for ``step`` and as given for other kinds.
        seed: seed of the class order and of the task order.
        groups: for ``natural``, the groups; ignored for other kinds.
        long_tail: mu, the number of images of the rarest class relative to the most frequent one; None for no limits.
        n_max: number of images of the most frequent class; required with ``long_tail``.

    >>> make_stream(classes=100, tasks=10).sizes
    (14, 1, 3, 6, 36, 9, 23, 2, 2, 4)
    """
    _check_choice("kind", kind, get_args(Kind))
    if sizes and kind != "sizes":
        raise OneaError(
            f"Task sizes were given to a stream of kind '{kind}'; leave them out, or choose the kind 'sizes'."
        )
    order = order or ("shuffled" if kind == "step" else "given")
    samples = _samples(long_tail, n_max, classes)
    if kind == "natural":
        ids, group_sizes, names = group_tasks(groups, classes, order, seed)
        _check_tasks(tasks, len(group_sizes), "natural groups")
        return Stream(ids, group_sizes, names, samples)
    sizes = _sizes(kind, classes, tasks, gamma, sizes or ())
    return Stream(class_order(classes, seed), order_sizes(sizes, order, seed), (), samples)


def _sizes(kind: Kind, classes: int, tasks: int | None, gamma: float, sizes: Sequence[int]) -> Sequence[int]:
    if kind == "sizes":
        check_sizes(sizes, classes)
        _check_tasks(tasks, len(sizes), "task sizes")
        return sizes
    if tasks is None:
        raise OneaError(f"A stream of kind '{kind}' needs a number of tasks; give one.")
    return balanced_sizes(classes, tasks) if kind == "balanced" else step_sizes(classes, tasks, gamma)


def _samples(mu: float | None, n_max: int | None, classes: int) -> tuple[int, ...] | None:
    if mu is None:
        return None
    if n_max is None:
        raise OneaError("A long tail needs the number of images of the most frequent class; give n_max as well.")
    return long_tail_counts(n_max, classes, mu)


def _task_order(sizes: Sequence[int], order: Order, seed: int) -> list[int]:
    """Indices into ``sizes``, in the order of the tasks."""
    _check_choice("order", order, get_args(Order))
    indices = list(range(len(sizes)))
    if order == "shuffled":
        _generator(seed).shuffle(indices)
    elif order == "descending":
        indices.sort(key=lambda i: -sizes[i])  # stable: equal sizes keep their order
    return indices


def _check_groups(groups: Sequence[Group], classes: int) -> None:
    if not groups:
        raise OneaError("This data has no natural groups; choose the kind 'step', 'balanced' or 'sizes' instead.")
    for group in groups:
        if not group.classes:
            raise OneaError(f"The group '{group.name}' has no classes; remove it, or add some.")
    counts = Counter(c for group in groups for c in group.classes)
    for c, count in counts.items():
        if count > 1:
            names = " and ".join(f"'{group.name}'" for group in groups if c in group.classes)
            raise OneaError(f"Class {c} is listed more than once, in {names}; list it once, in one group.")
    unknown = sorted(c for c in counts if not 0 <= c < classes)
    if unknown:
        raise OneaError(
            f"The groups contain class {unknown[0]}, but classes are numbered from 0 to {classes - 1}; correct it."
        )
    missing = [c for c in range(classes) if c not in counts]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise OneaError(f"Class {missing[0]}{more} is in no group; add every class to a group.")


def _check_tasks(tasks: int | None, actual: int, source: str) -> None:
    if tasks is not None and tasks != actual:
        raise OneaError(f"{tasks} tasks were asked for but there are {actual} {source}; leave out the number of tasks.")


def _check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise OneaError(f"There is no {what} '{value}'; {did_you_mean(value, choices)}")


def _generator(seed: int) -> np.random.RandomState:
    if not 0 <= seed < 2**32:
        raise OneaError(f"The seed cannot be {seed}; choose a whole number from 0 to {2**32 - 1}.")
    return np.random.RandomState(seed)


def step_sizes(classes: int, tasks: int, gamma: float) -> tuple[int, ...]:
    """Task sizes that decay exponentially, largest first.

    Every task has one class, so that none is empty; the others are divided in proportion to the weights
    ``gamma ** (k / (tasks - 1))`` of tasks k.

    >>> step_sizes(100, 10, 0.01)
    (36, 23, 14, 9, 6, 4, 3, 2, 2, 1)
    >>> step_sizes(100, 10, 1.0)
    (10, 10, 10, 10, 10, 10, 10, 10, 10, 10)
    """
    _check_counts(classes, tasks)
    if not 0 < gamma <= 1:
        raise OneaError(
            f"gamma is the smallest task's weight relative to the largest and cannot be {gamma:g}; "
            "choose a number above 0 and up to 1 (1 is balanced, 0.01 is the paper's)."
        )
    weights = np.power(float(gamma), np.arange(tasks) / max(tasks - 1, 1))
    rounded = np.round(weights / weights.sum() * (classes - tasks)).astype(int)
    sizes = [1 + int(size) for size in rounded]
    # Correct the sum after rounding, one class at a time, starting with the largest task.
    missing = classes - sum(sizes)
    for task in cycle(range(tasks)):
        if not missing:
            break
        if missing > 0 or sizes[task] > 1:
            step = 1 if missing > 0 else -1
            sizes[task] += step
            missing -= step
    return tuple(sorted(sizes, reverse=True))


def balanced_sizes(classes: int, tasks: int) -> tuple[int, ...]:
    """Equal task sizes; if ``tasks`` does not divide ``classes``, the first tasks have one class more.

    >>> balanced_sizes(10, 3)
    (4, 3, 3)
    """
    _check_counts(classes, tasks)
    size, larger = divmod(classes, tasks)
    return (size + 1,) * larger + (size,) * (tasks - larger)


def parse_sizes(text: str, classes: int | None = None) -> tuple[int, ...]:
    """Task sizes from text, checked against the number of classes if it is known.

    >>> parse_sizes("36,1,14")
    (36, 1, 14)
    """
    words = text.replace(",", " ").split()
    try:
        sizes = tuple(int(word) for word in words)
    except ValueError:
        raise OneaError(
            f"Cannot read '{truncate(text)}' as task sizes; write whole numbers separated by commas, such as 36,1,14."
        ) from None
    check_sizes(sizes, sum(sizes) if classes is None else classes)
    return sizes


def check_sizes(sizes: Sequence[int], classes: int) -> None:
    """Refuse sizes that are not positive or whose sum is not the number of classes."""
    if not sizes:
        raise OneaError("A stream needs at least one task; give at least one task size.")
    if min(sizes) < 1:
        raise OneaError(f"A task cannot have {truncate(min(sizes))} classes; give every task at least one.")
    if sum(sizes) > MAX_CLASSES:
        raise OneaError(f"The task sizes add up to more than {MAX_CLASSES:,} classes; give smaller ones.")
    if sum(sizes) != classes:
        raise OneaError(
            f"The task sizes add up to {sum(sizes)} but there are {classes} classes; "
            f"{'add' if sum(sizes) < classes else 'remove'} {abs(classes - sum(sizes))}."
        )


def long_tail_counts(n_max: int, classes: int, mu: float = 0.1) -> tuple[int, ...]:
    """Training images of each class, by position: they decay exponentially from ``n_max`` to ``n_max * mu``.

    >>> long_tail_counts(500, 5, mu=0.1)
    (500, 281, 158, 89, 50)
    """
    _check_positive("n_max", n_max)
    _check_positive("classes", classes)
    if not 0 < mu <= 1:
        raise OneaError(
            f"mu is the ratio of images of the rarest class to the most frequent one and cannot be {mu:g}; "
            "choose a number above 0 and up to 1."
        )
    last = max(classes - 1, 1)
    return tuple(max(_MIN_SAMPLES, round(n_max * mu ** (c / last))) for c in range(classes))


def _check_counts(classes: int, tasks: int) -> None:
    _check_positive("classes", classes)
    _check_positive("tasks", tasks)
    if classes > MAX_CLASSES:
        raise OneaError(f"{truncate(classes)} classes are too many; give at most {MAX_CLASSES:,}.")
    if tasks > classes:
        raise OneaError(
            f"{classes} classes cannot fill {truncate(tasks)} tasks, as each task needs at least one; "
            f"ask for {classes} tasks or fewer."
        )


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise OneaError(f"{name} must be at least 1, not {truncate(value)}; give a positive whole number.")
