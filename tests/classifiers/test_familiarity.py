# SPDX-License-Identifier: Apache-2.0
"""Familiarity: its signals, the classes that are left out, and the weights that are fitted to them."""

from __future__ import annotations

import pytest
import torch

from onea.classifiers import make_classifier
from onea.classifiers.familiarity import (
    NO_BACKGROUND,
    NUM_SIGNALS,
    WEIGHTED_SIGNALS,
    Familiarity,
    Signals,
    SignalScaler,
    fit_logistic_regression,
    fit_weights,
)
from onea.classifiers.statistics import ClassStatistics
from onea.classifiers.validation import leave_classes_out

WIDTH, IMAGES = 8, 12


def images(classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features ``[N, width]`` of well separated classes, and their rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(classes).repeat_interleave(IMAGES)
    centres = 5 * torch.randn(classes, WIDTH, generator=generator)
    return centres[rows] + torch.randn(len(rows), WIDTH, generator=generator), rows


def rounds(known: ClassStatistics, features: torch.Tensor, rows: torch.Tensor, held_out: torch.Tensor | None = None):
    no_images = torch.zeros(len(rows), dtype=torch.bool)
    groups = torch.arange(len(rows))
    return list(leave_classes_out(known, features[None], rows, groups, no_images if held_out is None else held_out))


@pytest.mark.parametrize("old", [0, 2])
def test_every_new_class_is_left_out_once_and_old_classes_never(old):
    features, rows = images(7)
    known = ClassStatistics.empty(WIDTH, directions=4)
    before = known.add(features[rows < old], rows[rows < old]).pad_to(7)
    asked = rows >= old
    times = torch.zeros(7, dtype=torch.int64)
    for tested, left_out, others in rounds(before, features[asked], rows[asked]):
        left = rows[asked][left_out].unique()
        times[left] += 1
        assert not (tested & left_out).any()
        assert left_out.sum() == IMAGES * len(left), "whole classes"
        assert others.classes == 7 - len(left)
        seen = ~tested & ~left_out
        assert others.counts.sum() == IMAGES * old + seen.sum(), "without test images and left-out classes"
    assert times.tolist() == [0] * old + [1] * (7 - old)


def test_only_held_out_images_are_tested():
    features, rows = images(4)
    held_out = torch.arange(len(rows)) % 3 == 0
    for tested, left_out, others in rounds(
        ClassStatistics.empty(WIDTH, directions=4).pad_to(4), features, rows, held_out
    ):
        assert (tested | left_out).eq(held_out).all()
        assert others.counts.sum() == (~held_out & ~torch.isin(rows, rows[left_out])).sum()


def test_a_single_or_known_class_is_not_left_out():
    features, rows = images(1)
    empty = ClassStatistics.empty(WIDTH, directions=4)
    assert rounds(empty.pad_to(1), features, rows) == []
    assert rounds(empty.add(features, rows), features, rows) == []


def signals_of(known: ClassStatistics, features: torch.Tensor, background: torch.Tensor) -> torch.Tensor:
    scores = make_classifier("rgda").fit(known)(features)
    return Signals(known, scores_are_likelihoods=True, background=background)(features, scores)


def test_signals_equal_their_definitions():
    features, rows = images(5)
    known = ClassStatistics.empty(WIDTH, directions=4).add(features, rows)
    asked = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(3)) * 4
    background = asked[:3] + 0.1
    found = signals_of(known, asked, background).double()
    root, means = known.whitening(), known.means.double()
    space, targets = ((part.double() - means.mean(0)) @ root for part in (asked, means))
    wide = torch.eye(WIDTH, dtype=torch.float64) + targets.T @ targets / 5
    anything = torch.distributions.MultivariateNormal(torch.zeros_like(space[0]), wide)
    constant = WIDTH / 2 * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))
    best = make_classifier("rgda").fit(known)(asked).double().amax(1) * WIDTH
    cosines = torch.cosine_similarity(space[:, None], targets[None], dim=2).amax(1)
    nothing = torch.cosine_similarity(space[:, None], ((background.double() - means.mean(0)) @ root)[None], dim=2)
    distances = torch.cdist(space, targets).amin(1)
    outside = anything.log_prob(space) + constant
    softened = make_classifier("rgda").fit(known)(asked).double() * WIDTH / 128
    clear = softened.softmax(1).amax(1).log()
    expected = (cosines, clear, best - outside, -distances, cosines - nothing.amax(1))
    for column, wanted in zip(found.T, expected, strict=True):
        torch.testing.assert_close(column, wanted, rtol=1e-3, atol=1e-3)


def test_without_background_images_the_margin_is_maximal():
    features, rows = images(3)
    known = ClassStatistics.empty(WIDTH, directions=4).add(features, rows)
    assert (signals_of(known, features, torch.empty(0, WIDTH))[:, -1] == NO_BACKGROUND).all()


