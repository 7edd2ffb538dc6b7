# SPDX-License-Identifier: Apache-2.0
"""Products in eight bits on a GPU against the same numbers multiplied on the CPU, eager and compiled."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from onea.runtime import make_runtime
from onea.vit.adapter import Adapters
from onea.vit.backbones import load_backbone
from onea.vit.compiled import can_compile
from onea.vit.fp8 import quantise_rows, scaled_matmul

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with FP8"
)


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, 2, 15, 197, 4096])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 192), (768, 3072), (3072, 768)])
def test_a_product_is_the_cpus(rows, inputs, outputs):
    a, b, bias = drawn(rows, inputs), drawn(outputs, inputs, seed=2), drawn(outputs, seed=3).bfloat16()
    mine = scaled_matmul(*quantise_rows(a.to(GPU)), *quantise_rows(b.to(GPU)), bias.to(GPU))
    theirs = scaled_matmul(*quantise_rows(a), *quantise_rows(b), bias)
    # Fast accumulation keeps 14 bits of the partial sums; both results are rounded to bfloat16.
    assert off(mine, theirs) < 1e-2


def test_numbers_in_eight_bits_are_the_cpus():
    rows = drawn(100, 256) * torch.logspace(-12, 12, 100)[:, None]
    mine, theirs = quantise_rows(rows.to(GPU)), quantise_rows(rows)
    torch.testing.assert_close(mine[1].cpu(), theirs[1], rtol=1e-6, atol=0)
    assert off(mine[0].float(), theirs[0].float()) < 1e-3


@pytest.mark.parametrize("compiled", [False, True])
def test_features_and_gradients_are_the_cpus(tiny_vit, compiled):
    if compiled and not can_compile(GPU):
        pytest.skip("needs Triton")
    torch.compiler.reset()
    counters.clear()
    runtime = make_runtime("cuda", "fp8")
    exact = load_backbone(tiny_vit).cast_matrices(torch.bfloat16)
    plain = load_backbone(tiny_vit).cast_matrices(torch.bfloat16, fp8=True)
    ours = load_backbone(tiny_vit).cast_matrices(runtime.dtype, runtime.fp8).to(GPU)
    if compiled:
        ours.compile_for({64})
    for seed in (1, 2, 3, 4):
        images = drawn(64, 3, plain.size, plain.size, seed=seed)
        adapters = [
            Adapters(plain.depth, plain.width, 4, generator=torch.Generator().manual_seed(seed), dropout=0.0)
            for _ in range(3)
        ]
        for hooks in adapters:
            for adapter in hooks.adapters():
                torch.nn.init.normal_(adapter.up.weight, generator=torch.Generator().manual_seed(seed))
        mine, theirs, best = adapters[0].to(GPU), *adapters[1:]
        with runtime.autocast():
            found = ours(images.to(GPU), mine)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, unrounded = plain(images, theirs), exact(images, best)
        assert off(found, expected) < 0.05
        gradients, theirs_too, right = (
            torch.cat([each.detach().cpu().flatten() for each in torch.autograd.grad(one.square().sum(), of)])
            for one, of in (
                (found, [*mine.parameters()]),
                (expected, [*theirs.parameters()]),
                (unrounded, [*best.parameters()]),
            )
        )
        # Rounded to eight bits, a number next to the middle of two may become either, and so may the side of a ReLU:
        # of four images, one such ReLU would double the error, so there are more.
        assert off(gradients, right) < 1.5 * off(theirs_too, right)
    assert not counters["inductor"]["cudagraph_skips"]
