# SPDX-License-Identifier: Apache-2.0
"""The losses of One-A's training."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def contrastive(features: Tensor, labels: Tensor, margin: float = 0.07) -> Tensor:
    """Pull images of one class together, push images of different classes below a cosine ``margin`` (Eq. 17).

    Means over all ordered pairs of the batch, positive and negative pairs apart; the mean of no pairs is zero, so a
    batch of one class, of all-different classes, or of one image is well defined.
    """
    unit = F.normalize(features.float(), dim=1)
    cosine = unit @ unit.T
    same = labels[:, None] == labels[None, :]
    pairs = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return _mean_over(1 - cosine, same & pairs) + _mean_over((cosine - margin).clamp_min(0), ~same)


def _mean_over(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp_min(1)


def contrastive_share(classes: int, smallest: float = 0.01, largest: float = 0.1, decay: float = 2.3979) -> float:
    """Weight of the contrastive term for a task of this many classes: large for small tasks (Eq. 18).

    >>> [round(contrastive_share(n), 4) for n in (1, 2, 3, 36)]
    [0.1, 0.0182, 0.0107, 0.01]
    """
    return smallest + (largest - smallest) * math.exp(-decay * (classes - 1))
