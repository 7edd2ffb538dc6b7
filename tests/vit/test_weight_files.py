# SPDX-License-Identifier: Apache-2.0
"""Local files with a configuration in their metadata, in a JSON file beside them, or in the backbone's name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from support.toys import images_for, randomised, toy, write_toy

from onea.errors import OneaError
from onea.vit.backbones import digest_of, load_backbone, save_backbone
from onea.vit.network_config import BUNDLED, BUNDLED_SHA256, IMAGE_SIZE, bundled_file
from onea.vit.weight_files import METADATA, split_file_name

# Toy widths with the true number of heads, 16, which are therefore not 64 wide.
SIXTEEN = {"depth": 2, "embed_dim": 128, "num_heads": 16, "img_size": 28, "patch_size": 14}
FILES = {
    "so400m": ("vit_so400m_patch14_siglip_224", {}),
    "ViT-H": ("vit_huge_patch14_224", {}),
    "ViT-L-CLIP": ("vit_large_patch14_clip_quickgelu_224", {"act_layer": "quick_gelu"}),
}


@pytest.fixture(params=sorted(FILES))
def written(request, tmp_path) -> tuple[Path, dict[str, Any], torch.nn.Module]:
    """A file without metadata but with a classifier, the configuration that timm writes beside it, and the network."""
    architecture, extra = FILES[request.param]
    args = SIXTEEN | extra
    network = randomised(timm.create_model(architecture, num_classes=10, **args))
    path = tmp_path / "model.safetensors"
    save_file(network.state_dict(), path)
    known = timm.get_pretrained_cfg(architecture).to_dict() | {"input_size": [3, 28, 28]}
    return path, {"architecture": architecture, "num_classes": 10, "model_args": args, "pretrained_cfg": known}, network


def check(name: str, network: torch.nn.Module, config: dict[str, Any]) -> None:
    vit = load_backbone(name)
    pretrained = config["pretrained_cfg"]
    assert (vit.heads, vit.size) == (16, 28)
    assert (vit.mean, vit.std) == (tuple(pretrained["mean"]), tuple(pretrained["std"]))
    assert vit.config.licence == (pretrained.get("license") or "")
    with torch.no_grad():
        expected = network.forward_head(network.forward_features(images_for(vit)), pre_logits=True)
        torch.testing.assert_close(vit(images_for(vit)), expected, rtol=1e-4, atol=1e-5)


def test_a_file_without_configuration_is_refused(written):
    path, _, _ = written
    words = (
        r"does not contain the number of heads.*config.json beside it.*ARCHITECTURE.TAG:model.safetensors.*plain:model"
    )
    with pytest.raises(OneaError, match=words) as caught:
        load_backbone(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["config.json", "model.json", "metadata"])
def test_configurations_in_timms_format(written, place):
    path, config, network = written
    if place == "metadata":
        save_file(load_file(path), path, {METADATA: json.dumps(config)})
    else:
        path.with_name(place).write_text(json.dumps(config))
    check(str(path), network, config)


def test_a_backbone_is_saved_with_its_configuration(written, tmp_path):
    path, config, network = written
    path.with_name("config.json").write_text(json.dumps(config))
    (tmp_path / "elsewhere").mkdir()
    save_backbone(load_backbone(str(path)), tmp_path / "elsewhere" / "own.safetensors")
    check(str(tmp_path / "elsewhere" / "own.safetensors"), network, config)


def test_an_architecture_before_the_path(tmp_path):
    """With its tag, normalisation and licence are those of the tag."""
    network = randomised(timm.create_model("test_vit", num_classes=0))
    path = tmp_path / "model.safetensors"
    save_file(network.state_dict(), path)
    vit = load_backbone(f"test_vit.r160_in1k:{path}")
    assert (vit.heads, vit.mean, vit.config.licence) == (2, (0.5, 0.5, 0.5), "apache-2.0")
    with torch.no_grad():
        expected = network.forward_head(network.forward_features(images_for(vit)), pre_logits=True)
        torch.testing.assert_close(vit(images_for(vit)), expected)
    for architecture, words in {
        "test_vit2": "does not contain timm's test_vit2",
        "test_vitt": "Unknown architecture 'test_vitt' of model.safetensors; did you mean 'test_vit'",
        "test_vit.nowhere": "timm has no weights 'test_vit.nowhere'; existing tags: test_vit.r160_in1k",
    }.items():
        with pytest.raises(OneaError, match=words):
            load_backbone(f"{architecture}:{path}")


def test_a_plain_file(tiny_vit, tmp_path):
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(tiny_vit), bare)
    plain, said = load_backbone(f"plain:{bare}"), load_backbone(tiny_vit)
    assert plain.digest == said.digest == digest_of(load_file(bare))
    images = images_for(said)
    assert torch.equal(plain(images), said(images))
    assert (plain.name, plain.mean) == ("bare.safetensors", (0.485, 0.456, 0.406))


def test_a_copy_of_the_bundled_network_is_recognised_by_its_digest(tmp_path):
    shutil.copy(bundled_file(), tmp_path / "copy.safetensors")
    copy = load_backbone(str(tmp_path / "copy.safetensors"))
    assert (copy.digest, copy.size, copy.config.licence) == (BUNDLED_SHA256, IMAGE_SIZE, "apache-2.0")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "resnet999"}, "timm has no architecture 'resnet999'"),
        ({"architecture": "hf-hub:someone/else"}, "timm has no architecture"),
        ({"architecture": None}, "it has no architecture"),
        ({"pretrained_cfg": {}}, "has no mean and std"),
        ({"pretrained_cfg": {"mean": [0.5], "std": [0.5]}}, "not three numbers"),
        ({"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5, 0.5, 0.0]}}, "not three numbers"),
        (
            {"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 10**9, 10**9]}},
            "1000000000 pixels",
        ),
        (
            {"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [1, 28, 28]}},
            "not that of a square RGB image",
        ),
        (
            {"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": {"a": 1, "b": 2, "c": 3}}},
            "The configuration of the backbone in .* is invalid",
        ),
        ({"model_args": {"img_size": 10**9}}, "1000000000 pixels"),
        ({"model_args": {"depths": [10**9]}}, "1000000000 blocks in"),
        ({"model_args": ["depth"]}, "must be JSON objects"),
        ({"model_args": {"depth": 10**9}}, "1000000000 blocks in"),
        ({"model_args": {"embed_dim": 2**40}}, "does not contain timm's vit_huge_patch14_224"),
        ({"model_args": {"nonsense": 1}}, "does not contain timm's vit_huge_patch14_224: .*nonsense"),
    ],
)
def test_invalid_configurations_are_refused(changes, words, tmp_path):
    network = timm.create_model("vit_huge_patch14_224", num_classes=0, **SIXTEEN)
    path = tmp_path / "model.safetensors"
    known = {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 28, 28]}
    config = {"architecture": "vit_huge_patch14_224", "model_args": SIXTEEN, "pretrained_cfg": known} | changes
    save_file(network.state_dict(), path, {METADATA: json.dumps(config)})
    with pytest.raises(OneaError, match=words) as caught:
        load_backbone(str(path))
    assert "\n" not in str(caught.value)


def test_a_configuration_cannot_make_timm_read_another_file(tmp_path):
    """A checkpoint would be unpickled."""
    network = timm.create_model("vit_huge_patch14_224", num_classes=0, **SIXTEEN)
    path = tmp_path / "model.safetensors"
    args = SIXTEEN | {"checkpoint_path": str(tmp_path / "evil.pth"), "pretrained": True, "pretrained_cfg": {}}
    known = {"mean": [0.5] * 3, "std": [0.5] * 3}
    config = {"architecture": "vit_huge_patch14_224", "model_args": args, "pretrained_cfg": known}
    save_file(network.state_dict(), path, {METADATA: json.dumps(config)})
    assert load_backbone(str(path)).heads == 16


def test_a_file_of_another_family(tmp_path):
    """Rotary positions are computed, because files do not contain them."""
    path = write_toy("DINOv3", tmp_path)
    vit, original = load_backbone(str(path)), toy("DINOv3")
    assert vit.config == original.config
    assert not any(buffer.is_meta for buffer in vit.buffers())
    assert torch.equal(vit(images_for(vit)), original(images_for(vit)))


def test_names_with_paths():
    assert split_file_name("C:\\weights.safetensors") == ("", Path("C:\\weights.safetensors"))
    assert split_file_name("plain:a.safetensors") == ("plain", Path("a.safetensors"))
    assert split_file_name(BUNDLED) is None
