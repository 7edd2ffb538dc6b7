# SPDX-License-Identifier: Apache-2.0
"""Backbones of all supported families, in runs, models and exports."""

from __future__ import annotations

import dataclasses
import json
import types
import warnings

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from support.models import class_folders, onnx_runtime_or_skip, tiny_model
from support.records import comparable_fields
from support.tiny import Stopped, but_slow
from support.toys import SHAPES, randomised, write_toy

import onea
from onea.data.transforms import Preprocess
from onea.errors import OneaError
from onea.model.export import export
from onea.model.storage.card import card
from onea.research.catalogue import BUNDLED_GIGAFLOPS, STRONG_NETWORKS
from onea.research.record import read_record
from onea.research.runs.config import RunConfig, make_config
from onea.research.runs.evaluation import count_flops
from onea.research.runs.runner import run
from onea.research.runs.setup import _geometry
from onea.vit.backbones import load_backbone
from onea.vit.network_config import NetworkConfig
from onea.vit.weight_files import build_untrained, timm_config


@pytest.fixture(params=sorted(SHAPES), scope="module")
def backbone(request, tmp_path_factory) -> str:
    return str(write_toy(request.param, tmp_path_factory.mktemp("toys")))


def test_a_run_trains_merges_and_resumes(backbone, tiny_run, tmp_path):
    values = tiny_run | {"backbone": backbone}
    whole = run(make_config(values), tmp_path / "whole")
    assert [bool(task.get("merge")) for task in whole["tasks"]] == [False, True, True]
    with pytest.raises(KeyboardInterrupt):
        run(make_config(values), tmp_path / "halved", progress=Stopped())
    again = run(make_config(values), tmp_path / "halved")
    assert comparable_fields(again) == comparable_fields(whole)


def test_a_model_predicts_the_same_with_a_moved_backbone(backbone, tiny_images, tmp_path):
    folders = class_folders(tiny_images / "train")
    names = list(folders)
    moved = tmp_path / "elsewhere.safetensors"
    model = tiny_model(backbone)
    for part in (names[:4], names[4:]):
        model.learn([str(f) for name in part for f in folders[name]], [n for n in part for _ in folders[n]])
    assert [update["trained"] for update in model.history] == [True, False]
    photos = [str(files[0]) for files in folders.values()]
    wanted = model.predict_proba(photos)
    model.save(tmp_path / "shop.onea")
    save_file(load_file(backbone), moved)  # without its metadata, which the model has
    loaded = onea.load(tmp_path / "shop.onea", backbone=str(moved), device="cpu", threads=1)
    np.testing.assert_array_equal(loaded.predict_proba(photos), wanted)
    assert loaded.snapshot().state.backbone["config"] == model.snapshot().state.backbone["config"]


PARTS_OF_OTHERS = ("CLIP", "DINOv2")  # a norm before the blocks as in PE; registers and scales as in DINOv3


@pytest.mark.parametrize("name", but_slow(sorted(SHAPES), PARTS_OF_OTHERS))
def test_export_to_onnx(name, tiny_images, tmp_path):
    onnx_runtime_or_skip()
    model = tiny_model(str(write_toy(name, tmp_path)), epochs=1).learn(tiny_images / "train")
    assert export(model.snapshot(), "onnx", tmp_path / "model.onnx").difference < 1e-4


# Networks whose blocks take no adapter


@pytest.fixture(scope="module")
def convnext(tmp_path_factory) -> str:
    network = randomised(timm.create_model("test_convnext", num_classes=0))
    path = tmp_path_factory.mktemp("convnext") / "model.safetensors"
    save_file(network.state_dict(), path)
    known = timm.get_pretrained_cfg("test_convnext").to_dict() | {"input_size": [3, 64, 64]}
    config = {"architecture": "test_convnext", "pretrained_cfg": known, "num_classes": 1000}
    path.with_name("config.json").write_text(json.dumps(config))
    return str(path)


