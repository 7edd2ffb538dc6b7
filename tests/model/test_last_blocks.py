# SPDX-License-Identifier: Apache-2.0
"""Models with an adapter in the last blocks only: teaching, saving, loading, undo and export."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support.models import resealed, tiny_model

import onea
from onea.errors import OneaError
from onea.model.export import Graph


@pytest.fixture(scope="module")
def photos(tiny_images):
    return tiny_images / "test"


@pytest.fixture(scope="module")
def model(tiny_vit, tiny_images):
    return tiny_model(tiny_vit, options={"adapter_blocks": 1}).learn(tiny_images / "train")


@pytest.fixture
def saved(model, tmp_path):
    return model.save(tmp_path / "shop.onea")


def test_a_loaded_model_is_bit_identical_and_learns_more(model, saved, photos, tiny_images):
    again = onea.load(saved, threads=1, precision="fp32")
    assert {name.rsplit(".", 2)[0] for name in again.snapshot().state.adapter} == {"blocks.1"}
    assert np.array_equal(again.predict_proba(photos), model.predict_proba(photos))
    before = again.predict_proba(photos)
    again.learn(sorted((tiny_images / "train" / "class00").iterdir()), ["another"] * 6)
    again.save(saved)
    assert "another" in onea.load(saved).classes_
    again.undo().save(saved)
    assert np.array_equal(onea.load(saved, threads=1).predict_proba(photos), before)


def test_the_exported_graph_predicts_the_same(model, photos):
    snapshot = model.snapshot()
    pixels = torch.rand(3, 3, snapshot.side, snapshot.side, generator=torch.Generator().manual_seed(0))
    exported = torch.export.export(Graph(snapshot).eval(), (pixels,)).module()
    torch.testing.assert_close(exported(pixels)[0], Graph(snapshot)(pixels)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [(0, "'adapter.blocks.0.down.bias' does not"), (2, "its adapter is for 1 blocks instead of 2"), (-1, "not be neg")],
)
def test_a_folder_with_another_number_of_blocks_is_refused(saved, blocks, reason):
    file = saved / "states/000001/state.json"
    whole = json.loads(file.read_bytes())
    file.write_bytes(resealed(whole | {"options": whole["options"] | {"adapter_blocks": blocks}}))
    with pytest.raises(OneaError, match=reason):
        onea.load(saved)


def test_a_network_with_too_few_blocks_is_refused(tiny_vit, tiny_images):
    with pytest.raises(OneaError, match=r"adapter_blocks is 5, but 'tiny\.safetensors' has 2 blocks"):
        tiny_model(tiny_vit, options={"adapter_blocks": 5}).learn(tiny_images / "train")
