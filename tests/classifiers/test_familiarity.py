# SPDX-License-Identifier: Apache-2.0
"""What tells new images from known ones: classes that are truly left out, and weights fitted to them."""

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
    draw = torch.Generator().manual_seed(seed)
    rows = torch.arange(classes).repeat_interleave(IMAGES)
    centres = 5 * torch.randn(classes, WIDTH, generator=draw)
    return centres[rows] + torch.randn(len(rows), WIDTH, generator=draw), rows


def parts(known: ClassStatistics, features: torch.Tensor, rows: torch.Tensor, honest: torch.Tensor | None = None):
    nobody = torch.zeros(len(rows), dtype=torch.bool)
    groups = torch.arange(len(rows))
    return list(leave_classes_out(known, features[None], rows, groups, nobody if honest is None else honest))


@pytest.mark.parametrize("old", [0, 2])
def test_every_new_class_is_left_out_once_and_no_old_one_is(old):
    features, rows = images(7)
    known = ClassStatistics.empty(WIDTH, directions=4)
    before = known.add(features[rows < old], rows[rows < old]).pad_to(7)
    asked = rows >= old
    times = torch.zeros(7, dtype=torch.int64)
    for here, out, others in parts(before, features[asked], rows[asked]):
        left = rows[asked][out].unique()
        times[left] += 1
        assert not (here & out).any()
        assert out.sum() == IMAGES * len(left), "whole classes"
        assert others.classes == 7 - len(left)
        seen = ~here & ~out
        assert others.counts.sum() == IMAGES * old + seen.sum(), "neither those judged nor those left out"
    assert times.tolist() == [0] * old + [1] * (7 - old)


def test_images_that_were_trained_on_are_not_judged():
    features, rows = images(4)
    honest = torch.arange(len(rows)) % 3 == 0
    for here, out, others in parts(ClassStatistics.empty(WIDTH, directions=4).pad_to(4), features, rows, honest):
        assert (here | out).eq(honest).all()
        assert others.counts.sum() == (~honest & ~torch.isin(rows, rows[out])).sum()


def test_a_class_that_is_alone_or_known_cannot_be_left_out():
    features, rows = images(1)
    empty = ClassStatistics.empty(WIDTH, directions=4)
    assert parts(empty.pad_to(1), features, rows) == []
    assert parts(empty.add(features, rows), features, rows) == []


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
    space, targets = ((each.double() - means.mean(0)) @ root for each in (asked, means))
    wide = torch.eye(WIDTH, dtype=torch.float64) + targets.T @ targets / 5
    anything = torch.distributions.MultivariateNormal(torch.zeros_like(space[0]), wide)
    constant = WIDTH / 2 * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))
    best = make_classifier("rgda").fit(known)(asked).double().amax(1) * WIDTH
    cosines = torch.cosine_similarity(space[:, None], targets[None], dim=2).amax(1)
    nothing = torch.cosine_similarity(space[:, None], ((background.double() - means.mean(0)) @ root)[None], dim=2)
    distances = torch.cdist(space, targets).amin(1)
    outside = anything.log_prob(space) + constant
    softened = make_classifier("rgda").fit(known)(asked).double() * WIDTH / 32
    clear = softened.softmax(1).amax(1).log()
    expected = (cosines, clear, best - outside, -distances, cosines - nothing.amax(1))
    for column, wanted in zip(found.T, expected, strict=True):
        torch.testing.assert_close(column, wanted, rtol=1e-3, atol=1e-3)


def test_without_a_background_nothing_is_near_it():
    features, rows = images(3)
    known = ClassStatistics.empty(WIDTH, directions=4).add(features, rows)
    assert (signals_of(known, features, torch.empty(0, WIDTH))[:, -1] == NO_BACKGROUND).all()


def rows_of_signals(seed: int, shift: float = 0.0, column: int = 0) -> torch.Tensor:
    found = torch.randn(200, NUM_SIGNALS, generator=torch.Generator().manual_seed(seed)).abs() * 0.5
    found[:, :-1] = torch.randn(200, NUM_SIGNALS - 1, generator=torch.Generator().manual_seed(seed + 100))
    found[:, column] -= shift
    return found


