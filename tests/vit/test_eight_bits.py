# SPDX-License-Identifier: Apache-2.0
"""Int8 weights, and the bundled network, which is stored in int8."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from support import ROOT
from support.pages import script
from support.tiny import save_plain

from onea.errors import OneaError
from onea.model.parameters import Parameters
from onea.research.runs.config import RunConfig
from onea.vit.backbones import digest_of, load_backbone, weights_file_stamp
from onea.vit.network_config import BUNDLED, BUNDLED_SHA256, IMAGE_SIZE, bundled_file
from onea.vit.weight_files import dequantise, without_head

quantise = script("pack_weights", "tools").quantise
MATRIX, SCALE = "blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.weight.scale"
FLOAT_FEATURES = ROOT / "tests/golden/dinov2-float-features.safetensors"
GROUPS = r"\[rows, groups\] of floats"


def rounded(matrix: torch.Tensor) -> torch.Tensor:
    return dequantise(quantise({"some.weight": matrix}))["some.weight"]


# quantisation


@given(st.integers(0, 10**6), st.sampled_from([(5, 40), (5, 96), (3, 2, 4, 4), (1, 1)]), st.floats(-6, 6))
def test_clipping_never_increases_the_error_of_a_group(seed, shape, power):
    """The error of each group of 32 columns is at most that without clipping; 40 columns are one group."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0**power
    columns = matrix[0].numel()
    groups, found = (
        each.double().view(len(matrix), -1, 32 if columns % 32 == 0 else columns) for each in (matrix, rounded(matrix))
    )
    step = groups.abs().amax(2, keepdim=True) / 127
    plain = (groups / step).round() * step
    # A scale is rounded to float16, by at most 2**-11 of it or 2**-25, and the product with its integers to float32.
    bound = (groups - plain).norm(dim=2) + (2.0**-11 + 2.0**-22) * groups.norm(dim=2)
    assert ((groups - found).norm(dim=2) <= bound + 2.0**-25 * 127 * groups.shape[2] ** 0.5).all()


def test_an_outlier_is_clipped():
    """In a group of many columns, where the gain is much larger than the rounding of the scale."""
    row = torch.linspace(-1, 1, 40_001)[None].clone()
    row[0, 7] = 1.6
    error = (rounded(row) - row).square().sum()
    step = 1.6 / 127
    assert error < 0.95 * ((row / step).round() * step - row).square().sum()


def test_only_matrices_are_quantised():
    tensors = {
        "patch_embed.proj.weight": torch.randn(4, 3, 2, 2),
        "norm.weight": torch.randn(4),
        "pos_embed": torch.randn(1, 5, 4),
        "blocks.0.mlp.fc1.weight": torch.cat([torch.randn(2, 4), torch.zeros(1, 4)]),
    }
    small = quantise(tensors)
    assert {name for name, tensor in small.items() if tensor.dtype == torch.int8} == {
        "patch_embed.proj.weight",
        "blocks.0.mlp.fc1.weight",
    }
    assert small["patch_embed.proj.weight.scale"].shape == (4, 1)
    assert torch.equal(small["norm.weight"], tensors["norm.weight"])
    assert torch.equal(small["pos_embed"], tensors["pos_embed"].half())
    large = dequantise(small)
    assert large.keys() == tensors.keys()
    assert {tensor.dtype for tensor in large.values()} == {torch.float32}
    assert not large["blocks.0.mlp.fc1.weight"][2].any(), "a row of zeros stays one"
    kept = quantise(tensors, keep=["patch_embed"])
    assert torch.equal(kept["patch_embed.proj.weight"], tensors["patch_embed.proj.weight"].half())
    assert "patch_embed.proj.weight.scale" not in kept


def test_dequantised_weights_share_no_memory():
    mine = {"norm.weight": torch.ones(3)}
    dequantise(mine)["norm.weight"].zero_()
    assert mine["norm.weight"].all()


# files


@pytest.fixture
def small(tiny_vit) -> dict[str, torch.Tensor]:
    return quantise(load_file(tiny_vit))


