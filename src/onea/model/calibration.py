"""How sure is sure: held-out images, the temperature of probabilities, and when an image is too far from everything."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from onea import seeds

FEW = 4  # a class with fewer images holds none out
PRIOR_TEMPERATURE = 0.05  # where a fit without evidence stays
_TEMPERATURES = torch.logspace(-3, 0, 121, dtype=torch.float64)
_PRIOR_STRENGTH = 0.1  # a tenth of what one image says when the temperature is off by a factor of e


def held_out_rows(labels: Tensor, names: Sequence[str], share: float, seed: int, update: int) -> Tensor:
    """Rows kept out of training: this share of each class, at least one where it has four images or more.

    The choice depends on the seed, the update and the class's name, not on the other classes.
    """
    rows = [torch.empty(0, dtype=torch.int64)]
    for index, name in enumerate(names):
        own = (labels == index).nonzero()[:, 0]
        count = max(1, round(share * len(own))) if share > 0 and len(own) >= FEW else 0
        draw = torch.randperm(len(own), generator=seeds.generator(seed, update, f"held out/{name}"))
        rows.append(own[draw[: min(count, len(own) - 2)]])
    return torch.cat(rows).sort().values


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    """The temperature under which ``softmax(scores / temperature)`` is most likely to give these labels.

    A weak prior decides where the labels do not, as with a single class or no mistake at all.

    >>> round(fit_temperature(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)), 3)
    0.05
    """
    exact = scores.double()
    losses = torch.stack([F.cross_entropy(exact / value, labels, reduction="sum") for value in _TEMPERATURES])
    losses = losses + _PRIOR_STRENGTH * (_TEMPERATURES / PRIOR_TEMPERATURE).log() ** 2
    return float(_TEMPERATURES[losses.argmin()])


def combined_temperature(old: float, old_count: int, new: float, new_count: int) -> float:
    """Two temperatures as one: the mean of their logarithms, weighted by the images that each was fitted on.

    >>> round(combined_temperature(0.1, 30, 0.01, 10), 4)
    0.0562
    """
    if old_count + new_count == 0:
        return new
    return math.exp((old_count * math.log(old) + new_count * math.log(new)) / (old_count + new_count))


def margins(scores: Tensor, familiar: Tensor) -> Tensor:
    """How much closer an image is to its nearest class than that class's own images are on average; mostly below 0."""
    best, index = scores.max(1)
    return best - familiar[index]


def threshold(known: Tensor, false_alarms: float) -> float:
    """The margin below which at most this share of known images lies, as these margins of known images tell.

    Conformal: with n of them it is the k-th smallest, k = floor(rate (n + 1)), so that a new known image falls below it
    with a probability of at most the rate; with too few of them, the smallest.

    >>> threshold(torch.arange(99.0), 0.05)
    4.0
    """
    if not len(known):
        return -math.inf
    k = max(1, math.floor(false_alarms * (len(known) + 1)))
    return float(known.sort().values[k - 1])
