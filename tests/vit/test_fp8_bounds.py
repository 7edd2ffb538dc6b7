# SPDX-License-Identifier: Apache-2.0
"""Bounds of the inputs of frozen layers, which follow from the weights."""

from __future__ import annotations

import pytest
import torch
from timm.layers import GluMlp, LayerNorm, Mlp, SwiGLU
from timm.models.eva import EvaBlock
from timm.models.vision_transformer import Block, ResPostBlock
from torch import nn
from torch.nn import functional as F

from onea.vit import fp8
from onea.vit.backbones import load_backbone
from onea.vit.fp8 import Fp8Linear, Fp8Mlp, from_fp8, gradient_bounds, hidden_bounds, input_bounds, norm_bounds, to_fp8

WIDTH, HIDDEN = 64, 96


def random_tensor(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm_and_layer(seed: int, affine: bool = True, bias: bool = True) -> tuple[nn.LayerNorm, nn.Linear]:
    """A norm with gains of very different sizes, as in trained networks, and a linear layer."""
    norm, layer = nn.LayerNorm(WIDTH, elementwise_affine=affine), nn.Linear(WIDTH, HIDDEN, bias)
    with torch.no_grad():
        if affine:
            norm.weight.copy_(random_tensor(WIDTH, seed=seed).exp())
            norm.bias.copy_(random_tensor(WIDTH, seed=seed + 1))
        layer.weight.copy_(random_tensor(HIDDEN, WIDTH, seed=seed + 2) / WIDTH**0.5)
        if bias:
            layer.bias.copy_(random_tensor(HIDDEN, seed=seed + 3))
    return norm.requires_grad_(False), layer.requires_grad_(False)


def sample_tokens(norm: nn.LayerNorm, layer: nn.Linear) -> torch.Tensor:
    """Random tokens, single channels, and tokens parallel to the rows of the weights, at several scales."""
    gain = torch.ones(WIDTH) if norm.weight is None else norm.weight
    kinds = torch.cat([random_tensor(200, WIDTH), torch.eye(WIDTH), layer.weight * gain])
    return torch.cat([kinds * size for size in (-1e4, -1.0, 1.0, 1e4)])


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("seed", [10, 20, 30])
def test_input_bounds_hold_and_are_tight(seed, bias, affine):
    norm, layer = norm_and_layer(seed, affine, bias)
    tokens = sample_tokens(norm, layer)
    normed, first, second = norm(tokens), norm_bounds(norm), hidden_bounds(norm, layer)
    shares = normed.abs().amax(0) / first
    assert shares.min() > 0.5
    assert shares.max() <= 1 + 1e-5
    hidden = layer(normed)
    rounded = Fp8Linear(layer, first)(normed).float()
    for activation in (nn.Identity(), nn.GELU(), nn.ReLU(), nn.SiLU()):
        for found in (hidden, rounded):
            shares = activation(found).abs().amax(0) / second
            assert shares.min() > 0.2
            assert shares.max() < 1


def test_small_channels_keep_their_precision():
    """With one scale per row, channels other than the one with the largest gain would underflow."""
    norm, layer = norm_and_layer(10)
    norm.bias.zero_()
    norm.weight[0], norm.weight[1], layer.weight[:, 0] = 1e6, 0.0, 0.0
    tokens = norm(random_tensor(50, WIDTH))
    found = Fp8Linear(layer, norm_bounds(norm))(tokens).float()
    expected = layer(tokens)
    assert 0 < (found - expected).norm() / expected.norm() < 0.06
    assert (Fp8Linear(layer)(tokens).float() - expected).norm() / expected.norm() > 0.2


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gradient_bounds_hold_and_are_tight(approximate):
    second = nn.Linear(HIDDEN, WIDTH).requires_grad_(False)
    second.weight.mul_(random_tensor(HIDDEN).exp())
    upper = torch.cat([random_tensor(200, WIDTH), second.weight.T, torch.eye(WIDTH)])
    upper = upper / upper.norm(dim=1, keepdim=True)
    hidden = torch.full((len(upper), HIDDEN), 2**0.5, requires_grad=True)  # where GELU is steepest
    for layer in (second, Fp8Linear(second)):
        layer(F.gelu(hidden, approximate=approximate)).backward(upper.to(layer(hidden).dtype))
        assert hidden.grad is not None
        shares = hidden.grad.abs().amax(0) / gradient_bounds(second)
        assert shares.min() > 0.7
        assert shares.max() < 1
        hidden.grad = None


def block_of(kind: type[nn.Module], **options: object) -> nn.Module:
    torch.manual_seed(1)
    return kind(WIDTH, 4, **options).requires_grad_(False).eval()


@pytest.mark.parametrize(
    ("block", "names"),
    [
        (block_of(Block), {"attn.qkv", "mlp.fc1", "mlp.fc2"}),
        (block_of(Block, mlp_layer=SwiGLU), {"attn.qkv", "mlp.fc1_g", "mlp.fc1_x"}),
        (block_of(Block, mlp_layer=GluMlp), {"attn.qkv", "mlp.fc1"}),
        (block_of(Block, act_layer=nn.Softplus), {"attn.qkv", "mlp.fc1"}),
        (block_of(EvaBlock, qkv_fused=False), {"attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc1", "mlp.fc2"}),
        (block_of(EvaBlock, scale_mlp=True, norm_layer=LayerNorm), {"attn.qkv", "mlp.fc1"}),
        (block_of(Block, norm_layer=nn.RMSNorm), set()),
        (block_of(ResPostBlock), set()),
        (Mlp(WIDTH), set()),
    ],
    ids=["plain", "gated", "packed gated", "softplus", "separate", "inner norm", "rms norm", "post-norm", "no block"],
)
def test_layers_with_bounded_inputs(block, names):
    limits = input_bounds(block)
    assert {name for name, layer in block.named_modules() if layer in limits} == names
    seen: dict[nn.Module, torch.Tensor] = {}
    for layer in limits:
        layer.register_forward_pre_hook(lambda module, given: seen.update({module: given[0].abs()}))
    block(random_tensor(2, 9, WIDTH) * 100)
    assert len(seen) >= len(limits) - 1  # timm's EvaAttention reads the weights without calling the layer
    assert all((sizes <= limits[layer] * (1 + 1e-5)).all() for layer, sizes in seen.items())


def test_bounds_are_as_accurate_as_a_scale_per_row(monkeypatch):
    vit = load_backbone(image_size=112, depth=4)
    images = torch.cat([random_tensor(2, 3, vit.size, vit.size), torch.zeros(1, 3, vit.size, vit.size)])
    images[0] = images[0].cumsum(1).cumsum(2) / 50  # smooth, like photographs
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = vit(images)
        limited = vit.cast_matrices(torch.bfloat16, fp8=True)(images)
        layers = [layer for layer in vit.modules() if isinstance(layer, Fp8Linear)]
        assert [layer.input_factors is not None for layer in layers] == [True, False, True, True] * 3
        monkeypatch.setattr(fp8, "input_bounds", lambda block: {})
        by_rows = vit.cast_matrices(torch.bfloat16, fp8=True)(images)
    far, near = ((found - expected).norm() / expected.norm() for found in (limited, by_rows))
    assert 0 < far < 1.5 * near < 0.2


def test_only_known_blocks_have_bounds():
    blocks = nn.Sequential(block_of(Block), block_of(ResPostBlock))
    to_fp8(blocks)
    assert [layer.input_factors is not None for layer in blocks.modules() if isinstance(layer, Fp8Linear)] == [
        *(True, False, True, True),
        *(False,) * 4,
    ]


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_an_mlp_and_its_gradient_approximate_full_precision(size):
    block = block_of(Block, mlp_layer=Mlp)
    names, tokens, upper = (
        list(block.state_dict()),
        block.norm2(random_tensor(2, 9, WIDTH)),
        random_tensor(2, 9, WIDTH, seed=2) * size,
    )
    upper[0, 0] = 0
    upper[0, 1] *= 1e-4  # rows are scaled independently
    found: list[torch.Tensor] = []
    blocks = nn.Sequential(block)
    for convert in (from_fp8, to_fp8):
        convert(blocks)
        x = tokens.clone().requires_grad_()
        answer = block.mlp(x)
        answer.backward(upper.to(answer.dtype))
        assert x.grad is not None
        found += answer.detach().float(), x.grad
    assert isinstance(block.mlp, Fp8Mlp)
    assert list(block.state_dict()) == names
    answer, gradient, near_answer, near_gradient = found
    assert 0 < (near_answer - answer).norm() / answer.norm() < 0.08
    off, length = (near_gradient - gradient).norm(dim=2).flatten(), gradient.norm(dim=2).flatten()
    assert off[0] == length[0] == 0
    assert (off[1:] / length[1:]).max() < 0.12
    from_fp8(blocks)
    assert type(block.mlp) is Mlp
    assert type(block.mlp.fc1) is nn.Linear


def test_gradients_keep_infinities_and_nans():
    blocks = nn.Sequential(block_of(Block))
    to_fp8(blocks)
    x, upper = random_tensor(4, WIDTH).requires_grad_(), torch.ones(4, WIDTH, dtype=torch.bfloat16)
    upper[0, 0], upper[1, 1], upper[2] = float("inf"), float("nan"), 1e-30
    blocks[0].mlp(x).backward(upper)
    assert x.grad.isfinite().all(1).tolist() == [False, False, True, True]


def test_mlps_with_other_activations_are_not_replaced():
    blocks = nn.Sequential(block_of(Block, act_layer=nn.ReLU))
    to_fp8(blocks)
    assert type(blocks[0].mlp) is Mlp
    assert blocks[0].mlp.fc2.input_factors is not None
