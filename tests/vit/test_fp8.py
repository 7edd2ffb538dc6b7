# SPDX-License-Identifier: Apache-2.0
"""FP8 products, emulated on the CPU, against full precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from onea.errors import OneaError
from onea.research.methods.aper import FineTuned
from onea.runtime import make_runtime
from onea.vit.adapter import Adapters
from onea.vit.backbones import load_backbone
from onea.vit.fp8 import Fp8Linear, from_fp8, quantise_rows, scaled_matmul, to_fp8
from onea.vit.hooks import NO_HOOKS

# Three bits of mantissa have a rounding error of at most 1/16 of a number; numbers below 2**-6 (of at most 448) of half
# a step of 2**-9, which is 2**-10 / 448 of the largest number of the row.
ROUNDING, SMALLEST = 1 / 16, 2**-10 / 448


def random_tensor(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(inputs: int = 64, outputs: int = 48, bias: bool = True) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias).requires_grad_(False)
    made.weight.copy_(random_tensor(outputs, inputs, seed=2) / inputs**0.5)
    return made


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def test_quantised_rows_are_close_and_independent():
    rows = random_tensor(5, 64) * torch.tensor([1e-6, 1.0, 300.0, 1e9, 0.0])[:, None]
    numbers, scale = quantise_rows(rows)
    assert numbers.dtype == torch.float8_e4m3fn
    assert scale.shape == (5, 1)
    off = (numbers.float() * scale - rows).abs()
    bound = ROUNDING * rows.abs() + SMALLEST * rows.abs().amax(1, keepdim=True)
    assert (off <= bound * (1 + 1e-6)).all()
    assert torch.equal(quantise_rows(rows[1:2])[0].float(), numbers[1:2].float())


def test_quantised_rows_keep_infinities_and_nans():
    rows = torch.tensor([[1.0, float("inf")], [float("nan"), 1.0], [1.0, 2.0]])
    numbers, scale = quantise_rows(rows)
    finite = (numbers.float() * scale).isfinite().all(1)
    assert finite.tolist() == [False, False, True]


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_gradient_approximate_full_precision(bias):
    plain = layer(bias=bias)
    eight = Fp8Linear(copy.deepcopy(plain))
    mine, theirs = (random_tensor(2, 7, 64).requires_grad_() for _ in range(2))
    found, expected = eight(mine), plain(theirs)
    assert found.dtype == torch.bfloat16
    assert found.shape == expected.shape
    weights = random_tensor(2, 7, 48, seed=3)
    (found.float() * weights).sum().backward()
    (expected * weights).sum().backward()
    # Two factors with independent errors of at most ROUNDING / sqrt(3) on average; the sum is rounded to bfloat16.
    bound = ROUNDING * (2 / 3) ** 0.5 + 2**-8
    assert 0 < relative_error(found, expected) < bound
    assert mine.grad is not None
    assert theirs.grad is not None
    assert mine.grad.dtype == torch.float32
    assert 0 < relative_error(mine.grad, theirs.grad) < bound


def test_the_gradient_is_the_product_of_the_fp8_matrices():
    eight = Fp8Linear(layer())
    x, upper = random_tensor(3, 64).requires_grad_(), random_tensor(3, 48, seed=4).bfloat16()
    eight(x).backward(upper)
    numbers, scale = quantise_rows(upper)
    expected = (numbers.double() * scale) @ (eight.transposed_fp8.double() * eight.transposed_scale).T
    torch.testing.assert_close(x.grad.double(), expected, rtol=2**-7, atol=2**-8 * float(expected.abs().max()))


def test_original_weights_are_restored(tiny_vit):
    vit = load_backbone(str(tiny_vit))
    before = copy.deepcopy(vit.vit.state_dict())
    vit.cast_matrices(torch.float32, fp8=True)
    kinds = [type(block.mlp.fc1) for block in vit.vit.blocks]
    assert kinds == [Fp8Linear, nn.Linear], "the last block computes only its class token"
    assert list(vit.vit.state_dict()) == list(before)
    vit.cast_matrices(torch.bfloat16, fp8=True)
    assert vit.vit.blocks[0].attn.qkv.weight_fp8.dtype == torch.float8_e4m3fn
    assert vit.vit.blocks[0].attn.qkv.weight.dtype == torch.bfloat16
    vit.cast_matrices(torch.float32)
    assert not any(isinstance(module, Fp8Linear) for module in vit.modules())
    for name, value in vit.vit.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=2**-8, atol=0)  # they were rounded to bfloat16 in between


def test_features_approximate_full_precision_and_copies_equal_them(tiny_vit):
    vit = load_backbone(str(tiny_vit))
    images = random_tensor(3, 3, vit.size, vit.size)
    hooks = Adapters(vit.depth, vit.width, 4, generator=torch.Generator().manual_seed(1), dropout=0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = vit(images, hooks)
        vit.cast_matrices(torch.bfloat16, fp8=True)
        found = vit(images, hooks)
        assert torch.equal(copy.deepcopy(vit)(images, hooks), found)
    assert 0 < relative_error(found, expected) < 0.1
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in hooks.parameters())


def test_replaced_weights_take_effect(tiny_vit):
    vit = load_backbone(str(tiny_vit))
    images, tuned = random_tensor(2, 3, vit.size, vit.size), FineTuned(vit)
    with torch.no_grad():
        for value in tuned.parameters():
            value.mul_(1.5)
        expected = vit(images, tuned)
        vit.cast_matrices(torch.float32, fp8=True)
        assert torch.equal(vit(images, tuned), expected)
        assert not torch.equal(vit(images, NO_HOOKS), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_network_in_fp8_compiles_to_one_graph(tiny_vit, backend):
    torch.compiler.reset()
    vit = load_backbone(str(tiny_vit)).cast_matrices(torch.bfloat16, fp8=True).compile_for({2}, backend)
    images = random_tensor(2, 3, vit.size, vit.size)
    hooks = Adapters(vit.depth, vit.width, 4, generator=torch.Generator().manual_seed(1), dropout=0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = vit(images, hooks), vit.forward_eager(images, hooks)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    parameters = list(hooks.parameters())
    mine, theirs = (torch.autograd.grad(each.square().sum(), parameters) for each in (found, expected))
    for one, other in zip(mine, theirs, strict=True):
        assert relative_error(one, other) < 0.05 or float(other.norm()) == 0


def test_unsupported_sizes_are_not_converted():
    blocks = nn.Sequential(layer(64, 24), layer(64, 48))
    to_fp8(blocks)
    assert [type(each) for each in blocks] == [nn.Linear, Fp8Linear]
    from_fp8(blocks)
    assert [type(each) for each in blocks] == [nn.Linear, nn.Linear]


def test_a_product_adds_its_bias():
    a, b, bias = random_tensor(4, 32), random_tensor(16, 32, seed=2), random_tensor(16, seed=3)
    found = scaled_matmul(*quantise_rows(a), *quantise_rows(b), bias.bfloat16())
    torch.testing.assert_close(found.float(), a @ b.T + bias, rtol=0.2, atol=1.0)


def test_a_cpu_is_refused():
    with pytest.raises(OneaError, match=r"precision fp8 needs an NVIDIA GPU of compute capability 8\.9"):
        make_runtime("cpu", "fp8", threads=1)
