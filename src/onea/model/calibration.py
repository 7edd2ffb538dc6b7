# SPDX-License-Identifier: Apache-2.0
"""Calibration: the temperature of probabilities, and when an image is too far from every class."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.classifiers.logistic import fit_log_odds

# In spreads of the familiarity of known images. Where that is normal and 5 % of them are to be called unknown, their
# mean chance of none is just below a tenth; a gentler slope would make all answers about known images modest.
LEAST_SLOPE = 2.25
PRIOR_TEMPERATURE = 0.05  # where a fit without evidence stays
_TEMPERATURES = torch.logspace(-3, 0, 121, dtype=torch.float64)
_PRIOR_STRENGTH = 0.1  # a tenth of what one image says when the temperature is off by a factor of e


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


def lowest_rate(known: Tensor) -> float:
    """The lowest share of known images below a threshold that these margins of known images can promise.

    >>> lowest_rate(torch.arange(99.0))
    0.01
    """
    return 1 / (len(known) + 1)


def fit_slope(known: Tensor, hidden: Tensor) -> float:
    """Slope of the log-odds that an image is of no class, by its familiarity; negative.

    Of a logistic regression between familiarities of known images and of images whose class was hidden from the model;
    both kinds weigh the same. A weak prior keeps the slope finite where they do not overlap. It is at least
    ``LEAST_SLOPE`` in units of the spread among known images: also where no class can be hidden, because there is only
    one.

    >>> fit_slope(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([-3.0, -2.0, -1.0, 0.0])) < -3
    True
    >>> fit_slope(torch.tensor([-1.0, 0.0, 1.0]), torch.empty(0))
    -2.25
    """
    least = LEAST_SLOPE / (float(known.double().std().clamp_min(1e-12)) if len(known) > 1 else 1.0)
    if not len(known) or not len(hidden):
        return -least
    values = torch.cat([known, hidden]).double()
    middle, spread = values.mean(), values.std().clamp_min(1e-12)
    strange, usual = (((part.double() - middle) / spread)[:, None] for part in (hidden, known))
    weights, _ = fit_log_odds(strange, usual, torch.zeros(1), 1e-3)
    return min(float(weights / spread), -least)


def distribution(
    scores: Tensor, familiarity: Tensor, temperature: float, threshold: float, slope: float
) -> tuple[Tensor, Tensor]:
    """The probability of each class, ``[N, classes]``, and of none of them, ``[N]``; together they add up to 1.

    None of them has one half at the threshold, so that just the images below it are more probably of no class.

    >>> classes, none = distribution(torch.zeros(2, 3), torch.tensor([1.0, 2.0]), 0.1, 1.0, -2.0)
    >>> none.round(decimals=2), (classes.sum(1) + none).allclose(torch.ones(2))
    (tensor([0.5000, 0.1200]), True)
    """
    none = torch.sigmoid(slope * (familiarity - threshold))
    return torch.softmax(scores / temperature, dim=1) * (1 - none)[:, None], none
