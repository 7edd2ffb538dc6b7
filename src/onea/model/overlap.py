# SPDX-License-Identifier: Apache-2.0
"""How alike classes are: from their statistics alone, or from photos that were held out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onea.classifiers.statistics import ClassStatistics
from onea.tensors import to_float64


def gaussian_overlap(statistics: ClassStatistics, images: Sequence[int]) -> Tensor:
    """The share of two classes' photos that would be taken for the other one, ``[C, C]``; 0 on the diagonal.

    Each class is a Gaussian with the spread that all share. Between means at a distance ``d``, in units of that spread,
    the share is ``Phi(-d / 2)``. Means of few photos lie too far apart by chance: of the squared distance, ``width``
    times the sum of both ``1 / images`` is chance and is taken off.
    """
    points = to_float64(statistics.means) @ statistics.whitening()
    chance = statistics.width / torch.tensor(images, dtype=torch.float64).clamp_min(1)
    squared = torch.cdist(points, points).square() - chance[:, None] - chance
    share: Tensor = torch.special.ndtr(-squared.clamp_min(0).sqrt() / 2)
    return share.fill_diagonal_(0)


def held_out_overlap(scores: Tensor, rows: Tensor) -> Tensor:
    """The share of a class's photos (row) with a higher score for another class (column), ``[C, C]``.

    >>> held_out_overlap(torch.tensor([[0.9, 0.1], [0.2, 0.3], [0.1, 0.9]]), torch.tensor([0, 0, 1]))
    tensor([[0.0000, 0.5000],
            [0.0000, 0.0000]], dtype=torch.float64)
    """
    nearer = (scores > scores.gather(1, rows[:, None])).double()
    total = torch.zeros(scores.shape[1], scores.shape[1], dtype=torch.float64).index_add(0, rows, nearer)
    return total / torch.bincount(rows, minlength=scores.shape[1]).clamp_min(1)[:, None]