def test_frozen_methods_run_on_any_network(convnext, tiny_run, tmp_path):
    record = run(make_config(tiny_run | {"backbone": convnext, "method": "slda", "options": {}}), tmp_path / "slda")
    assert (record["backbone"]["width"], record["backbone"]["input"]) == (64, 64)
    assert read_record(tmp_path / "slda")["backbone"]["licence"] == "apache-2.0"
    small = run(
        make_config(tiny_run | {"backbone": convnext, "method": "slda", "options": {}, "image_size": 32}),
        tmp_path / "32",
    )
    assert small["backbone"]["input"] == small["preprocess"]["size"] == 32
    with pytest.raises(OneaError, match=r"One-A trains.*does not fit backbone.*timm's ConvNeXt.*choose simplecil"):
        run(make_config(tiny_run | {"backbone": convnext}), tmp_path / "one-a")


def test_a_model_on_any_network_has_no_adapter(convnext, tiny_images, tmp_path):
    for given in ({"freeze_at": 0.2}, {"patch_drop_rate": 0.3}):  # which are for adapters
        assert not tiny_model(convnext, options=given).learn(tiny_images / "train").snapshot().state.adapter
    model = tiny_model(convnext).learn(tiny_images / "train")
    state = model.snapshot().state
    assert not state.adapter
    assert [update["trained"] for update in model.history] == [False]
    assert "The model is statistics of features, without an adapter," in card(state, "shop.onea")
    model.save(tmp_path / "shop.onea")
    loaded = onea.load(tmp_path / "shop.onea", device="cpu", threads=1).learn(tiny_images / "test")
    assert loaded.version == 2
    photos = [str(files[0]) for files in class_folders(tiny_images / "test").values()]
    assert loaded.score(photos, sorted(model.classes_)) > 0.3
    assert export(loaded.snapshot(), "torch", tmp_path / "model.pt2").difference < 1e-4


# The size of images


def test_the_image_size_of_a_run_is_part_of_its_key(tiny_run, tmp_path):
    plain, small = (make_config(tiny_run | extra) for extra in ({}, {"image_size": 56}))
    assert "image_size" not in plain.identity()
    assert small.identity()["image_size"] == 56
    assert plain.key() != small.key()
    assert run(small, tmp_path)["backbone"]["input"] == 56
    with pytest.raises(OneaError, match=r"patches of 'tiny.safetensors' are 14 wide; choose 42"):
        run(make_config(tiny_run | {"image_size": 45}), tmp_path / "odd")


@pytest.mark.parametrize(
    "name", ["vit_base_patch16_224.augreg_in21k", "vit_base_patch16_siglip_224.webli", "convnext_tiny.in12k"]
)
def test_crop_and_interpolation_of_the_weights(name):
    """Preprocessing equals that of timm, except for the rounding in Pillow's resizing."""
    from PIL import Image
    from timm.data import create_transform, resolve_data_config

    known = NetworkConfig.from_timm(name)
    vit = types.SimpleNamespace(size=known.input_size, config=known, name=name)
    geometry, resize, filter = _geometry(make_config({"geometry": "backbone"}), vit)
    wave = np.sin(np.arange(300)[:, None] / 9) + np.cos(np.arange(360)[None] / 13)
    pixels = np.stack([wave * 50 + 128] * 3, axis=2).astype(np.uint8)
    mine = Preprocess(known.input_size, known.mean, known.std, geometry, resize, filter)
    found = mine.test_views(torch.from_numpy(pixels).permute(2, 0, 1)[None])[0]
    timms = create_transform(**resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict()))
    assert float((found - timms(Image.fromarray(pixels))).abs().mean()) < 0.01


def test_an_unsupported_crop_mode_is_refused():
    known = NetworkConfig(crop_mode="border")
    vit = types.SimpleNamespace(size=224, config=known, name="odd")
    with pytest.raises(OneaError, match="which --geometry backbone does not support; choose direct or resize-crop"):
        _geometry(make_config({"geometry": "backbone"}), vit)


def test_a_model_keeps_its_image_size(tiny_vit, tiny_images, tmp_path):
    model = tiny_model(tiny_vit, image_size=42).learn(tiny_images / "train")
    model.save(tmp_path / "shop.onea")
    loaded = onea.load(tmp_path / "shop.onea", device="cpu", threads=1)
    assert loaded.snapshot().engine.vit.size == 42
    photos = [str(files[0]) for files in class_folders(tiny_images / "test").values()]
    np.testing.assert_array_equal(loaded.predict_proba(photos), model.predict_proba(photos))
    with pytest.raises(OneaError, match="image_size cannot change after the model was taught"):
        loaded.set_params(image_size=28)


