# SPDX-License-Identifier: Apache-2.0
"""Calibration: temperatures, held-out images and the stated rate of unknown answers."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import tiny_model
from support.tiny import write_tiny_images
from torch.nn import functional as F

from onea.classifiers.statistics import ClassStatistics
from onea.classifiers.validation import leave_folds_out
from onea.model import calibration
from onea.model.calibration import MIN_IMAGES, _correct_for_training, _follow_drift, calibrate
from onea.model.learning.series import find_series
from onea.model.learning.update_images import MIN_TO_HOLD_OUT, held_out_rows
from onea.model.state import empty_statistics
from onea.vit.heads import cosine_scores


@pytest.mark.parametrize("temperature", [0.01, 0.05, 0.3])
def test_the_temperature_of_sampled_labels_is_recovered(temperature):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(20_000, 5, generator=generator) * 0.4
    labels = torch.multinomial(torch.softmax(scores / temperature, 1), 1, generator=generator)[:, 0]
    assert calibration.fit_temperature(scores, labels) == pytest.approx(temperature, rel=0.1)


def test_the_temperature_keeps_its_prior_for_uninformative_labels():
    one_class = calibration.fit_temperature(torch.rand(50, 1), torch.zeros(50, dtype=torch.int64))
    assert one_class == pytest.approx(calibration.PRIOR_TEMPERATURE, rel=0.03)
    no_mistake = calibration.fit_temperature(torch.eye(3), torch.arange(3))
    assert 0.01 < no_mistake < 0.2


def drawn(counts: list[int], seed: int) -> tuple[torch.Tensor, list[str], torch.Tensor]:
    labels = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    features = torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(seed))
    return labels, [f"c{n}" for n in range(len(counts))], features


def groups(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The series, which an update holds out together."""
    return find_series(features, labels, ClassStatistics.empty(features.shape[1]))


