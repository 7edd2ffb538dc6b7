# SPDX-License-Identifier: Apache-2.0
"""Whether an update trains the adapter: decided from its photos, its size and the preset."""

from __future__ import annotations

import numpy as np
import pytest
from support.models import tiny_model

import onea
from onea.errors import OneaError
from onea.model.learning.update_views import UpdateViews
from onea.model.reports import report_lines, training_advice

PER_CLASS, SIDE = 100, 40
_DISCARD = UpdateViews.discard_fixed


def photos(contrast: float) -> tuple[np.ndarray, list[str]]:
    """Dark and light noise; without contrast, the two classes cannot be distinguished."""
    rng = np.random.default_rng(0)
    middle = np.array([128 - contrast, 128 + contrast]).repeat(PER_CLASS)[:, None, None, None]
    pixels = rng.normal(middle, 30, (2 * PER_CLASS, SIDE, SIDE, 3)).clip(0, 255).astype(np.uint8)
    return pixels, ["dark"] * PER_CLASS + ["light"] * PER_CLASS


def test_an_update_whose_classes_are_distinguished_already_does_not_train(tiny_vit):
    model = tiny_model(tiny_vit).learn(*photos(contrast=90))
    assert not model.history[-1]["trained"]
    assert model.history[-1]["held_out_accuracy"] == 1.0


def test_an_update_whose_classes_are_confused_trains(tiny_vit):
    assert tiny_model(tiny_vit).learn(*photos(contrast=0)).history[-1]["epochs"] > 0


def test_few_photos_are_no_evidence_that_training_is_useless(tiny_vit):
    pixels, labels = photos(contrast=90)
    few = slice(PER_CLASS - 20, PER_CLASS + 20)
    assert tiny_model(tiny_vit).learn(pixels[few], labels[few]).history[-1]["epochs"] > 0


def test_all_photos_again_train_in_any_case(tiny_vit):
    model = tiny_model(tiny_vit).learn(*photos(contrast=90))
    assert model.learn(*photos(contrast=90)).history[-1]["epochs"] > 0


def test_a_duplicate_does_not_change_the_decision(tiny_vit):
    pixels, labels = photos(contrast=90)
    update = tiny_model(tiny_vit).learn(np.concatenate([pixels, pixels[:1]]), [*labels, labels[0]]).history[-1]
    assert (update["trained"], update["distinguished"], update["repeated"]) == (False, True, 1)


def test_the_adapter_stands_for_classes_that_it_distinguishes_without_training(tiny_vit):
    """So a later, smaller update neither replaces it nor advises to teach these classes again."""
    model = tiny_model(tiny_vit).learn(*photos(contrast=90))
    state = model.snapshot().state
    assert set(state.adapter_images) == {"dark", "light"}
    assert training_advice(state) == []
    assert any("already distinguish" in line for line in report_lines(model.history[-1]))
    pixels, _ = photos(contrast=0)
    few = ["grey"] * 8
    assert not model.learn(pixels[:8], few).history[-1]["trained"]
    more = np.random.default_rng(1).integers(0, 255, (16, SIDE, SIDE, 3), np.uint8)
    update = model.learn(more, ["noise"] * 8 + ["static"] * 8).history[-1]
    assert update["trained"]
    assert update["merge"] is not None or set(model.snapshot().state.adapter_images) >= {"dark", "light", "noise"}


def test_the_paper_trains_every_update(tiny_vit):
    assert tiny_model(tiny_vit, preset="paper").learn(*photos(contrast=90)).history[-1]["trained"]


def test_tokens_are_not_kept_if_an_update_does_not_train(tiny_vit, monkeypatch):
    views = []
    monkeypatch.setattr(UpdateViews, "discard_fixed", lambda self: views.append(self) or _DISCARD(self))
    tiny_model(tiny_vit).learn(*photos(contrast=90))
    assert [view.fixed for view in views] == [None]


@pytest.mark.parametrize("contrast", [0, 90])
def test_the_fast_preset_never_trains(tiny_vit, tmp_path, contrast):
    model = onea.OneA(backbone=tiny_vit, preset="fast", threads=1).learn(*photos(contrast))
    assert not model.history[-1]["trained"]
    assert model.snapshot().state.adapter == {}
    loaded = onea.load(model.save(tmp_path / "fast.onea"), threads=1)
    pixels, _ = photos(contrast=90)
    np.testing.assert_array_equal(loaded.predict_proba(pixels[:5]), model.predict_proba(pixels[:5]))


@pytest.mark.parametrize("given", [{"epochs": 2}, {"learning_rate": 0.1}, {"options": {"rank": 8}}])
def test_the_fast_preset_refuses_parameters_of_training(tiny_vit, given):
    model = onea.OneA(backbone=tiny_vit, preset="fast", threads=1, **given)
    with pytest.raises(OneaError, match="preset fast trains nothing; leave it out, or choose preset auto"):
        model.learn(*photos(contrast=90))


def test_another_preset_loads_the_network_again(tiny_vit):
    """Its image size depends on the preset."""
    model = onea.OneA(backbone=tiny_vit, threads=1)
    first = model._load_engine()
    assert model.set_params(preset="accurate")._load_engine() is not first
