# SPDX-License-Identifier: Apache-2.0
"""Calibration of probabilities: the temperature among the classes, and the threshold and slope of *unknown*."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.classifiers.familiarity import (
    NEAREST_CLASSES,
    NUM_SIGNALS,
    ClassSpread,
    SignalScaler,
    fit_logistic_regression,
)
from onea.classifiers.gaussian import MANY_CLASSES
from onea.classifiers.statistics import ClassStatistics
from onea.classifiers.validation import leave_classes_out, leave_folds_out, sample_for_validation
from onea.model.held_out import Accuracy, newest_of_each_class, remove_held_out
from onea.model.state import State

MIN_IMAGES = 20  # held-out images; with fewer, the threshold is fitted to training images as well
MIN_SLOPE = 2.25
"""Steepness of the probability of *unknown*, per standard deviation of the familiarity of known images.

If that familiarity is normal and 5 % of known images are predicted as *unknown*, their mean probability of *unknown* is
just below a tenth. A smaller slope would make all predictions for known images too uncertain.
"""
PRIOR_TEMPERATURE = 0.05
_TEMPERATURES = torch.logspace(-3, 0, 121, dtype=torch.float64)
_MAX_SCORES = 2**21  # of all images and classes together, for each temperature
_PRIOR_STRENGTH = 0.1  # added to the loss (in nats) if the temperature is off by a factor of e
_FOLDS = 10  # with 5 folds, classes lose a fifth of their images, which makes images noticeably less familiar
# Photos of a series were taken on one day, photos to predict on other days. If most photos are in series, the
# temperature is therefore fitted in 4 folds, so to images scored without a quarter of their class (research/README.md).
_SERIES_FOLDS, _MANY_IN_SERIES = 4, 0.5
MAX_SIGNALS_PER_CLASS, _MIN_SIGNALS_PER_CLASS, _MAX_SIGNALS = 64, 8, 2048  # images whose signals are stored
_UNDETECTED_SERIES = 0.25  # standard deviations by which images seem too familiar if all are in series
_MIN_VARIANCE = 1e-12
_MAX_SAMPLE = 128  # images of many classes, on which it is measured how signals change


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    """The temperature under which ``softmax(scores / temperature)`` gives these labels the highest likelihood.

    A weak prior keeps it finite and positive if there is only one class or no mistake.

    >>> round(fit_temperature(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)), 3)
    0.05
    """
    if (step := -(-scores.numel() // _MAX_SCORES)) > 1:
        scores, labels = scores[::step], labels[::step]
    exact = scores.double()
    losses = torch.stack([F.cross_entropy(exact / value, labels, reduction="sum") for value in _TEMPERATURES])
    losses = losses + _PRIOR_STRENGTH * (_TEMPERATURES / PRIOR_TEMPERATURE).log() ** 2
    return float(_TEMPERATURES[losses.argmin()])


def combine_temperatures(old: float, old_count: int, new: float, new_count: int) -> float:
    """Geometric mean of two temperatures, weighted by the numbers of images that they were fitted on.

    >>> round(combine_temperatures(0.1, 30, 0.01, 10), 4)
    0.0562
    """
    if old_count + new_count == 0:
        return new
    return math.exp((old_count * math.log(old) + new_count * math.log(new)) / (old_count + new_count))


def fit_threshold(familiarity: Tensor, unknown_rate: float) -> float:
    """The threshold of familiarity below which at most this share of known images lies.

    It is a conformal quantile: of n known images the k-th smallest familiarity, k = floor(rate (n + 1)), so that the
    next known image lies below it with a probability of at most the rate. With too few images, k is 1.

    >>> fit_threshold(torch.arange(99.0), 0.05)
    4.0
    """
    if not len(familiarity):
        return -math.inf
    k = max(1, math.floor(unknown_rate * (len(familiarity) + 1)))
    return float(familiarity.sort().values[k - 1])


def min_unknown_rate(images: int) -> float:
    """The lowest share of known images predicted as *unknown* that this number of held-out images can guarantee.

    >>> min_unknown_rate(99)
    0.01
    """
    return 1 / (images + 1)


def fit_slope(known: Tensor, left_out: Tensor) -> float:
    """The slope, over familiarity, of the log-odds that an image shows none of the classes; it is negative.

    It is fitted by logistic regression to the familiarity of known images and of images of left-out classes, both
    groups with the same weight. A weak prior keeps it finite if the groups do not overlap. Its magnitude is at least
    ``MIN_SLOPE`` per standard deviation of known images, and exactly that for a single class, which cannot be left out.

    >>> fit_slope(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([-3.0, -2.0, -1.0, 0.0])) < -3
    True
    >>> fit_slope(torch.tensor([-1.0, 0.0, 1.0]), torch.empty(0))
    -2.25
    """
    steepness = MIN_SLOPE / (float(known.double().std().clamp_min(1e-12)) if len(known) > 1 else 1.0)
    if not len(known) or not len(left_out):
        return -steepness
    values = torch.cat([known, left_out]).double()
    mean, std = values.mean(), values.std().clamp_min(1e-12)
    negative, positive = (((part.double() - mean) / std)[:, None] for part in (left_out, known))
    weights, _ = fit_logistic_regression(negative, positive, torch.zeros(1), 1e-3)
    return min(float(weights / std), -steepness)


def probabilities(
    scores: Tensor, familiarity: Tensor, temperature: float, threshold: float, slope: float
) -> tuple[Tensor, Tensor]:
    """The probability of each class, ``[N, classes]``, and of none of them, ``[N]``; together they add up to 1.

    The probability of none of them is one half at the threshold, and larger below it.

    >>> classes, none = probabilities(torch.zeros(2, 3), torch.tensor([1.0, 2.0]), 0.1, 1.0, -2.0)
    >>> none.round(decimals=2), (classes.sum(1) + none).allclose(torch.ones(2))
    (tensor([0.5000, 0.1200]), True)
    """
    none = torch.sigmoid(slope * (familiarity - threshold))
    return torch.softmax(scores / temperature, dim=1) * (1 - none)[:, None], none


def calibrate(
    state: State,
    before: ClassStatistics,
    views: Tensor,
    rows: Tensor,
    groups: Tensor,
    untrained: Tensor,
    earlier: State | None = None,
) -> tuple[State, Accuracy]:
    """Fit probabilities and familiarity to the images of the last update; also return their cross-validated accuracy.

    Each image is scored by statistics without its series; of many classes, by those of the nearest ones. Of very many
    images, a sample is scored.

    Args:
        state: the model after the update.
        before: the statistics without these images.
        views: features of the images, ``[views, N, width]``.
        rows: classes of the images.
        groups: series of the images.
        untrained: which images the adapter was not trained on, ``bool [N]``, to which the temperature is fitted; all
            False if the adapter was trained on no image, and the temperature is fitted to all images.
        earlier: the model before the update; None if its signals should stay unchanged.
    """
    updated, sampled = rows.unique(), sample_for_validation(rows, groups)
    if not bool(sampled.all()):
        before = before.add(views[:, ~sampled].flatten(0, 1), rows[~sampled].repeat(len(views)))
        views, rows, groups, untrained = views[:, sampled], rows[sampled], groups[sampled], untrained[sampled]
    features, all_rows, spread = views[0], rows, None
    if len(state.classes) > MANY_CLASSES:
        near = state.statistics.nearest_classes(rows.unique(), NEAREST_CLASSES)
        before, rows = before.select_classes(near), torch.searchsorted(near, rows)
        spread = ClassSpread.of(state.statistics)  # not of ``before``, in which new classes are empty
    scores, signals = torch.empty(len(rows), before.classes), torch.empty(len(rows), NUM_SIGNALS)
    for fold, others in leave_folds_out(before, views, rows, groups, _FOLDS):
        scores[fold], signals[fold] = _scores_and_signals(state, others, features[fold], spread)
    accuracy = Accuracy.from_predictions(scores.argmax(1), rows)
    old_signals = state.held_out_signals
    if earlier is not None:
        drift = _signals_of_other_classes(earlier, updated), _signals_of_other_classes(state, updated)
        old_signals = _follow_drift(old_signals, *drift)
    new_signals = _correct_for_training(signals, rows, groups, untrained)
    held_out = _prepend(new_signals, all_rows, old_signals, state.held_out_signal_rows)
    left_out = state.left_out_signals, state.left_out_signal_rows
    for known, unknown, others in leave_classes_out(before, views, rows, groups, untrained):
        of_known, of_unknown = (
            _scores_and_signals(state, others, features[part], spread)[1] for part in (known, unknown)
        )
        # Signals depend on the number of classes, so the scale comes from images scored by the same statistics.
        scale = SignalScaler(of_known if len(of_known) >= MIN_IMAGES else held_out[0])
        left_out = _prepend(scale(of_unknown), all_rows[unknown], *left_out)
    if _share_in_series(rows, groups) > _MANY_IN_SERIES:
        for fold, others in leave_folds_out(before, views, rows, groups, _SERIES_FOLDS):
            scores[fold] = state.classifier.fit(others)(features[fold])
    fitted = untrained if untrained.any() else torch.ones_like(untrained)
    temperature = fit_temperature(scores[fitted], rows[fitted])
    count = int(fitted.sum()) if len(state.classes) > 1 else 0  # with one class, all probabilities are 1
    calibrated = dataclasses.replace(
        state,
        held_out_signals=held_out[0],
        held_out_signal_rows=held_out[1],
        left_out_signals=left_out[0],
        left_out_signal_rows=left_out[1],
        temperature=combine_temperatures(state.temperature, state.calibration_images, temperature, count),
        calibration_images=state.calibration_images + count,
    )
    return calibrated, accuracy


def _signals_of_other_classes(state: State, rows: Tensor) -> Tensor:
    """Signals of the stored held-out images of all classes but these."""
    held_out = state.held_out
    if len(state.classes) > MANY_CLASSES:
        classes = held_out.rows.unique()
        held_out = held_out[torch.isin(held_out.rows, classes[:: -(-len(held_out.rows) // _MAX_SAMPLE)])]
    others, features, classes = remove_held_out(state.statistics, held_out)
    chosen = ~torch.isin(classes, rows)
    if not bool(chosen.any()):
        return torch.empty(0, NUM_SIGNALS)
    return _scores_and_signals(state, others, features[chosen])[1]


def _scores_and_signals(
    state: State, statistics: ClassStatistics, features: Tensor, spread: ClassSpread | None = None
) -> tuple[Tensor, Tensor]:
    """Scores and signals of images by the classifier of the state, fitted to other statistics."""
    scores = state.classifier.fit(statistics)(features)
    return scores, dataclasses.replace(state, statistics=statistics).signals(spread)(features, scores)


def _correct_for_training(signals: Tensor, rows: Tensor, groups: Tensor, untrained: Tensor) -> Tensor:
    """Signals as if the adapter had been trained on none of the images.

    Held-out images alone would be too few for the 5 % quantile, so training images are used as well: their signals are
    shifted by the difference of the means. As some series are not detected, some held-out images resemble training
    images. Therefore all signals are reduced further, in proportion to the share of images in series.

    >>> trained, unseen = torch.tensor([[4.0], [6.0]]), torch.tensor([[1.0], [3.0]])
    >>> signals, untrained = torch.cat([trained, unseen]), torch.tensor([False, False, True, True])
    >>> _correct_for_training(signals, torch.zeros(4, dtype=torch.int64), torch.arange(4), untrained).tolist()
    [[1.0], [3.0], [1.0], [3.0]]
    """
    if not bool(untrained.any()) or bool(untrained.all()):
        return signals
    shift = (signals[untrained].mean(0) - signals[~untrained].mean(0)).clamp_max(0)
    shifted = torch.where(untrained[:, None], signals, signals + shift)
    return shifted - _UNDETECTED_SERIES * _share_in_series(rows, groups) * shifted.std(0)


def _share_in_series(rows: Tensor, groups: Tensor) -> float:
    """The share of images that have another image of their class in their series.

    >>> _share_in_series(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 0]))
    0.5
    """
    _, series, sizes = torch.stack([rows, groups], 1).unique(dim=0, return_inverse=True, return_counts=True)
    return float((sizes[series] > 1).double().mean())


def _follow_drift(signals: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Signals of earlier updates, transformed as those of the stored held-out images changed in this update.

    New classes make images less distinct, and the adapter may have changed.
    """
    return _match_moments(signals, before, after) if min(len(before), len(after)) >= MIN_IMAGES else signals


