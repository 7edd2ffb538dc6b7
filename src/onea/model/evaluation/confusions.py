# SPDX-License-Identifier: Apache-2.0
"""Which classes held-out images are mistaken for, and which classes are often misclassified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onea.classifiers.statistics import ClassStatistics
from onea.metrics import wilson_interval
from onea.model.held_out import predict_held_out
from onea.model.state import State
from onea.tensors import to_float64

GOOD = 0.9  # share of held-out images that are right where a class is taught enough
_FEWEST = 3  # mistakes; one or two are chance
_SHARE, _TIMES = 0.2, 2  # of all mistakes, and of an even share of them, that end in one class
_NAMED = 3  # classes that the mistakes are of


@dataclass(frozen=True)
class Absorber:
    """A class that many images of others are mistaken for.

    Attributes:
        name: of the class.
        mistakes: images of other classes that are taken for it.
        share: of all mistakes.
        of: the classes that most of them are of.
    """

    name: str
    mistakes: int
    share: float
    of: tuple[str, ...]


@dataclass(frozen=True)
class Misclassified:
    """A class whose images are often taken for others.

    Attributes:
        name: of the class.
        mistakes: images of it that are taken for others.
        images: of it.
        predicted: the class that most of the mistakes end in.
    """

    name: str
    mistakes: int
    images: int
    predicted: str


@dataclass(frozen=True)
class Mistakes:
    """Mistakes among held-out images.

    Attributes:
        images: that were judged.
        mistakes: of them.
        absorbing: classes that a fifth of all mistakes or more end in, and twice as many as if they were spread evenly.
        misclassified: classes with three mistakes or more whose accuracy is below 90 % by more than chance, the worst
            first.
    """

    images: int = 0
    mistakes: int = 0
    absorbing: tuple[Absorber, ...] = ()
    misclassified: tuple[Misclassified, ...] = ()


NO_MISTAKES = Mistakes()


def held_out_mistakes(state: State) -> tuple[Mistakes, set[str]]:
    """Mistakes among the images of a model that were held out of training, and the classes that have such images."""
    answers, rows = predict_held_out(state.classifier, state.statistics, state.held_out)
    return mistakes_of(answers, rows, state.classes), {state.classes[row] for row in rows.unique().tolist()}


def mistakes_of(answers: Tensor, rows: Tensor, names: Sequence[str]) -> Mistakes:
    """Mistakes among images of some classes, both as rows of the names.

    >>> import torch
    >>> found = mistakes_of(torch.tensor([0, 0, 0, 0, 2]), torch.tensor([0, 1, 1, 1, 2]), ["fig", "kiwi", "lemon"])
    >>> found.absorbing
    (Absorber(name='fig', mistakes=3, share=1.0, of=('kiwi',)),)
    >>> found.misclassified
    (Misclassified(name='kiwi', mistakes=3, images=3, predicted='fig'),)
    """
    wrong = answers != rows
    confused = Counter(zip(rows[wrong].tolist(), answers[wrong].tolist(), strict=True)).most_common()
    images, total = Counter(rows.tolist()), int(wrong.sum())
    lost, taken = Counter[int](), Counter[int]()
    for (row, answer), count in confused:
        lost[row] += count
        taken[answer] += count
    enough = max(_SHARE, _TIMES / max(1, len(names))) * total
    absorbing = []
    for answer, count in taken.most_common():
        if count >= max(_FEWEST, enough):
            of = [names[row] for (row, to), _ in confused if to == answer]
            absorbing.append(Absorber(names[answer], count, count / total, tuple(of[:_NAMED])))
    misclassified = [
        Misclassified(names[row], count, images[row], next(names[to] for (own, to), _ in confused if own == row))
        for row, count in lost.items()
        if count >= _FEWEST and wilson_interval(images[row] - count, images[row])[1] < GOOD
    ]
    misclassified.sort(key=lambda one: (-one.mistakes / one.images, one.name))
    return Mistakes(len(rows), total, tuple(absorbing), tuple(misclassified))


NEAREST = 10  # classes that each class is compared with in an answer
_CELLS = 1 << 20  # pairs of classes whose distance is held at a time


@dataclass(frozen=True)
class Nearest:
    """The classes that each class overlaps most with, never more than ``NEAREST``.

    Attributes:
        rows: of these classes, ``[C, K]``, the largest overlap first.
        overlap: with them, ``[C, K]``.
    """

    rows: Tensor
    overlap: Tensor

    def pairs(self, least: float) -> dict[tuple[int, int], float]:
        """Pairs of rows that overlap at least so much; the smaller row comes first."""
        close = self.overlap >= least
        rows, others, shares = close.nonzero()[:, 0].tolist(), self.rows[close].tolist(), self.overlap[close].tolist()
        found: dict[tuple[int, int], float] = {}
        for row, other, share in zip(rows, others, shares, strict=True):
            found.setdefault((min(row, other), max(row, other)), share)
        return found


def gaussian_overlap(statistics: ClassStatistics, images: Sequence[int], cells: int = _CELLS) -> Nearest:
    """The share of two classes' photos that would be taken for the other one, of the nearest pairs of classes.

    Each class is a Gaussian with the spread that all share. Between means at a distance ``d``, in units of that spread,
    the share is ``Phi(-d / 2)``. Means of few photos lie too far apart by chance: of the squared distance, ``width``
    times the sum of both ``1 / images`` is chance and is taken off.

    Distances are computed for some classes at a time, ``cells`` of them at once, so memory grows with the number of
    classes and not with its square.
    """
    points = to_float64(statistics.means) @ statistics.whitening()
    chance = statistics.width / torch.tensor(images, dtype=torch.float64).clamp_min(1)
    own = points.square().sum(1) - chance  # a squared distance is what both have of their own less twice the product

    def blocks() -> Iterable[Tensor]:
        size = max(1, cells // max(1, len(points)))
        for part, of_part in zip(points.split(size), own.split(size), strict=True):
            yield 2 * part @ points.T - of_part[:, None] - own

    rows, closeness = _largest(blocks())
    share: Tensor = torch.special.ndtr(-(-closeness).clamp_min(0).sqrt() / 2)
    return Nearest(rows, share)


def nearest(overlap: Tensor) -> Nearest:
    """The largest overlaps of each row of a table of classes by classes."""
    return Nearest(*_largest([overlap]))


def held_out_overlap(scores: Tensor, rows: Tensor) -> Tensor:
    """The share of a class's photos (row) with a higher score for another class (column), ``[C, C]``.

    >>> held_out_overlap(torch.tensor([[0.9, 0.1], [0.2, 0.3], [0.1, 0.9]]), torch.tensor([0, 0, 1]))
    tensor([[0.0000, 0.5000],
            [0.0000, 0.0000]], dtype=torch.float64)
    """
    nearer = (scores > scores.gather(1, rows[:, None])).double()
    total = torch.zeros(scores.shape[1], scores.shape[1], dtype=torch.float64).index_add(0, rows, nearer)
    return total / torch.bincount(rows, minlength=scores.shape[1]).clamp_min(1)[:, None]


def _largest(blocks: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Columns and values of the largest of each row, that on the diagonal left out, from some rows at a time."""
    columns, values, start = [], [], 0
    for block in blocks:
        own = torch.arange(start, start + len(block))[:, None]
        found = block.scatter(1, own, -torch.inf).topk(min(NEAREST, block.shape[1] - 1), dim=1)
        columns.append(found.indices)
        values.append(found.values)
        start += len(block)
    return torch.cat(columns), torch.cat(values)
