# SPDX-License-Identifier: Apache-2.0
"""Which classes held-out images are mistaken for, and which classes are often misclassified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from onea.metrics import wilson_interval
from onea.model.rolling import answered
from onea.model.state import State

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
        taken_for: the class that most of the mistakes end in.
    """

    name: str
    mistakes: int
    images: int
    taken_for: str


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
    answers, rows = answered(state.classifier, state.statistics, state.held_out)
    return mistakes_of(answers, rows, state.classes), {state.classes[row] for row in rows.unique().tolist()}


def mistakes_of(answers: Tensor, rows: Tensor, names: Sequence[str]) -> Mistakes:
    """Mistakes among images of some classes, both as rows of the names.

    >>> import torch
    >>> found = mistakes_of(torch.tensor([0, 0, 0, 0, 2]), torch.tensor([0, 1, 1, 1, 2]), ["fig", "kiwi", "lemon"])
    >>> found.absorbing
    (Absorber(name='fig', mistakes=3, share=1.0, of=('kiwi',)),)
    >>> found.misclassified
    (Misclassified(name='kiwi', mistakes=3, images=3, taken_for='fig'),)
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