def sample_signals(seed: int, shift: float = 0.0, column: int = 0) -> torch.Tensor:
    found = torch.randn(200, NUM_SIGNALS, generator=torch.Generator().manual_seed(seed)).abs() * 0.5
    found[:, :-1] = torch.randn(200, NUM_SIGNALS - 1, generator=torch.Generator().manual_seed(seed + 100))
    found[:, column] -= shift
    return found


@pytest.mark.parametrize("informative", range(len(WEIGHTED_SIGNALS)))
def test_the_most_informative_signal_has_the_largest_weight(informative):
    features, rows = images(3)
    known = ClassStatistics.empty(WIDTH, directions=4).add(features, rows)
    signals = Signals(known, scores_are_likelihoods=True, background=torch.empty(0, WIDTH))
    seen, unknown = sample_signals(1), sample_signals(2, shift=3.0, column=informative)
    familiarity = Familiarity(signals, seen, SignalScaler(seen)(unknown))
    weights = familiarity.get_buffer("weights")
    assert int(weights.argmax()) == informative
    assert (weights >= 0).all()
    usual = Familiarity(signals, seen, unknown[:0])
    *defaults, distance = usual.get_buffer("weights").tolist()
    assert min(defaults) > distance == 0, "the default weights, without left-out classes"
    for fitted in (familiarity, usual):
        sums = SignalScaler(seen)(seen)[:, : len(WEIGHTED_SIGNALS)] @ fitted.get_buffer("weights")
        assert sums.std() == pytest.approx(1.5, rel=1e-3)


def test_distant_images_and_images_like_the_background_are_less_familiar():
    features, rows = images(3)
    known = ClassStatistics.empty(WIDTH, directions=4).add(features, rows)
    signals = Signals(known, scores_are_likelihoods=True, background=torch.empty(0, WIDTH))
    familiarity = Familiarity(signals, sample_signals(1), sample_signals(2)[:0])
    usual = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
    far, like_background = usual.clone(), usual.clone()
    far[0, -2], like_background[0, -1] = -6.0, -1.0
    assert familiarity.combine(usual) > familiarity.combine(like_background)
    assert familiarity.combine(usual) > familiarity.combine(far) + 10


@pytest.mark.parametrize("images", [6, 40])
@pytest.mark.parametrize("background", [0, 5])
def test_images_far_from_the_only_class_are_less_familiar(images, background):
    """With a single class there is no other class to compare with, and the cosine is undefined."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.linspace(0.2, 2, WIDTH)  # the class has a large variance in some directions
    taught, others = (spread * torch.randn(n, WIDTH, generator=generator) for n in (images, 100))
    taught -= taught.mean(0)
    only = ClassStatistics.empty(WIDTH, directions=4).add(taught, torch.zeros(images, dtype=torch.int64))
    signals = Signals(only, scores_are_likelihoods=True, background=9 * others[:background])
    scores = make_classifier("rgda").fit(only)
    seen = signals(taught, scores(taught))
    familiarity = Familiarity(signals, seen, seen[:0])
    nearer, farther = (familiarity(features, scores(features)) for features in (others, 3 * others))
    assert (nearer > farther).all()


def test_the_gradient_is_zero_at_the_fitted_weights():
    generator = torch.Generator().manual_seed(5)
    first, second = (torch.randn(n, 3, generator=generator).double() + shift for n, shift in ((40, 0.7), (90, -0.4)))
    start = torch.tensor([0.5, 0.0, -0.2], dtype=torch.float64)
    weights, offset = fit_logistic_regression(first, second, start, 0.05)
    found = torch.cat([weights, torch.tensor([offset], dtype=torch.float64)]).requires_grad_(True)
    odds = [part @ found[:3] + found[3] for part in (first, second)]
    loss = torch.nn.functional.softplus(-odds[0]).mean() / 2 + torch.nn.functional.softplus(odds[1]).mean() / 2
    (loss + 0.025 * ((found[:3] - start) ** 2).sum()).backward()
    assert found.grad is not None
    assert found.grad.abs().max() < 1e-9


def test_signals_with_a_negative_weight_are_dropped():
    seen, unknown = sample_signals(1), sample_signals(2, shift=3.0, column=2)
    unknown[:, 0] += 4.0  # left-out classes have a larger cosine
    weights = fit_weights(seen, SignalScaler(seen)(unknown))
    assert weights[0] == 0
    assert int(weights.argmax()) == 2
    unknown[:, 1] += 5.0
    unknown[:, 2] += 8.0
    unknown[:, 3] += 5.0  # all weights would be negative, so the default weights are used
    torch.testing.assert_close(fit_weights(seen, SignalScaler(seen)(unknown)), fit_weights(seen, unknown[:0]))
