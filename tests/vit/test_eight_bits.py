# SPDX-License-Identifier: Apache-2.0
"""Int8 weights, and the two bundled networks, which are stored in int8."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.pages import script
from support.tiny import save_plain

from onea.errors import OneaError
from onea.model.parameters import Parameters
from onea.research.runs.config import RunConfig
from onea.vit.backbones import digest_of, load_backbone, weights_file_stamp
from onea.vit.network_config import BUNDLED, DEFAULT, FAST, bundled_file, full_name
from onea.vit.weight_files import dequantise, without_head

quantise = script("pack_weights", "tools").quantise
MATRIX, SCALE = "blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.weight.scale"


def rounded(matrix: torch.Tensor) -> torch.Tensor:
    return dequantise(quantise({"some.weight": matrix}))["some.weight"]


# quantisation


@given(st.integers(0, 10**6), st.sampled_from([(5, 40), (3, 2, 4, 4), (1, 1)]), st.floats(-30, 30))
def test_clipping_never_increases_the_error_of_a_row(seed, shape, power):
    """The error of each row is at most that without clipping, where each weight is off by at most half a step."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0**power
    rows, found = matrix.double().flatten(1), rounded(matrix).double().flatten(1)
    step = rows.abs().amax(1, keepdim=True) / 127
    plain = (rows / step).round() * step
    # The scale of a row is rounded to float32, which adds a relative error of 2**-24.
    bound = (rows - plain).norm(dim=1) + 2.0**-23 * rows.norm(dim=1)
    assert ((rows - found).norm(dim=1) <= bound).all()


def test_an_outlier_is_clipped():
    row = torch.linspace(-1, 1, 400)[None].clone()
    row[0, 7] = 1.6
    error = (rounded(row) - row).square().sum()
    step = 1.6 / 127
    assert error < ((row / step).round() * step - row).square().sum()


def test_only_matrices_are_quantised():
    tensors = {
        "patch_embed.proj.weight": torch.randn(4, 3, 2, 2),
        "norm.weight": torch.randn(4).half(),
        "pos_embed": torch.randn(1, 5, 4).half(),
        "blocks.0.mlp.fc1.weight": torch.cat([torch.randn(2, 4), torch.zeros(1, 4)]),
    }
    small = quantise(tensors)
    assert {name for name, tensor in small.items() if tensor.dtype == torch.int8} == {
        "patch_embed.proj.weight",
        "blocks.0.mlp.fc1.weight",
    }
    assert small["patch_embed.proj.weight.scale"].shape == (4,)
    assert torch.equal(small["pos_embed"], tensors["pos_embed"])
    large = dequantise(small)
    assert large.keys() == tensors.keys()
    assert {tensor.dtype for tensor in large.values()} == {torch.float32}
    assert not large["blocks.0.mlp.fc1.weight"][2].any(), "a row of zeros stays one"


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
        ({SCALE: torch.ones(191)}, f"{SCALE} is not one float32 for each row"),
        ({SCALE: torch.ones(192, 1)}, f"{SCALE} is not one float32 for each row"),
        ({SCALE: torch.ones(192).half()}, f"{SCALE} is not one float32 for each row"),
        ({SCALE: torch.full((192,), torch.nan)}, f"{SCALE} is not finite"),
        ({SCALE: torch.full((192,), torch.inf)}, f"{SCALE} is not finite"),
        ({MATRIX: torch.ones(192, 64)}, f'Unexpected key.*"{SCALE}"'),
        ({MATRIX: torch.tensor(1, dtype=torch.int8), SCALE: torch.tensor(1.0)}, f"{SCALE} is not one float32"),
        ({MATRIX: torch.ones(192, 63, dtype=torch.int8)}, f"size mismatch for {MATRIX}"),
    ],
)
def test_invalid_scales_are_refused(change, words, small, tmp_path):
    tensors = {name: tensor for name, tensor in (small | change).items() if tensor is not None}
    save_plain(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(OneaError, match=f"does not contain a plain timm ViT: .*{words}") as caught:
        load_backbone(str(tmp_path / "bad.safetensors"))
    assert "\n" not in str(caught.value)


# bundled networks


def test_the_names_of_the_bundled_networks():
    assert Parameters().backbone == DEFAULT
    assert RunConfig().backbone == RunConfig(backbone="fast").backbone == FAST == full_name("fast")
    assert RunConfig(backbone="fast").key() == RunConfig(backbone=FAST).key()
    assert full_name("some/file.safetensors") == "some/file.safetensors"
    assert weights_file_stamp("fast") == weights_file_stamp(FAST) != weights_file_stamp(DEFAULT) != ""


@pytest.mark.parametrize(("name", "megabytes"), [(DEFAULT, 22), (FAST, 11.1)])
def test_bundled_files_are_small_and_complete(name, megabytes):
    tensors = load_file(bundled_file(name))
    assert bundled_file(name).stat().st_size < megabytes * 1e6
    assert digest_of(tensors) == BUNDLED[name]
    assert tensors.keys() == without_head(tensors).keys()
    assert all(tensor.isfinite().all() for tensor in tensors.values())


# Every 24th feature of a pattern, computed with the float16 weights from which the default network was made.
IN_FLOAT16 = (
    *(2.554, 0.175, -3.488, 1.611, 0.004, -2.007, -0.604, 1.505),
    *(-1.864, 3.626, -2.098, 0.320, -2.201, 3.117, 1.995, -2.181),
)


def test_the_default_network_approximates_its_float16_weights():
    side = torch.arange(112.0)
    pattern = torch.stack([torch.sin(side[:, None] / 5 + side / 9 + 2 * colour) for colour in range(3)])[None]
    vit = load_backbone()
    assert (vit.name, vit.size, vit.depth, vit.width) == (DEFAULT, 112, 12, 384)
    with torch.no_grad():
        found = vit(pattern)[0, ::24]
    expected = torch.tensor(IN_FLOAT16)
    # Quantisation changes these features by 2.3 % and those of photos by 2.5 %; the rounding of another CPU, and a
    # millionth of noise in the pattern, changes them by about a millionth.
    assert (found - expected).norm() / expected.norm() < 0.024


def test_a_damaged_bundled_network_is_refused(monkeypatch, tmp_path):
    copy = Path(shutil.copy(bundled_file(FAST), tmp_path))
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    monkeypatch.setattr("onea.vit.backbones.bundled_file", lambda name: copy)
    with pytest.raises(OneaError, match=f"'{FAST}' is damaged; install onea again"):
        load_backbone(FAST)


def test_every_bundled_file_has_a_digest():
    assert BUNDLED.keys() == {path.stem for path in bundled_file(FAST).parent.glob("*.safetensors")}
