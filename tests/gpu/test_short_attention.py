# SPDX-License-Identifier: Apache-2.0
"""Attention among few tokens on a GPU: its kernels alone, and the compiled network with and without them."""

from __future__ import annotations

import pytest
import torch
from support.tiny import write_tiny_vit
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

from onea.vit.adapter import Adapters
from onea.vit.backbones import load_backbone
from onea.vit.compiled import can_compile
from onea.vit.hooks import NO_HOOKS
from onea.vit.short_attention import short_attention

GPU = torch.device("cuda")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not can_compile(GPU), reason="needs Triton"),
]
# Probabilities, their gradients and results are rounded, each by half of eps at most.
ROUNDING = 2 * torch.finfo(torch.bfloat16).eps


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("tokens", [1, 5, 33, 50, 64, 65, 66, 80, 128])
@pytest.mark.parametrize(("heads", "width"), [(6, 64), (2, 32), (3, 16)])
def test_values_and_gradients_are_those_of_full_precision(tokens, heads, width):
    qkv, upper = drawn(5, tokens, 3 * heads * width).bfloat16(), drawn(5, tokens, heads * width, seed=2).bfloat16()
    mine, exact = qkv.to(GPU).requires_grad_(), qkv.double().requires_grad_()
    found = short_attention(mine, heads)
    q, k, v = exact.unflatten(2, (3, heads, width)).permute(2, 0, 3, 1, 4).unbind()
    expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    (gradient,), (right,) = (
        torch.autograd.grad(one, of, upper.to(one)) for one, of in ((found, mine), (expected, exact))
    )
    assert off(found, expected) < ROUNDING
    assert gradient.dtype == torch.bfloat16
    for part, its in zip(gradient.chunk(3, 2), right.chunk(3, 2), strict=True):
        # One token looks at itself, whatever queries and keys are: their gradients are nothing.
        assert float((part.cpu().double() - its).norm()) < ROUNDING * float(its.norm()) + 1e-3


def test_large_scores_do_not_overflow():
    qkv = (30 * drawn(2, 65, 3 * 128)).bfloat16().to(GPU).requires_grad_()
    found = short_attention(qkv, 2)
    (gradient,) = torch.autograd.grad(found.float().sum(), qkv)
    assert found.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kept", [None, 32])
def test_a_compiled_network_learns_with_it_as_without(tmp_path, monkeypatch, kept):
    write_tiny_vit(tmp_path / "vit.safetensors", width=128, depth=3, patch=4, size=32)  # 65 tokens
    results, codes = {}, {}
    for name in ("exact", "theirs", "ours"):
        torch.compiler.reset()
        counters.clear()
        vit = load_backbone(str(tmp_path / "vit.safetensors"))
        hooks = Adapters(vit.depth, vit.width, 4, generator=torch.Generator().manual_seed(1), dropout=0.0)
        for adapter in hooks.adapters():
            torch.nn.init.normal_(adapter.up.weight, generator=torch.Generator().manual_seed(2))
        images = drawn(4, 3, vit.size, vit.size)
        patches = None if kept is None else torch.arange(kept).expand(4, -1).contiguous()
        if name != "exact":
            vit.cast_matrices(torch.bfloat16).to(GPU).compile_for({4})
            hooks, images = hooks.to(GPU), images.to(GPU)
            patches = None if patches is None else patches.to(GPU)
        parameters = list(hooks.parameters())

        def step(vit=vit, hooks=hooks, images=images, patches=patches, parameters=parameters):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                features = vit(images, hooks, patches)
            gradients = torch.autograd.grad(features.square().sum(), parameters)
            return features, torch.cat([each.flatten() for each in gradients])

        with monkeypatch.context() as patched, inductor.patch(force_disable_caches=True):
            if name == "theirs":
                patched.setattr("onea.vit.blocks.is_supported", lambda *_: False)
            if name == "exact":
                results[name] = step()
            else:
                results[name], code = run_and_get_code(step)
                codes[name] = "\n".join(code)
                for _ in range(3):  # recording and replay
                    again = step()
                torch.testing.assert_close(again, results[name], rtol=2e-2, atol=2e-2 * float(again[1].abs().max()))
                with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
                    assert vit(images, NO_HOOKS, patches).isfinite().all()
        assert not counters["inductor"]["cudagraph_skips"]
    for kernel in ("short_attention_forward", "short_attention_backward"):
        assert kernel in codes["ours"]
        assert kernel not in codes["theirs"]
    for mine, others, right in zip(results["ours"], results["theirs"], results["exact"], strict=True):
        assert off(mine, right) < 1.5 * off(others, right)
