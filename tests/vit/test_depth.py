# SPDX-License-Identifier: Apache-2.0
"""Networks truncated to their first blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.models import class_folders, tiny_model
from support.tiny import write_tiny_vit
from support.toys import toy

import onea
from onea.errors import OneaError
from onea.model.parameters import choose_options
from onea.research.runs.config import make_config
from onea.vit.backbones import load_backbone

DEPTH = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    place = tmp_path_factory.mktemp("deep") / "tiny.safetensors"
    write_tiny_vit(place, depth=DEPTH)
    return place


@pytest.mark.parametrize("depth", range(DEPTH + 1))
def test_features_are_those_after_the_last_used_block(path, depth):
    vit, whole = load_backbone(str(path), depth=depth), load_backbone(str(path))
    assert vit.depth == (depth or DEPTH)
    images = torch.randn(4, 3, vit.size, vit.size, generator=torch.Generator().manual_seed(1))
    tokens = whole.embed(images)
    for block in whole.vit.blocks[: depth or DEPTH]:
        tokens = block(tokens)
    torch.testing.assert_close(vit(images), whole.vit.norm(tokens)[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("depth", [-1, DEPTH + 1])
def test_a_depth_beyond_the_network_is_refused(path, depth):
    with pytest.raises(OneaError, match=f"{DEPTH} blocks; give 1 to {DEPTH}"):
        load_backbone(str(path), depth=depth)


def test_a_model_keeps_its_depth(path, tiny_images, tmp_path):
    files = class_folders(tiny_images / "train")
    model = tiny_model(str(path), depth=2)
    for names in (("class00", "class01"), ("class02",)):
        model.learn([file for name in names for file in files[name]], [name for name in names for _ in files[name]])
    state = model.snapshot().state
    assert state.backbone["depth"] == 2
    loaded = onea.load(model.save(tmp_path / "m.onea"), threads=1, precision="fp32")
    assert loaded.snapshot().engine.vit.depth == 2
    asked = [file for name in sorted(files) for file in files[name][:2]]
    np.testing.assert_array_equal(loaded.predict_proba(asked), model.predict_proba(asked))
    with pytest.raises(OneaError, match="depth cannot change"):
        loaded.set_params(depth=1)


@pytest.mark.parametrize("depth", [-1, 1.5, "2", None])
def test_an_invalid_depth_is_refused(path, tiny_images, depth):
    files = class_folders(tiny_images / "train")["class00"]
    with pytest.raises(OneaError, match=r"depth is .*; give the number of blocks to use, or 0 for all"):
        tiny_model(str(path), depth=depth).learn(files, ["class00"] * len(files))


def test_only_an_explicit_depth_changes_the_run_key():
    plain, same, other = (make_config({"method": "simplecil", **more}) for more in ({}, {"depth": 0}, {"depth": 5}))
    assert plain.key() == same.key() != other.key()
    assert "depth" not in plain.identity()
    with pytest.raises(OneaError, match="depth is -1"):
        make_config({"method": "simplecil", "depth": -1})


def test_a_model_trains_only_its_last_blocks(tmp_path, tiny_images):
    write_tiny_vit(tmp_path / "tiny.safetensors", depth=5)
    model = tiny_model(str(tmp_path / "tiny.safetensors"), epochs=None, batch_size=None)
    model.learn(tiny_images / "train")
    state = model.snapshot().state
    assert model.history[-1]["trained"]
    chosen = {name: state.options[name] for name in ("adapter_blocks", "epochs", "views", "patch_drop_rate")}
    assert chosen == {"adapter_blocks": 3, "epochs": 2, "views": 2, "patch_drop_rate": 0.5}
    assert {int(name.split(".")[1]) for name in state.adapter} == {2, 3, 4}
    loaded = onea.load(model.save(tmp_path / "m.onea"), threads=1, precision="fp32")
    asked = tiny_images / "test"
    np.testing.assert_array_equal(loaded.predict_proba(asked), model.predict_proba(asked))


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("CLIP", {}, 0.5),
        ("CLIP", {"adapter_blocks": 0}, 0.0),  # with adapters in all blocks, dropping patches ruins the features
        ("CLIP", {"adapter_blocks": 0, "patch_drop_rate": 0.25}, 0.25),
        ("DINOv3", {}, 0.0),
    ],
)
def test_models_store_no_default_depth(name, given, expected):
    vit = toy(name)
    assert vit.depth > 1
    options = choose_options("auto", given, vit)
    assert options.adapter_blocks == given.get("adapter_blocks", round(0.6 * vit.depth))
    assert options.patch_drop_rate == expected


def test_a_trained_model_accepts_its_own_depth(tiny_vit, tiny_images):
    model = tiny_model(tiny_vit).learn(tiny_images / "train")
    model.set_params(views=2)
    with pytest.raises(OneaError, match="views cannot change after the model was taught"):
        model.set_params(views=3)