@pytest.mark.parametrize("size", [0, -14, 2.5, "28", True, 10**9])
def test_invalid_image_sizes_are_refused(size, tiny_vit, tiny_run, tiny_images):
    with pytest.raises(OneaError, match=r"image_size is .*; give the side in pixels, a whole number up to 4,096"):
        tiny_model(tiny_vit, image_size=size).learn(tiny_images / "train")
    with pytest.raises(OneaError, match="image_size"):
        RunConfig(image_size=size)


# Licences


def test_licences_are_reported(tiny_images, tmp_path, monkeypatch):
    """In the model card and the model folder, and by ``push_to_hub`` if the licence has terms for passing models on."""
    model = tiny_model(str(write_toy("DINOv3", tmp_path))).learn(tiny_images / "train")
    state = model.snapshot().state
    assert state.backbone["licence"] == "dinov3-license"
    assert "weights are licensed under dinov3-license. If you redistribute" in card(state, "shop.onea")
    monkeypatch.setattr("huggingface_hub.create_repo", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.upload_folder", lambda **_: "https://huggingface.co/me/shop")
    with pytest.warns(UserWarning, match="made with weights licensed under dinov3-license.*name DINOv3") as told:
        model.push_to_hub("me/shop")
    assert told[0].filename == __file__
    free = tiny_model(str(write_toy("DINOv2", tmp_path))).learn(tiny_images / "train")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        free.push_to_hub("me/shop")


def test_the_command_lists_backbones(onea):
    code, out, _ = onea("methods", "--backbones", "vit_small_patch16_dinov3.lvd1689m")
    assert code == 0
    assert "256 x 256 pixels, 261 tokens" in out
    assert "all methods" in out
    assert "include DINOv3's licence" in out
    assert "it is timm's ConvNeXt" in onea("methods", "--backbones", "convnext_tiny.in12k")[1]
    assert "vit_pe_core_tiny_patch16_384.fb" in onea("methods", "--backbones", "vit_pe_core*")[1]
    overview = onea("methods", "--backbones")[1]
    assert "plain:FILE" in overview
    assert all(name in overview for name in STRONG_NETWORKS)
    code, _, err = onea("methods", "--backbones", "nonsense*")
    assert (code, "whose name matches 'nonsense*'" in err) == (2, True)


@pytest.mark.parametrize("name", STRONG_NETWORKS)
def test_the_size_and_the_operations_of_a_strong_network_are_those_of_its_weights(name):
    network = build_untrained(name, timm_config(name))
    weights = sum(weight.numel() for weight in network.parameters())
    assert STRONG_NETWORKS[name].megabytes == pytest.approx(4 * weights / 1e6, rel=0.01)
    assert STRONG_NETWORKS[name].gigaflops == pytest.approx(gigaflops(network), rel=0.01)


def test_the_operations_of_the_bundled_network():
    assert gigaflops(load_backbone().vit) == pytest.approx(BUNDLED_GIGAFLOPS, rel=0.01)


def gigaflops(network: torch.nn.Module) -> float:
    """Operations of timm's own forward pass of one image, in billions, counted without computing."""
    pixels = torch.empty(1, 3, *network.patch_embed.img_size, device="meta")
    network = network.eval().requires_grad_(False).to("meta")
    return count_flops(lambda: network(pixels)) / 1e9


def test_a_saved_model_whose_backbone_has_no_configuration_loads(tiny_vit, tiny_images, tmp_path):
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(tiny_vit), bare)
    with pytest.raises(OneaError, match="does not contain the number of heads"):
        tiny_model(str(bare)).learn(tiny_images / "train")
    model = tiny_model(f"plain:{bare}").learn(tiny_images / "train")
    state = model.snapshot().state
    earlier = {name: state.backbone[name] for name in ("name", "sha256")}
    loaded = tiny_model(str(bare))
    loaded.restore(dataclasses.replace(state, backbone=earlier), model.versions)
    photos = [str(files[0]) for files in class_folders(tiny_images / "test").values()]
    np.testing.assert_array_equal(loaded.predict_proba(photos), model.predict_proba(photos))
