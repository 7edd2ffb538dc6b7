# SPDX-License-Identifier: Apache-2.0
"""Misclassified held-out images by class, and the overlap of classes in feature space."""

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

GOOD_ACCURACY = 0.9  # on the held-out images of a class; such a class needs no more images
_MIN_MISTAKES = 3  # fewer may be chance
_ABSORBED_SHARE = 0.2  # of all mistakes, that an absorbing class gets at least
_ABSORBED_FACTOR = 2  # multiple of a uniform share of the mistakes that it gets at least
_MAX_NAMED = 3  # true classes of an absorbing class


@dataclass(frozen=True)
class Absorber:
    """A class that many images of other classes are misclassified as.

    Attributes:
        name: name of the class.
        mistakes: number of images of other classes that are predicted as this one.
        share: fraction of all mistakes.
        of: the most frequent true classes of these images.
    """

    name: str
    mistakes: int
    share: float
    of: tuple[str, ...]


@dataclass(frozen=True)
class Misclassified:
    """A class whose images are often misclassified.

    Attributes:
        name: name of the class.
        mistakes: number of misclassified images of the class.
        images: number of images of the class.
        predicted: the most frequent wrong prediction.
    """

    name: str
    mistakes: int
    images: int
    predicted: str


@dataclass(frozen=True)
class Mistakes:
    """Misclassified held-out images.

    Attributes:
        images: number of images that were classified.
        mistakes: number of images that were misclassified.
        absorbing: classes that receive a fifth of all mistakes or more, and twice a uniform share.
        misclassified: classes with three mistakes or more and an accuracy significantly below 90 %, the worst first.
    """

    images: int = 0
    mistakes: int = 0
    absorbing: tuple[Absorber, ...] = ()
    misclassified: tuple[Misclassified, ...] = ()


NO_MISTAKES = Mistakes()


def held_out_mistakes(state: State) -> tuple[Mistakes, set[str]]:
    """Mistakes among the stored held-out images of a model, and the classes that have such images."""
    predicted, rows = predict_held_out(state.classifier, state.statistics, state.held_out)
    return count_mistakes(predicted, rows, state.classes), {state.classes[row] for row in rows.unique().tolist()}


def count_mistakes(predicted: Tensor, rows: Tensor, names: Sequence[str]) -> Mistakes:
    """Mistakes by class, from the predicted and the true class of each image as positions in ``names``.

    >>> import torch
    >>> result = count_mistakes(torch.tensor([0, 0, 0, 0, 2]), torch.tensor([0, 1, 1, 1, 2]), ["fig", "kiwi", "lemon"])
    >>> result.absorbing
    (Absorber(name='fig', mistakes=3, share=1.0, of=('kiwi',)),)
    >>> result.misclassified
    (Misclassified(name='kiwi', mistakes=3, images=3, predicted='fig'),)
    """
    wrong = predicted != rows
    confusions = Counter(zip(rows[wrong].tolist(), predicted[wrong].tolist(), strict=True)).most_common()
    images, total = Counter(rows.tolist()), int(wrong.sum())
    by_class, by_prediction = Counter[int](), Counter[int]()
    for (row, answer), count in confusions:
        by_class[row] += count
        by_prediction[answer] += count
    threshold = max(_MIN_MISTAKES, max(_ABSORBED_SHARE, _ABSORBED_FACTOR / max(1, len(names))) * total)
    absorbing = [
        Absorber(
            names[prediction],
            count,
            count / total,
            tuple([names[row] for (row, answer), _ in confusions if answer == prediction][:_MAX_NAMED]),
        )
        for prediction, count in by_prediction.most_common()
        if count >= threshold
    ]
    misclassified = [
        Misclassified(
            names[row], count, images[row], next(names[answer] for (own, answer), _ in confusions if own == row)
        )
        for row, count in by_class.items()
        if count >= _MIN_MISTAKES and wilson_interval(images[row] - count, images[row])[1] < GOOD_ACCURACY
    ]
    misclassified.sort(key=lambda result: (-result.mistakes / result.images, result.name))
    return Mistakes(len(rows), total, tuple(absorbing), tuple(misclassified))


