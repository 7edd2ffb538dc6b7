# SPDX-License-Identifier: Apache-2.0
"""Calibration: the temperature of probabilities, and when an image is too far from every class."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.classifiers.familiarity import NUM_SIGNALS, SignalScaler, fit_logistic_regression
from onea.classifiers.statistics import ClassStatistics
from onea.classifiers.validation import leave_classes_out, leave_folds_out
from onea.model.held_out import Measured, taken_out
from onea.model.state import State

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
    weights, _ = fit_logistic_regression(strange, usual, torch.zeros(1), 1e-3)
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


ENOUGH = 20  # known images that say where 5 % lie; with fewer held out, training images have a say too
_FOLDS = 10  # a tenth fewer images of a class than in the end; with a fifth fewer, they are noticeably less familiar
# Photos of a series were taken on one day, and people ask about photos of other days. Where most photos are in series,
# probabilities are fitted to images judged without a quarter of their class, not a tenth (research/README.md).
_FOLDS_OF_SERIES, _MOST = 4, 0.5
# How many are kept of one class; so that many classes take little room, of all; and nevertheless of each.
MOST_MARGINS, _ALL_MARGINS, _LEAST_MARGINS = 64, 2048, 8
_MISSED = 0.25  # spreads by which known images look too familiar where all come in series
_TINY = 1e-12  # variance of a signal that says nothing


def calibrated(
    state: State,
    before: ClassStatistics,
    views: Tensor,
    rows: Tensor,
    groups: Tensor,
    honest: Tensor,
    earlier: State | None = None,
) -> tuple[State, Measured]:
    """The same state with probabilities and familiarity fitted to the images of its last update.

    And how many of these images are right by statistics without their series: cross-validation.

    Args:
        state: what was learned.
        before: the statistics without these images.
        views: their features, ``[views, N, width]``.
        rows: their classes.
        groups: their series.
        honest: images that the adapter was not trained on, ``bool [N]``, where it was trained on others. Each image is
            judged by statistics without its series; probabilities are fitted to the honest ones alone.
        earlier: the state before the update, if it was measured alike.
    """
    features = views[0]
    scores, signals = torch.empty(len(rows), len(state.classes)), torch.empty(len(rows), NUM_SIGNALS)
    for here, others in leave_folds_out(before, views, rows, groups, _FOLDS):
        scores[here], signals[here] = _judged(state, others, features[here])
    validated = Measured.of(scores.argmax(1), rows)
    margins = state.margins
    if earlier is not None:
        margins = _as_of_now(margins, _watched(earlier, rows), _watched(state, rows))
    margins, margin_rows = _newest(_as_if_unseen(signals, rows, groups, honest), rows, margins, state.margin_rows)
    hidden, hidden_rows = state.hidden, state.hidden_rows
    for here, out, others in leave_classes_out(before, views, rows, groups, honest):
        usual, strange = (_judged(state, others, features[chosen])[1] for chosen in (here, out))
        # Signals depend on the number of classes, so these are compared with those of images judged by the same ones.
        scale = SignalScaler(usual if len(usual) >= ENOUGH else margins)
        hidden, hidden_rows = _newest(scale(strange), rows[out], hidden, hidden_rows)
    if _share_in_series(rows, groups) > _MOST:
        for here, others in leave_folds_out(before, views, rows, groups, _FOLDS_OF_SERIES):
            scores[here] = state.classifier.fit(others)(features[here])
    fair = honest if honest.any() else torch.ones_like(honest)
    temperature = fit_temperature(scores[fair], rows[fair])
    told = int(fair.sum()) if len(state.classes) > 1 else 0  # of one class, all probabilities are one
    fitted = dataclasses.replace(
        state,
        margins=margins,
        margin_rows=margin_rows,
        hidden=hidden,
        hidden_rows=hidden_rows,
        temperature=combined_temperature(state.temperature, state.calibrated_on, temperature, told),
        calibrated_on=state.calibrated_on + told,
    )
    return fitted, validated


def _watched(state: State, rows: Tensor) -> Tensor:
    """Signals of images that were held out of updates, of all classes but these, judged by all others."""
    others, features, shown = taken_out(state.statistics, state.held_out)
    here = ~torch.isin(shown, rows)
    return _judged(state, others, features[here])[1] if bool(here.any()) else torch.empty(0, NUM_SIGNALS)


def _judged(state: State, known: ClassStatistics, features: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of images, and the signals of their familiarity, by other statistics than those of the state."""
    scores = state.classifier.fit(known)(features)
    return scores, dataclasses.replace(state, statistics=known).signals()(features, scores)