@given(counts=st.lists(st.integers(2, 60), min_size=1, max_size=8), share=st.floats(0, 0.5), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_every_class_keeps_two_training_images(counts, share, seed):
    labels, names, features = drawn(counts, seed)
    held = held_out_rows(labels, names, groups(features, labels), share, seed, 1)
    assert len(held.unique()) == len(held)
    taken = torch.bincount(labels[held], minlength=len(counts))
    for count, out in zip(counts, taken.tolist(), strict=True):
        if share > 0 and count >= MIN_TO_HOLD_OUT:
            assert 1 <= out <= min(2 * max(1, round(share * count)), count - 2)
        else:
            assert out == 0


def test_about_the_share_is_held_out():
    labels, names, features = drawn([40] * 50, 0)
    held = held_out_rows(labels, names, groups(features, labels), 0.2, 0, 1)
    assert len(held) / len(labels) == pytest.approx(0.2, abs=0.03)


def test_equal_images_are_held_out_too():
    held = held_out_rows(torch.zeros(10, dtype=torch.int64), ["a"], torch.ones(10), 0.2, 0, 1)
    assert len(held) == 2


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_series_are_held_out_completely_or_not_at_all(seed):
    generator = torch.Generator().manual_seed(seed)
    series = torch.arange(6).repeat_interleave(5)[torch.randperm(30, generator=generator)]
    held = held_out_rows(torch.zeros(30, dtype=torch.int64), ["a"], series, 0.2, seed, 1)
    assert torch.bincount(series[held], minlength=6).sort().values.tolist() == [0, 0, 0, 0, 0, 5]


def test_held_out_images_do_not_depend_on_other_classes():
    labels, names, _ = drawn([20, 20], 0)
    pairs = torch.arange(40) // 2
    both = held_out_rows(labels, names, pairs, 0.2, 3, 1)
    alone = held_out_rows(labels[:20], names[:1], pairs[:20], 0.2, 3, 1)
    assert both[both < 20].tolist() == alone.tolist()


def test_images_without_series_are_held_out_separately():
    """Groups of unusual images would be harder than later images, so probabilities would be too low."""
    labels = torch.arange(10).repeat_interleave(30)
    features = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    found = groups(features, labels)
    assert all(len(found[labels == row].unique()) == 30 for row in range(10))


@given(rate=st.sampled_from([0.02, 0.05, 0.2]), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_known_images_fall_below_the_threshold_as_often_as_stated(rate, seed):
    rng = np.random.default_rng(seed)
    known = torch.from_numpy(rng.normal(size=2000))
    fresh = torch.from_numpy(rng.normal(size=20_000))
    below = float((fresh < calibration.fit_threshold(known, rate)).double().mean())
    assert below == pytest.approx(rate, abs=0.05)


def in_series(generator: torch.Generator, centres: torch.Tensor, series: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and labels of photos of each class: five of each series, which lie close together."""
    shape = (len(centres), series, 5, centres.shape[1])
    spread = torch.randn(shape[0], series, 1, shape[3], generator=generator)
    features = centres[:, None, None] + spread + 0.2 * torch.randn(shape, generator=generator)
    return features.flatten(0, 2), torch.arange(len(centres)).repeat_interleave(series * 5)


@pytest.mark.parametrize("classes", [3, 10, 100])
def test_series_are_found_among_few_classes_and_many(classes):
    """With fewer images than features, their own covariance would make all deviations orthogonal."""
    generator = torch.Generator().manual_seed(0)
    features, labels = in_series(generator, 2 * torch.randn(classes, 256, generator=generator), 6)
    wanted = torch.arange(6).repeat_interleave(5).repeat(classes)
    assert torch.equal(groups(features, labels), wanted)


def test_photos_of_another_day_are_unknown_about_as_often_as_stated():
    """Photos come in series: held-out series are like new ones, randomly held-out photos are not."""
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(200, 64, generator=generator)
    features, labels = in_series(generator, centres, 6)
    fresh, _ = in_series(generator, centres, 20)
    names = [f"c{n}" for n in range(200)]
    rate = {}
    for how, together in (("series", groups(features, labels)), ("random", torch.arange(len(labels)))):
        held = held_out_rows(labels, names, together, 0.15, 0, 1)
        rest = torch.ones(len(labels), dtype=torch.bool).index_fill(0, held, False)
        means = torch.stack([features[rest & (labels == c)].mean(0) for c in range(200)])
        near = cosine_scores(features[held], means).amax(1)
        found = cosine_scores(fresh, means).amax(1)
        rate[how] = float((found < calibration.fit_threshold(near, 0.1)).double().mean())
    assert rate["series"] == pytest.approx(0.1, abs=0.05)
    assert rate["random"] > rate["series"] + 0.1


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    root = tmp_path_factory.mktemp("many")
    write_tiny_images(root, classes=6, train=60, test=60)
    return root


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_fresh_known_images_are_answered_unknown_about_as_often_as_stated(tiny_vit, many, rate):
    """The threshold comes from some images and is tried on others, so the share varies as both numbers allow."""
    model = tiny_model(tiny_vit, unknown=rate, held_out=0.3).learn(many / "train")
    told, asked = len(model.snapshot().state.held_out_signals), 360
    deviation = math.sqrt(rate * (1 - rate) * (1 / told + 1 / asked))
    assert rate / 4 < (model.predict(many / "test") == "unknown").mean() < rate + 3 * deviation


def test_strange_images_are_unknown_and_nothing_is_when_switched_off(tiny_vit, many):
    model = tiny_model(tiny_vit).learn(many / "train")
    edges = np.indices((32, 32)).sum(0) // 4 % 2 * 255
    strange = np.repeat(edges[None, :, :, None], 3, 3).astype(np.uint8)
    assert model.predict(strange).tolist() == ["unknown"]
    assert model.predict_topk(strange, 1)[0][0][0].startswith("class")  # the likeliest class is still told
    model.set_params(unknown=None)
    assert model.predict(strange)[0].startswith("class")


def test_probabilities_are_calibrated(tiny_vit, many):
    """The mean probability of the answer comes near the share of right answers, rather below than above it."""
    model = tiny_model(tiny_vit, unknown=None, held_out=0.3).learn(many / "train")
    probabilities = torch.from_numpy(model.predict_proba(many / "test"))
    labels = torch.from_numpy(np.repeat(np.arange(6), 60))
    accuracy = float((probabilities.argmax(1) == labels).double().mean())
    assert accuracy - 0.12 < float(probabilities.max(1).values.mean()) < accuracy + 0.05
    raw = model.snapshot().compute_scores(many / "test").scores.double()
    fitted = F.nll_loss(probabilities.log(), labels)
    for other in (model.snapshot().state.temperature * 10, model.snapshot().state.temperature / 30):
        assert fitted < F.cross_entropy(raw / other, labels)


def test_where_photos_come_in_series_a_quarter_of_the_class_is_missing(tiny_vit, many):
    state = tiny_model(tiny_vit).learn(many / "train").snapshot().state
    blank = dataclasses.replace(state, temperature=calibration.PRIOR_TEMPERATURE, calibration_images=0)
    rows = torch.arange(len(state.classes)).repeat_interleave(20)
    noise = torch.randn(len(rows), state.statistics.width, generator=torch.Generator().manual_seed(3))
    views = (state.statistics.means[rows] + state.statistics.means.std() * noise)[None]
    nothing = empty_statistics(state.readout, state.statistics.width).pad_to(len(state.classes))
    untrained = torch.zeros(len(rows), dtype=torch.bool)

    def fitted(groups: torch.Tensor, folds: int) -> float:
        scores = torch.empty(len(rows), len(state.classes))
        for here, others in leave_folds_out(nothing, views, rows, groups, folds):
            scores[here] = state.classifier.fit(others)(views[0, here])
        return calibration.fit_temperature(scores, rows)

    alone, pairs = torch.arange(len(rows)), torch.arange(len(rows)) // 2
    assert fitted(pairs, 4) != fitted(pairs, 10)
    for groups, folds in ((alone, 10), (pairs, 4)):
        found, _ = calibrate(blank, nothing, views, rows, groups, untrained)
        assert found.temperature == pytest.approx(fitted(groups, folds))


def signals_at(middle: float, count: int, seed: int) -> torch.Tensor:
    return middle + torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


def test_earlier_signals_follow_the_drift_of_held_out_images():
    """New classes make known images less distinct; of images of earlier updates, only held-out ones are stored."""
    margins, then = signals_at(-1.0, 200, 1), signals_at(0.0, 400, 2)
    moved = _follow_drift(margins, then, 0.5 * then - 3.0)
    torch.testing.assert_close(moved, 0.5 * margins - 3.0, rtol=0.05, atol=0.1)
    assert torch.equal(moved.argsort(0), margins.argsort(0)), "their order stays"
    assert torch.equal(_follow_drift(margins, then[: MIN_IMAGES - 1], then[: MIN_IMAGES - 1] - 3.0), margins), (
        "too few to tell"
    )


def test_signals_of_training_images_are_corrected():
    trained, unseen = signals_at(1.0, 1000, 3), signals_at(0.0, 40, 4)
    signals, untrained = torch.cat([trained, unseen]), torch.arange(1040) >= 1000
    alone, each = torch.zeros(1040, dtype=torch.int64), torch.arange(1040)
    moved = _correct_for_training(signals, alone, each, untrained)
    assert torch.equal(moved[untrained], unseen)
    torch.testing.assert_close(moved[~untrained].mean(0), unseen.mean(0), rtol=1e-4, atol=1e-4)
    raised = _correct_for_training(torch.cat([trained - 9, unseen]), alone, each, untrained)
    assert torch.equal(raised[~untrained], trained - 9), "nothing becomes more familiar"
    series = _correct_for_training(signals, alone, each // 4, untrained)
    half = _correct_for_training(signals, alone, torch.where(each % 2 == 0, each, 2000), untrained)
    assert (series < half).all(), "where images come in series, some are missed"
    assert (half < moved).all()
    none = torch.zeros_like(untrained)
    assert torch.equal(_correct_for_training(signals, alone, each // 4, none), signals), "nothing was trained"


def test_signals_of_many_new_classes_are_those_of_few(tiny_vit, many, monkeypatch):
    """With many classes, only the nearest ones are compared; here, those are all of them."""
    state = tiny_model(tiny_vit, readout="rgda").learn(many / "train").snapshot().state
    blank = dataclasses.replace(state, statistics=empty_statistics("rgda", state.statistics.width))
    generator = torch.Generator().manual_seed(1)
    classes, images = len(state.classes), 8
    rows = torch.arange(classes).repeat_interleave(images)
    features = torch.randn(classes, 1, 64, generator=generator) * 2 + 5
    views = (features + torch.randn(classes, images, 64, generator=generator)).flatten(0, 1)[None]
    nothing = blank.statistics.pad_to(classes)
    after = dataclasses.replace(state, statistics=nothing.add(views[0], rows))
    arguments = after, nothing, views, rows, torch.arange(len(rows)), torch.zeros(len(rows), dtype=torch.bool)
    few, accuracy = calibrate(*arguments)
    monkeypatch.setattr(calibration, "MANY_CLASSES", 1)
    found, accuracy_of_many = calibrate(*arguments)
    assert accuracy_of_many == accuracy
    weighted, expected = found.held_out_signals[:, :-1], few.held_out_signals[:, :-1]
    # Not equal, because with so few classes the spread of their means depends on the fold.
    assert ((weighted - expected).mean(0).abs() < 0.5 * expected.std(0)).all()
