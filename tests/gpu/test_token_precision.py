# SPDX-License-Identifier: Apache-2.0
"""Where a GPU trains in bf16, tokens are added up in bf16; answers are computed as before."""

from __future__ import annotations

import pytest
import torch

from onea.runtime import make_runtime
from onea.vit.adapter import Adapters
from onea.vit.backbones import load_backbone
from onea.vit.frozen import FrozenViT

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def network(tiny_vit):
    runtime = make_runtime("cuda", "bf16")
    vit = load_backbone(tiny_vit).cast_matrices(runtime.dtype).to(GPU)
    hooks = Adapters(vit.depth, vit.width, 4, generator=torch.Generator().manual_seed(1), dropout=0.0).to(GPU)
    images = torch.randn(4, 3, vit.size, vit.size, generator=torch.Generator().manual_seed(2)).to(GPU)

    def features() -> torch.Tensor:
        with runtime.autocast():
            return vit(images, hooks)

    return vit, features


def noted(monkeypatch) -> list[torch.dtype]:
    """The precision of the tokens that enter each block, in the order of the passes."""
    found, block = [], FrozenViT._block
    monkeypatch.setattr(
        FrozenViT, "_block", lambda vit, index, x, *rest: found.append(x.dtype) or block(vit, index, x, *rest)
    )
    return found


def test_answers_are_computed_from_tokens_in_full_precision(network, monkeypatch):
    _, features = network
    precisions = noted(monkeypatch)
    with torch.no_grad():
        found = features()
        monkeypatch.setattr(FrozenViT, "_cast_stream", lambda vit, x, index: x)
        assert torch.equal(found, features())
    assert set(precisions) == {torch.float32}


def test_training_adds_them_up_in_bf16_but_for_the_last_block(network, monkeypatch):
    vit, features = network
    precisions = noted(monkeypatch)
    found = features()
    assert precisions == [torch.bfloat16] * (vit.depth - 1) + [torch.float32]
    assert found.dtype == torch.float32
    with torch.no_grad():
        exact = features()
    assert float((found.detach() - exact).norm() / exact.norm()) < 0.05