def _match_moments(signals: Tensor, sample: Tensor, target: Tensor) -> Tensor:
    """Signals shifted and scaled so that a sample would get the mean and variance of a target.

    The variance of a small target is shrunk towards that of the sample.

    >>> sample = torch.tensor([[-1.0], [1.0]])
    >>> _match_moments(torch.tensor([[0.0], [2.0]]), sample, sample + 5.0).tolist()
    [[5.0], [7.0]]
    """
    before = sample.var(0)
    after = (len(target) * target.var(0) + MIN_IMAGES * before) / (len(target) + MIN_IMAGES)
    scale = torch.where(before > _MIN_VARIANCE, after / before.clamp_min(_MIN_VARIANCE), 1.0).sqrt()
    return (signals - sample.mean(0)) * scale + target.mean(0)


def _prepend(signals: Tensor, rows: Tensor, earlier: Tensor, earlier_rows: Tensor) -> tuple[Tensor, Tensor]:
    """New and earlier signals with their classes, newest first; the oldest of each class are dropped."""
    signals, rows = torch.cat([signals, earlier]), torch.cat([rows, earlier_rows])
    if not len(rows):
        return signals, rows
    kept = newest_of_each_class(rows, max_signals_per_class(len(rows.unique())))
    return signals[kept], rows[kept]


def max_signals_per_class(classes: int) -> int:
    """The number of images of a class whose signals are stored.

    >>> [max_signals_per_class(classes) for classes in (1, 40, 200, 1000)]
    [64, 51, 10, 8]
    """
    return max(_MIN_SIGNALS_PER_CLASS, min(MAX_SIGNALS_PER_CLASS, _MAX_SIGNALS // max(1, classes)))