@pytest.mark.parametrize("telling", range(len(WEIGHTED_SIGNALS)))
def test_the_signal_that_tells_left_out_classes_gets_the_weight(telling):
    features, rows = images(3)
    known = ClassStatistics.empty(WIDTH, directions=4).add(features, rows)
    signals = Signals(known, scores_are_likelihoods=True, background=torch.empty(0, WIDTH))
    seen, strange = rows_of_signals(1), rows_of_signals(2, shift=3.0, column=telling)
    rule = Familiarity(signals, seen, SignalScaler(seen)(strange))
    weights = rule.get_buffer("weights")
    assert int(weights.argmax()) == telling
    assert (weights >= 0).all()
    usual = Familiarity(signals, seen, strange[:0])
    assert (usual.get_buffer("weights") > 0).all(), "the usual weights, where nothing is known"
    for each in (rule, usual):
        sums = SignalScaler(seen)(seen)[:, : len(WEIGHTED_SIGNALS)] @ each.get_buffer("weights")
        assert sums.std() == pytest.approx(1.5, rel=1e-3)


def test_what_is_far_away_or_near_the_background_is_less_typical():
    features, rows = images(3)
    known = ClassStatistics.empty(WIDTH, directions=4).add(features, rows)
    signals = Signals(known, scores_are_likelihoods=True, background=torch.empty(0, WIDTH))
    rule = Familiarity(signals, rows_of_signals(1), rows_of_signals(2)[:0])
    usual = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
    far, near_nothing = usual.clone(), usual.clone()
    far[0, -2], near_nothing[0, -1] = -5.0, -1.0
    assert rule.combine(usual) > rule.combine(near_nothing)
    assert rule.combine(usual) > rule.combine(far) + 10


@pytest.mark.parametrize("images", [6, 40])
@pytest.mark.parametrize("background", [0, 5])
def test_what_is_far_from_the_only_class_is_less_typical(images, background):
    """No other class is there to compare with, and no direction from the mean of all means, which is its own."""
    draw = torch.Generator().manual_seed(3)
    spread = torch.linspace(0.2, 2, WIDTH)  # a class that is wide in some directions claims what lies there
    taught, others = (spread * torch.randn(n, WIDTH, generator=draw) for n in (images, 100))
    taught -= taught.mean(0)
    only = ClassStatistics.empty(WIDTH, directions=4).add(taught, torch.zeros(images, dtype=torch.int64))
    signals = Signals(only, scores_are_likelihoods=True, background=9 * others[:background])
    scores = make_classifier("rgda").fit(only)
    seen = signals(taught, scores(taught))
    rule = Familiarity(signals, seen, seen[:0])
    nearer, farther = (rule(features, scores(features)) for features in (others, 3 * others))
    assert (nearer > farther).all()


def test_the_fit_is_where_the_slope_of_its_objective_ends():
    draw = torch.Generator().manual_seed(5)
    first, second = (torch.randn(n, 3, generator=draw).double() + shift for n, shift in ((40, 0.7), (90, -0.4)))
    start = torch.tensor([0.5, 0.0, -0.2], dtype=torch.float64)
    weights, offset = fit_logistic_regression(first, second, start, 0.05)
    found = torch.cat([weights, torch.tensor([offset], dtype=torch.float64)]).requires_grad_(True)
    odds = [part @ found[:3] + found[3] for part in (first, second)]
    loss = torch.nn.functional.softplus(-odds[0]).mean() / 2 + torch.nn.functional.softplus(odds[1]).mean() / 2
    (loss + 0.025 * ((found[:3] - start) ** 2).sum()).backward()
    assert found.grad is not None
    assert found.grad.abs().max() < 1e-9


def test_a_signal_that_speaks_against_known_images_is_left_out():
    seen, strange = rows_of_signals(1), rows_of_signals(2, shift=3.0, column=2)
    strange[:, 0] += 4.0  # left-out classes are nearer
    weights = fit_weights(seen, SignalScaler(seen)(strange))
    assert weights[0] == 0
    assert int(weights.argmax()) == 2
    strange[:, 1] += 5.0
    strange[:, 2] += 8.0  # everything speaks against them: then nothing was learned from these
    torch.testing.assert_close(fit_weights(seen, SignalScaler(seen)(strange)), fit_weights(seen, strange[:0]))
