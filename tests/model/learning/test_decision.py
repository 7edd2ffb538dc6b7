# SPDX-License-Identifier: Apache-2.0
"""Whether an update trains the adapter: decided from its photos, its size and the preset."""

from __future__ import annotations

import numpy as np
import pytest
from support.models import tiny_model

PER_CLASS, SIDE = 100, 40


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


def test_repeated_photos_train_in_any_case(tiny_vit):
    model = tiny_model(tiny_vit).learn(*photos(contrast=90))
    assert model.learn(*photos(contrast=90)).history[-1]["epochs"] > 0


@pytest.mark.parametrize("contrast", [0, 90])
def test_the_fast_preset_never_trains(tiny_vit, contrast):
    model = tiny_model(tiny_vit, preset="fast").learn(*photos(contrast))
    assert not model.history[-1]["trained"]
    assert not any(value.any() for name, value in model.snapshot().state.adapter.items() if "up" in name)
