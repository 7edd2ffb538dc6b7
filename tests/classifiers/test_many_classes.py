# SPDX-License-Identifier: Apache-2.0
"""Scores among many classes: exact for a shortlist of each image, in a time that hardly depends on their number."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from onea.classifiers.familiarity import NEAREST_CLASSES, ClassSpread, Signals
from onea.classifiers.gaussian import MANY_CLASSES, GaussianScores, RegularisedGaussian, ShortlistScores
from onea.classifiers.statistics import ClassStatistics
from onea.classifiers.validation import sample_for_validation

WIDTH, IMAGES = 32, 30


def class_features(classes: int, images: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of classes with different covariances."""
    draws = torch.Generator().manual_seed(0)
    means = 2 * torch.randn(classes, WIDTH, generator=draws)
    roots = torch.randn(classes, WIDTH, WIDTH, generator=draws) * torch.logspace(-1, 0.3, WIDTH)[:, None] / WIDTH**0.5
    noise = torch.randn(classes, images, WIDTH, generator=torch.Generator().manual_seed(seed + 1))
    return (means[:, None] + noise @ roots).flatten(0, 1), torch.arange(classes).repeat_interleave(images)


@pytest.fixture(scope="module")
def statistics() -> ClassStatistics:
    return RegularisedGaussian().statistics(WIDTH).add(*class_features(MANY_CLASSES + 100, IMAGES)).compact()


def test_scores_of_many_classes_are_those_of_all_covariances(statistics):
    scorer = RegularisedGaussian(prior_images=30).fit(statistics)
    assert isinstance(scorer, ShortlistScores)
    complete = scorer.exportable()
    assert isinstance(complete, GaussianScores)
    features, labels = class_features(MANY_CLASSES + 100, 4, seed=5)
    scores, expected = scorer(features), complete(features)
    predicted, complete_answers = scores.argmax(1), expected.argmax(1)
    assert (complete_answers == labels).double().mean() > 0.8
    assert (predicted == complete_answers).double().mean() >= 0.999
    same = predicted == complete_answers
    torch.testing.assert_close(scores.amax(1)[same], expected.amax(1)[same], rtol=1e-3, atol=1e-3)


def test_up_to_many_classes_all_are_scored_by_their_covariances(statistics):
    few = statistics.select_classes(torch.arange(MANY_CLASSES))
    assert isinstance(RegularisedGaussian().fit(few), GaussianScores)


def test_other_classes_keep_their_order_below_the_shortlist(statistics):
    """Their scores are those of the pooled covariance, lowered by one number for each image."""
    features = class_features(MANY_CLASSES + 100, 1, seed=8)[0][:20]
    scores = RegularisedGaussian(prior_images=30).fit(statistics)(features)
    pooled = RegularisedGaussian().fit(dataclasses.replace(statistics, factors=None, cut=None))(features)
    lowered = pooled - scores
    others = (lowered - lowered.median(1, keepdim=True).values).abs() < 1e-3
    assert (others.sum(1) >= MANY_CLASSES + 100 - 16).all()
    assert (scores.where(others, -torch.inf).amax(1) <= scores.where(~others, torch.inf).amin(1) + 1e-3).all()


def test_no_features_have_no_scores(statistics):
    assert RegularisedGaussian().fit(statistics)(torch.empty(0, WIDTH)).shape == (0, MANY_CLASSES + 100)


def test_batches_do_not_change_scores(statistics, monkeypatch):
    scorer = RegularisedGaussian().fit(statistics)
    features, _ = class_features(MANY_CLASSES + 100, 1, seed=6)
    expected = scorer(features)
    monkeypatch.setattr("onea.classifiers.gaussian._MAX_ELEMENTS", 5000)
    torch.testing.assert_close(scorer(features), expected, rtol=1e-4, atol=1e-5)


def test_the_cost_of_an_answer_hardly_grows_with_the_number_of_classes():
    """Only the product with the means grows; all covariances together would cost a hundred times as much."""
    operations, counts = [], (MANY_CLASSES + 1, 4 * (MANY_CLASSES + 1))
    features, _ = class_features(1, 8)
    for classes in counts:
        known = RegularisedGaussian().statistics(WIDTH).add(*class_features(classes, 4))
        scorer = RegularisedGaussian().fit(known)
        with FlopCounterMode(display=False) as counter:
            scorer(features)
        operations.append(counter.get_total_flops())
    means = 2 * len(features) * WIDTH * (counts[1] - counts[0])
    assert operations[1] - operations[0] < 1.5 * means


def test_signals_of_near_classes_are_those_of_all_classes(statistics):
    """With the spread of all classes, statistics of those near an image give nearly the same signals."""
    features, labels = class_features(MANY_CLASSES + 100, 1, seed=7)
    image, own = features[40:41], labels[40:41]
    near = statistics.nearest_classes(own, NEAREST_CLASSES)
    assert own.item() in near
    assert len(near) == NEAREST_CLASSES + 1
    part = statistics.select_classes(near)
    signals = []
    for known, spread in ((statistics, None), (part, ClassSpread.of(statistics))):
        scores = RegularisedGaussian().fit(known)(image)
        signals.append(Signals(known, True, torch.empty(0, WIDTH), spread)(image, scores))
    torch.testing.assert_close(signals[0], signals[1], rtol=2e-2, atol=2e-2)


def test_the_spread_of_many_classes_has_their_covariance(statistics):
    spread = ClassSpread.of(statistics)
    means = statistics.means.double()
    assert len(spread.points) == WIDTH
    torch.testing.assert_close(spread.points.T @ spread.points / WIDTH, torch.cov(means.T, correction=0))


def test_all_classes_are_near_if_most_are_asked_for(statistics):
    assert len(statistics.nearest_classes(torch.arange(10), NEAREST_CLASSES)) == statistics.classes


def test_a_sample_for_validation_has_whole_groups_of_a_bounded_number_of_classes():
    labels = torch.arange(1000).repeat_interleave(12)
    groups = torch.arange(12000) // 3
    sampled = sample_for_validation(labels, groups)
    assert len(labels[sampled].unique()) <= 256
    assert (sampled.view(-1, 3).sum(1) % 3 == 0).all(), "a group is in the sample or not"
    one_class = sample_for_validation(torch.zeros(50_000, dtype=torch.int64), torch.arange(50_000) // 2)
    assert 2000 < int(one_class.sum()) <= 4096
