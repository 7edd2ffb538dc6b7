# SPDX-License-Identifier: Apache-2.0
"""Streams of tasks: the order of the classes, the sizes of the tasks and their order, images per class.

Everything here is a pure function of its arguments; a seed always means a freshly seeded
``numpy.random.RandomState`` (the legacy generator), because published class and task orders were drawn with it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from onea.errors import OneaError, did_you_mean, truncate

if TYPE_CHECKING:  # only the type: a stream is made without loading the data package
    from onea.data.dataset import Group

Kind = Literal["step", "balanced", "sizes", "natural"]
Order = Literal["shuffled", "descending", "given"]
MOST_CLASSES = 1_000_000  # more than any dataset has, and few enough to be listed
FEWEST_SAMPLES = 2  # a long tail never leaves a class with fewer images than this


@dataclass(frozen=True)
class Stream:
    """All tasks in order. Positions count classes as they arrive; ids are the dataset's own labels.

    >>> stream = Stream(class_order=(2, 0, 1), sizes=(2, 1))
    >>> stream.tasks, stream.classes, stream.range_of(0)
    (2, 3, range(0, 2))

    Attributes:
        class_order: position -> original class id, a permutation of ``0..classes-1``.
        sizes: how many classes each task brings.
        names: one name per task, or empty.
        samples: the most training images a class may use, by position, when the stream is long-tailed.
    """

    class_order: tuple[int, ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()
    samples: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if sorted(self.class_order) != list(range(len(self.class_order))):
            raise OneaError(
                f"The class order must hold every class from 0 to {len(self.class_order) - 1} exactly once; "
                "rebuild the stream or correct its class_order."
            )
        check_sizes(self.sizes, self.classes)
        if self.names and len(self.names) != self.tasks:
            raise OneaError(f"{len(self.names)} task names for {self.tasks} tasks; give one name per task, or none.")
        if self.samples is not None:
            self._check_samples(self.samples)

    def _check_samples(self, samples: tuple[int, ...]) -> None:
        if len(samples) != self.classes:
            raise OneaError(f"{len(samples)} sample counts for {self.classes} classes; give one per class, or none.")
        if min(samples) < 1:
            raise OneaError(f"A class cannot learn from {min(samples)} images; give every class at least one.")

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

    def task_of(self, position: int) -> int:
        """The task (from 0) that brings the class at this position.

        >>> [Stream((2, 0, 1), (2, 1)).task_of(p) for p in range(3)]
        [0, 0, 1]
        """
        if not 0 <= position < self.classes:
            raise IndexError(f"position {position} is outside 0..{self.classes - 1}")
        return bisect_right(self.offsets, position) - 1

    def range_of(self, task: int) -> range:
        """The positions that a task (from 0) brings.

        >>> Stream((2, 0, 1), (2, 1)).range_of(1)
        range(2, 3)
        """
        if not 0 <= task < self.tasks:
            raise IndexError(f"task {task} is outside 0..{self.tasks - 1}")
        start = sum(self.sizes[:task])
        return range(start, start + self.sizes[task])

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers that ``json.dumps`` takes; ``from_json`` turns them back.

        >>> Stream((1, 0), (1, 1)).to_json()
        {'class_order': [1, 0], 'sizes': [1, 1], 'names': [], 'samples': None}
        """
        return {
            "class_order": list(self.class_order),
            "sizes": list(self.sizes),
            "names": list(self.names),
            "samples": None if self.samples is None else list(self.samples),
        }

    @classmethod
    def from_json(cls, block: Mapping[str, Any]) -> Stream:
        """The stream that ``to_json`` described; what is unknown is ignored, so that newer files still load."""
        missing = [key for key in ("class_order", "sizes") if key not in block]
        if missing:
            raise OneaError(f"A stream's description lacks {' and '.join(missing)}; write it again with to_json().")
        samples = block.get("samples")
        return cls(
            class_order=tuple(int(c) for c in block["class_order"]),
            sizes=tuple(int(n) for n in block["sizes"]),
            names=tuple(str(name) for name in block.get("names") or ()),
            samples=None if samples is None else tuple(int(n) for n in samples),
        )


def class_order(classes: int, seed: int) -> tuple[int, ...]:
    """A seeded permutation of the classes: position -> original class id.

    >>> class_order(5, seed=1)
    (2, 1, 4, 0, 3)
    """
    at_least_one("classes", classes)
    return tuple(_generator(seed).permutation(classes).tolist())


def arrange(sizes: Sequence[int], order: Order, seed: int) -> tuple[int, ...]:
    """The sizes in the order in which the tasks arrive.

    >>> arrange((36, 23, 14, 9, 6, 4, 3, 2, 2, 1), "shuffled", seed=1)
    (14, 1, 3, 6, 36, 9, 23, 2, 2, 4)
    >>> arrange((1, 3, 2), "descending", seed=1)
    (3, 2, 1)
    """
    return tuple(sizes[i] for i in _task_order(sizes, order, seed))