MAX_NEIGHBOURS = 10  # nearest classes of each class
_CELLS = 1 << 20  # pairs of classes whose distances are in memory at a time


@dataclass(frozen=True)
class NearestClasses:
    """The classes that each class overlaps most with, at most ``MAX_NEIGHBOURS``, the largest overlap first.

    Attributes:
        rows: indices of these classes, ``[C, K]``.
        overlap: overlap with them, ``[C, K]``.
    """

    rows: Tensor
    overlap: Tensor

    def pairs(self, threshold: float) -> dict[tuple[int, int], float]:
        """Overlaps that reach a threshold, by pair of rows; the smaller row comes first."""
        row, rank = (self.overlap >= threshold).nonzero(as_tuple=True)
        pairs: dict[tuple[int, int], float] = {}
        triples = zip(row.tolist(), self.rows[row, rank].tolist(), self.overlap[row, rank].tolist(), strict=True)
        for first, second, overlap in triples:
            pairs.setdefault((min(first, second), max(first, second)), overlap)
        return pairs


def gaussian_overlap(statistics: ClassStatistics, images: Sequence[int], cells: int = _CELLS) -> NearestClasses:
    """The share of two classes' images that would be misclassified as the other one, for the nearest pairs of classes.

    Each class is a Gaussian with the pooled covariance. With means at a Mahalanobis distance ``d``, the share is
    ``Phi(-d / 2)``. Means of few images seem too far apart, so the bias of the squared distance is subtracted:
    ``width`` times the sum of both ``1 / images``.

    Blocks of ``cells`` distances are computed at a time, so memory grows with the number of classes and not with its
    square.
    """
    points = ((statistics.means - statistics.means.mean(0)).double() @ statistics.whitening()).float()
    bias = statistics.width / torch.tensor(images).clamp_min(1)
    norms = points.square().sum(1) - bias  # a squared distance is the sum of two norms less twice the product
    size = max(1, cells // max(1, len(points)))
    blocks = (
        2 * part @ points.T - part_norms[:, None] - norms
        for part, part_norms in zip(points.split(size), norms.split(size), strict=True)
    )
    rows, negative_squares = _largest(blocks)
    overlap: Tensor = torch.special.ndtr(-(-negative_squares).clamp_min(0).sqrt() / 2)
    return NearestClasses(rows, overlap)


def nearest_classes(overlap: Tensor) -> NearestClasses:
    """The nearest classes by a matrix of overlaps ``[C, C]``."""
    return NearestClasses(*_largest([overlap]))


def held_out_overlap(scores: Tensor, rows: Tensor) -> Tensor:
    """The share of a class's images (row) with a higher score for another class (column), ``[C, C]``.

    >>> held_out_overlap(torch.tensor([[0.9, 0.1], [0.2, 0.3], [0.1, 0.9]]), torch.tensor([0, 0, 1]))
    tensor([[0.0000, 0.5000],
            [0.0000, 0.0000]], dtype=torch.float64)
    """
    higher = (scores > scores.gather(1, rows[:, None])).double()
    total = torch.zeros(scores.shape[1], scores.shape[1], dtype=torch.float64).index_add(0, rows, higher)
    return total / torch.bincount(rows, minlength=scores.shape[1]).clamp_min(1)[:, None]


def _largest(blocks: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Columns and values of the largest entries of each row off the diagonal, from blocks of rows."""
    columns, values, start = [], [], 0
    for block in blocks:
        diagonal = torch.arange(start, start + len(block))[:, None]
        largest = block.scatter(1, diagonal, -torch.inf).topk(min(MAX_NEIGHBOURS, block.shape[1] - 1), dim=1)
        columns.append(largest.indices)
        values.append(largest.values)
        start += len(block)
    return torch.cat(columns), torch.cat(values)
