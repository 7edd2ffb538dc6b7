"""Calibration: temperatures, held-out images and the stated rate of unknown answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_tools import tiny_model
from tiny import write_tiny_images
from torch.nn import functional as F

from onea.model import calibration


@pytest.mark.parametrize("temperature", [0.01, 0.05, 0.3])
def test_the_temperature_that_made_the_labels_is_found(temperature):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(20_000, 5, generator=generator) * 0.4
    labels = torch.multinomial(torch.softmax(scores / temperature, 1), 1, generator=generator)[:, 0]
    assert calibration.fit_temperature(scores, labels) == pytest.approx(temperature, rel=0.1)


def test_where_the_labels_say_nothing_the_temperature_stays():
    one_class = calibration.fit_temperature(torch.rand(50, 1), torch.zeros(50, dtype=torch.int64))
    assert one_class == pytest.approx(calibration.PRIOR_TEMPERATURE, rel=0.03)
    no_mistake = calibration.fit_temperature(torch.eye(3), torch.arange(3))
    assert 0.01 < no_mistake < 0.2


@given(counts=st.lists(st.integers(2, 60), min_size=1, max_size=8), share=st.floats(0, 0.5), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_every_class_keeps_two_images_to_learn_from(counts, share, seed):
    labels = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    names = [f"c{n}" for n in range(len(counts))]
    held = calibration.held_out_rows(labels, names, share, seed, 1)
    assert len(held.unique()) == len(held)
    taken = torch.bincount(labels[held], minlength=len(counts))
    for count, out in zip(counts, taken.tolist(), strict=True):
        wanted = max(1, round(share * count)) if share > 0 and count >= calibration.FEW else 0
        assert out == min(wanted, count - 2)


def test_what_is_held_out_does_not_depend_on_other_classes():
    alone = calibration.held_out_rows(torch.zeros(20, dtype=torch.int64), ["a"], 0.2, 3, 1)
    both = calibration.held_out_rows(torch.tensor([0] * 20 + [1] * 20), ["a", "b"], 0.2, 3, 1)
    assert both[both < 20].tolist() == alone.tolist()


@given(rate=st.sampled_from([0.02, 0.05, 0.2]), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_known_images_fall_below_the_threshold_as_often_as_stated(rate, seed):
    rng = np.random.default_rng(seed)
    known = torch.from_numpy(rng.normal(size=2000))
    fresh = torch.from_numpy(rng.normal(size=20_000))
    below = float((fresh < calibration.threshold(known, rate)).double().mean())
    assert below == pytest.approx(rate, abs=0.05)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    root = tmp_path_factory.mktemp("many")
    write_tiny_images(root, classes=6, train=60, test=60)
    return root


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_fresh_known_images_are_answered_unknown_about_as_often_as_stated(tiny_vit, many, rate):
    model = tiny_model(tiny_vit, unknown=rate, held_out=0.3).learn(many / "train")
    assert (model.predict(many / "test") == "unknown").mean() == pytest.approx(rate, abs=0.06)


def test_strange_images_are_unknown_and_nothing_is_when_switched_off(tiny_vit, many):
    model = tiny_model(tiny_vit).learn(many / "train")
    edges = np.indices((32, 32)).sum(0) // 4 % 2 * 255
    strange = np.repeat(edges[None, :, :, None], 3, 3).astype(np.uint8)
    assert model.predict(strange).tolist() == ["unknown"]
    assert model.predict_topk(strange, 1)[0][0][0].startswith("class")  # the likeliest class is still told
    model.set_params(unknown=None)
    assert model.predict(strange)[0].startswith("class")


def test_probabilities_are_calibrated(tiny_vit, many):
    """The mean probability of the answer comes near the share of right answers."""
    model = tiny_model(tiny_vit, unknown=None, held_out=0.3).learn(many / "train")
    probabilities = torch.from_numpy(model.predict_proba(many / "test"))
    labels = torch.from_numpy(np.repeat(np.arange(6), 60))
    accuracy = float((probabilities.argmax(1) == labels).double().mean())
    assert float(probabilities.max(1).values.mean()) == pytest.approx(accuracy, abs=0.12)
    raw = model.snapshot().similarities(many / "test").double()
    fitted = F.nll_loss(probabilities.log(), labels)
    for other in (model.snapshot().state.temperature * 10, model.snapshot().state.temperature / 10):
        assert fitted < F.cross_entropy(raw / other, labels)
