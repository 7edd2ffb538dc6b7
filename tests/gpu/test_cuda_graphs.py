# SPDX-License-Identifier: Apache-2.0
"""The compiled network on a GPU, recorded as CUDA graphs, against the CPU's features and gradients."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from onea.vit.adapter import Adapters
from onea.vit.backbones import load_backbone
from onea.vit.compiled import can_compile
from onea.vit.frozen import FrozenViT
from onea.vit.hooks import NO_HOOKS

GPU = torch.device("cuda")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not can_compile(GPU), reason="needs Triton"),
]


def adapters(vit: FrozenViT, seed: int) -> Adapters:
    made = Adapters(vit.depth, vit.width, 4, generator=torch.Generator().manual_seed(seed), dropout=0.0)
    with torch.no_grad():
        for adapter in made.adapters():
            adapter.up.weight.normal_(generator=torch.Generator().manual_seed(seed + 1))
    return made


def images_of(vit: FrozenViT, count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, vit.size, vit.size, generator=torch.Generator().manual_seed(seed))


def gradients(features: torch.Tensor, hooks: Adapters) -> list[torch.Tensor]:
    found = torch.autograd.grad(features.square().sum(), list(hooks.parameters()))
    return [gradient.cpu() for gradient in found]


@pytest.fixture
def both(tiny_vit) -> tuple[FrozenViT, FrozenViT]:
    """The network on the CPU, and on the GPU compiled for batches of four."""
    torch.compiler.reset()
    counters.clear()
    return load_backbone(tiny_vit), load_backbone(tiny_vit).to(GPU).compile_for({4})


def test_features_and_gradients_are_the_cpus_without_recompiling(both):
    plain, compiled = both

    def check(seed: int, count: int) -> None:
        images, mine, theirs = images_of(plain, count, seed), adapters(plain, seed), adapters(plain, seed).to(GPU)
        expected, found = plain(images, mine), compiled(images.to(GPU), theirs)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradients(found, theirs), gradients(expected, mine), rtol=1e-3, atol=1e-3)

    for seed in (1, 2, 3):  # warm-up, recording and replay
        check(seed, 4)
    with torch.compiler.set_stance("fail_on_recompile"):  # another task's adapter, and the rest of a batch
        check(4, 4)
        check(5, 3)
    assert not counters["inductor"]["cudagraph_skips"], "the passes are recorded as CUDA graphs"


def test_a_replay_does_not_write_over_earlier_features(both):
    plain, compiled = both
    batches = [images_of(plain, 4, seed) for seed in range(6)]
    with torch.no_grad():
        found = [compiled(batch.to(GPU), NO_HOOKS) for batch in batches]  # all are kept until the last is computed
        for batch, features in zip(batches, found, strict=True):
            torch.testing.assert_close(features.cpu(), plain(batch, NO_HOOKS), rtol=1e-4, atol=1e-4)
    assert not counters["inductor"]["cudagraph_skips"]