def _as_if_unseen(signals: Tensor, rows: Tensor, groups: Tensor, honest: Tensor) -> Tensor:
    """Signals as if the adapter had been trained on no image: moved down by as much as those held out are lower.

    Those alone would be too few to tell where the least familiar twentieth of all images begins. Where images come in
    series, some are taken for images of different series, and an image that is held out has siblings among those
    trained on; so all are moved down a little more.

    >>> trained, unseen = torch.tensor([[4.0], [6.0]]), torch.tensor([[1.0], [3.0]])
    >>> signals, honest = torch.cat([trained, unseen]), torch.tensor([False, False, True, True])
    >>> _as_if_unseen(signals, torch.zeros(4, dtype=torch.int64), torch.arange(4), honest).tolist()
    [[1.0], [3.0], [1.0], [3.0]]
    """
    if not bool(honest.any()) or bool(honest.all()):
        return signals
    shift = (signals[honest].mean(0) - signals[~honest].mean(0)).clamp_max(0)
    moved = torch.where(honest[:, None], signals, signals + shift)
    return moved - _MISSED * _share_in_series(rows, groups) * moved.std(0)


def _share_in_series(rows: Tensor, groups: Tensor) -> float:
    """The share of images that have another one of their class in their series.

    >>> _share_in_series(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 0]))
    0.5
    """
    _, series, sizes = torch.stack([rows, groups], 1).unique(dim=0, return_inverse=True, return_counts=True)
    return float((sizes[series] > 1).double().mean())


def _as_of_now(margins: Tensor, then: Tensor, now: Tensor) -> Tensor:
    """Signals that were measured in earlier updates, changed as those of watched images have.

    Classes that came since make images less clear, and the adapter may have changed.
    """
    return _moved(margins, then, now) if min(len(then), len(now)) >= ENOUGH else margins


def _moved(signals: Tensor, sample: Tensor, target: Tensor) -> Tensor:
    """Signals, shifted and stretched so that those of a sample would get the mean and the spread of others.

    The spread of few others is drawn towards that of the sample.

    >>> sample = torch.tensor([[-1.0], [1.0]])
    >>> _moved(torch.tensor([[0.0], [2.0]]), sample, sample + 5.0).tolist()
    [[5.0], [7.0]]
    """
    before = sample.var(0)
    after = (len(target) * target.var(0) + ENOUGH * before) / (len(target) + ENOUGH)
    stretch = torch.where(before > _TINY, after / before.clamp_min(_TINY), 1.0).sqrt()
    return (signals - sample.mean(0)) * stretch + target.mean(0)


def _newest(values: Tensor, rows: Tensor, earlier: Tensor, earlier_rows: Tensor) -> tuple[Tensor, Tensor]:
    """The values that are kept, newest first, and their classes."""
    values, rows = torch.cat([values, earlier]), torch.cat([rows, earlier_rows])
    if not len(rows):
        return values, rows
    classes = rows.unique()
    most = most_margins(len(classes))
    kept = torch.cat([(rows == row).nonzero()[:most, 0] for row in classes]).sort().values
    return values[kept], rows[kept]


def most_margins(classes: int) -> int:
    """The number of held-out images of a class whose signals are kept.

    >>> [most_margins(classes) for classes in (1, 40, 200, 1000)]
    [64, 51, 10, 8]
    """
    return max(_LEAST_MARGINS, min(MOST_MARGINS, _ALL_MARGINS // max(1, classes)))