def natural(
    groups: Sequence[Group], classes: int, order: Order, seed: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    """Class order, sizes and task names of a stream whose tasks are the data's own groups.

    Groups move as a whole; inside a group the classes keep the order they have in the seeded permutation.
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
    """Any stream from one description.

    Args:
        classes: how many classes there are.
        tasks: how many tasks; needed for ``step`` and ``balanced``, otherwise it follows from the sizes or groups.
        kind: where the sizes come from.
        gamma: for ``step``, the smallest task's weight relative to the largest.
        sizes: for ``sizes``, the sizes themselves.
        order: how the tasks arrive; None means shuffled for ``step`` and as given otherwise.
        seed: of the class order and of the shuffle, each drawn afresh.
        groups: for ``natural``, the groups; ignored otherwise, so that a dataset's can always be passed.
        long_tail: mu, to make the images per class long-tailed as well.
        n_max: images of the commonest class; needed with ``long_tail``.

    >>> make_stream(classes=100, tasks=10).sizes
    (14, 1, 3, 6, 36, 9, 23, 2, 2, 4)
    """
    _known("kind", kind, get_args(Kind))
    if sizes and kind != "sizes":
        raise OneaError(f"Task sizes were given to a stream of kind '{kind}'; drop them or choose the kind 'sizes'.")
    order = order or ("shuffled" if kind == "step" else "given")
    samples = _samples(long_tail, n_max, classes)
    if kind == "natural":
        ids, ordered, names = natural(groups, classes, order, seed)
        _same_tasks(tasks, len(ordered), "natural groups")
        return Stream(ids, ordered, names, samples)
    given = _sizes(kind, classes, tasks, gamma, sizes or ())
    return Stream(class_order(classes, seed), arrange(given, order, seed), (), samples)


def _sizes(kind: Kind, classes: int, tasks: int | None, gamma: float, sizes: Sequence[int]) -> tuple[int, ...]:
    if kind == "sizes":
        check_sizes(sizes, classes)
        _same_tasks(tasks, len(sizes), "task sizes")
        return tuple(sizes)
    if tasks is None:
        raise OneaError(f"A stream of kind '{kind}' needs to know how many tasks to make; give a number of tasks.")
    return balanced(classes, tasks) if kind == "balanced" else step_imbalanced(classes, tasks, gamma)


def _samples(mu: float | None, n_max: int | None, classes: int) -> tuple[int, ...] | None:
    if mu is None:
        return None
    if n_max is None:
        raise OneaError("A long tail starts from the images of the commonest class; give n_max as well.")
    return long_tailed(n_max, classes, mu)


def _task_order(sizes: Sequence[int], order: Order, seed: int) -> list[int]:
    """Indices into ``sizes`` in the order of the tasks; shuffling indices moves them just as it would the sizes."""
    _known("order", order, get_args(Order))
    ordered = list(range(len(sizes)))
    if order == "shuffled":
        _generator(seed).shuffle(ordered)
    elif order == "descending":
        ordered.sort(key=lambda i: -sizes[i])  # stable: equal sizes stay as they were
    return ordered


def _check_groups(groups: Sequence[Group], classes: int) -> None:
    if not groups:
        raise OneaError("This data has no natural groups; choose the kind 'step', 'balanced' or 'sizes' instead.")
    empty = [g.name for g in groups if not g.classes]
    if empty:
        raise OneaError(f"The group '{empty[0]}' has no classes; drop it or give it some.")
    owners = Counter(c for g in groups for c in g.classes)
    twice = [c for c, n in owners.items() if n > 1]
    if twice:
        names = " and ".join(f"'{g.name}'" for g in groups if twice[0] in g.classes)
        raise OneaError(f"Class {twice[0]} is listed more than once, in {names}; leave it in one group, once.")
    unknown = sorted(c for c in owners if not 0 <= c < classes)
    if unknown:
        raise OneaError(f"The groups name class {unknown[0]}, but classes run from 0 to {classes - 1}; correct it.")
    orphans = [c for c in range(classes) if c not in owners]
    if orphans:
        more = f" and {len(orphans) - 1} more" if len(orphans) > 1 else ""
        raise OneaError(f"Class {orphans[0]}{more} is in no group; put every class into one.")


def _same_tasks(asked: int | None, found: int, source: str) -> None:
    if asked is not None and asked != found:
        raise OneaError(f"{asked} tasks were asked for but there are {found} {source}; drop the number of tasks.")


def _known(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise OneaError(f"There is no {what} '{value}'; {did_you_mean(value, known)}")


def _generator(seed: int) -> np.random.RandomState:
    if not 0 <= seed < 2**32:
        raise OneaError(f"The seed cannot be {seed}; choose a whole number from 0 to {2**32 - 1}.")
    return np.random.RandomState(seed)


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
            f"Cannot read '{truncate(text)}' as task sizes; write whole numbers separated by commas, such as 36,1,14."
        ) from None
    check_sizes(sizes, sum(sizes) if classes is None else classes)
    return sizes


def check_sizes(sizes: Sequence[int], classes: int) -> None:
    """Complain unless every task has a class and together they have them all."""
    if not sizes:
        raise OneaError("A stream needs at least one task; give at least one task size.")
    if min(sizes) < 1:
        raise OneaError(f"A task cannot have {truncate(min(sizes))} classes; give every task at least one.")
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
        raise OneaError(f"{truncate(classes)} classes are too many; give at most {MOST_CLASSES:,}.")
    if tasks > classes:
        raise OneaError(
            f"{classes} classes cannot fill {truncate(tasks)} tasks, as each task needs at least one; "
            f"ask for {classes} tasks or fewer."
        )


def at_least_one(name: str, value: int) -> None:
    """Complain about a number that must be positive."""
    if value < 1:
        raise OneaError(f"{name} must be at least 1, not {truncate(value)}; give a positive whole number.")