def test_an_int8_file_loads_by_its_path(small, tiny_vit, tmp_path):
    head = {"head.weight": torch.ones(3, 64, dtype=torch.int8)}  # not read, so its scale is not required
    save_plain(small | head, tmp_path / "small.safetensors")
    loaded, exact = load_backbone(str(tmp_path / "small.safetensors")), load_backbone(tiny_vit)
    assert loaded.digest == digest_of(small | head) != exact.digest
    images = torch.randn(4, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = loaded(images), exact(images)
    assert 0 < (found - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({SCALE: None}, f"there is no {SCALE}"),
        ({SCALE: torch.ones(191, 2)}, f"{SCALE} is not {GROUPS}"),
        ({SCALE: torch.ones(192)}, f"{SCALE} is not {GROUPS}"),
        ({SCALE: torch.ones(192, 0)}, f"{SCALE} is not {GROUPS}"),
        ({SCALE: torch.ones(192, 3)}, f"{SCALE} is not {GROUPS}"),
        ({SCALE: torch.ones(192, 2, dtype=torch.int32)}, f"{SCALE} is not {GROUPS}"),
        ({SCALE: torch.full((192, 2), torch.nan)}, f"{SCALE} is not finite"),
        ({SCALE: torch.full((192, 1), torch.inf)}, f"{SCALE} is not finite"),
        ({MATRIX: torch.ones(192, 64)}, f'Unexpected key.*"{SCALE}"'),
        ({MATRIX: torch.tensor(1, dtype=torch.int8), SCALE: torch.tensor(1.0)}, f"{SCALE} is not {GROUPS}"),
        ({MATRIX: torch.ones(192, 62, dtype=torch.int8)}, f"size mismatch for {MATRIX}"),
    ],
)
def test_invalid_scales_are_refused(change, words, small, tmp_path):
    tensors = {name: tensor for name, tensor in (small | change).items() if tensor is not None}
    save_plain(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(OneaError, match=f"does not contain a plain timm ViT: .*{words}") as caught:
        load_backbone(str(tmp_path / "bad.safetensors"))
    assert "\n" not in str(caught.value)


# the bundled network


def test_the_bundled_network_is_the_default():
    assert Parameters().backbone == RunConfig().backbone == BUNDLED
    assert weights_file_stamp(BUNDLED)
    vit = load_backbone()
    assert (vit.name, vit.digest, vit.size, vit.depth, vit.width) == (BUNDLED, BUNDLED_SHA256, IMAGE_SIZE, 12, 384)


def test_the_bundled_file_is_small_complete_and_the_only_one():
    assert list(bundled_file().parent.glob("*.safetensors")) == [bundled_file()]
    assert bundled_file().stat().st_size < 26e6
    tensors = load_file(bundled_file())
    assert digest_of(tensors) == BUNDLED_SHA256
    assert tensors.keys() == without_head(tensors).keys()
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_int8_weights_hardly_change_the_features_of_a_trained_network(tmp_path):
    """Groups of 48 columns, because the stored weights are those of groups of 32."""
    exact = dequantise(load_file(bundled_file()))
    side = torch.arange(56.0)
    pattern = torch.stack([torch.sin(side[:, None] / 5 + side / 9 + 2 * colour) for colour in range(3)])[None]
    features = []
    for tensors in (exact, quantise(exact, group=48)):
        save_plain(tensors, tmp_path / "network.safetensors")
        with torch.no_grad():
            features.append(load_backbone(str(tmp_path / "network.safetensors"), image_size=56)(pattern))
    expected, found = features
    # 2.2 %; the rounding of another CPU changes it by about a millionth.
    assert 0 < (found - expected).norm() / expected.norm() < 0.04


def test_a_damaged_bundled_network_is_refused(monkeypatch, tmp_path):
    copy = Path(shutil.copy(bundled_file(), tmp_path))
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    monkeypatch.setattr("onea.vit.backbones.bundled_file", lambda: copy)
    with pytest.raises(OneaError, match="bundled backbone is damaged; install onea again"):
        load_backbone()


def drawn_images() -> torch.Tensor:
    """Characters of the bundled sheet on coloured backgrounds, ``[16, 3, 112, 112]``."""
    with (resources.files("onea") / "assets/glyphs.png").open("rb") as file, Image.open(file) as sheet:
        grey = torch.from_numpy(np.array(sheet)).float() / 255
    tiles = torch.stack([grey[112 * row : 112 * (row + 1), :112] for row in range(0, 64, 4)])
    return 4 * tiles[:, None] - 2 + torch.linspace(-2, 2, 3)[:, None, None] * torch.linspace(-1, 1, 112)


def test_the_features_of_the_bundled_network_are_those_of_its_float_weights(request):
    """To 2.2 % on average; features of the float weights are stored in float16."""
    if weights := request.config.getoption("--float-weights"):
        features = load_backbone(f"{BUNDLED}:{weights}", 112)(drawn_images())
        save_file({"features": features.half()}, FLOAT_FEATURES)
    expected = load_file(FLOAT_FEATURES)["features"].float()
    moved = (load_backbone(BUNDLED, 112)(drawn_images()) - expected).norm(dim=1) / expected.norm(dim=1)
    assert 0 < moved.mean() < 0.022
