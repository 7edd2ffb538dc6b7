# SPDX-License-Identifier: Apache-2.0
"""Adapters in the last blocks only: their weights, and forward passes that are split at the first of them."""

from __future__ import annotations

import pytest
import torch
from support.tiny import write_tiny_vit

from onea.vit.adapter import Adapters
from onea.vit.backbones import load_backbone

DEPTH = 4


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    path = tmp_path_factory.mktemp("deep") / "tiny.safetensors"
    write_tiny_vit(path, depth=DEPTH)
    return load_backbone(str(path))


@pytest.fixture(scope="module")
def images(vit):
    return torch.randn(5, 3, vit.size, vit.size, generator=torch.Generator().manual_seed(1))


def trained(vit, first_block: int = 0, seed: int = 0) -> Adapters:
    generator = torch.Generator().manual_seed(seed)
    made = Adapters(vit.depth, vit.width, 4, generator=generator, dropout=0.0, first_block=first_block)
    with torch.no_grad():
        for adapter in made.adapters():
            adapter.up.weight.normal_(std=0.3, generator=generator)
    return made


def gradients(features: torch.Tensor, adapters: Adapters) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(features.square().sum(), list(adapters.parameters()))


def test_adapters_in_all_blocks_have_the_same_initial_weights(vit, images):
    both = [
        Adapters(DEPTH, vit.width, 4, generator=torch.Generator().manual_seed(3), **extra)
        for extra in ({}, {"first_block": 0})
    ]
    one, other = (each.state_dict() for each in both)
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    adapters = trained(vit)
    whole = vit.features(vit.forward_blocks(vit.embed(images), adapters))
    assert torch.equal(vit(images, adapters), whole)


@pytest.mark.parametrize("first", range(DEPTH))
def test_tensors_are_named_by_the_blocks_of_the_network(vit, first):
    names = {name.rsplit(".", 2)[0] for name in trained(vit, first).state_dict()}
    assert names == {f"blocks.{block}" for block in range(first, DEPTH)}


@pytest.mark.parametrize("first", range(DEPTH))
def test_blocks_without_an_adapter_equal_zero_adapters(vit, images, first):
    last, every = trained(vit, first), trained(vit)
    with torch.no_grad():
        for number, adapter in enumerate(every.adapters()):
            if number < first:
                adapter.up.weight.zero_()
    every.load_state_dict(last.state_dict(), strict=False)
    assert torch.equal(vit(images, last), vit(images, every))


@pytest.mark.parametrize("first", range(DEPTH))
def test_the_pass_can_be_split_at_the_first_adapter(vit, images, first):
    adapters = trained(vit, first)
    below = vit.forward_to_block(images, adapters)
    assert not below.requires_grad, "blocks without adapters need no gradient"
    above = vit.forward_from_block(below, adapters)
    whole = vit(images, adapters)
    assert torch.equal(above, whole)
    for mine, theirs in zip(gradients(above, adapters), gradients(whole, adapters), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(vit.forward_to_block(images, trained(vit, first, seed=9)), below), (
        "for any weights of the adapters"
    )


@pytest.mark.parametrize("first", range(DEPTH))
def test_adapters_from_their_tensors(vit, images, first):
    adapters = trained(vit, first)
    again = Adapters.from_tensors(adapters.state_dict(), adapters.scale)
    assert (again.first_block, again.shape) == (first, (DEPTH, vit.width))
    assert torch.equal(vit(images, again), vit(images, adapters))


def test_incomplete_adapters_are_refused(vit):
    tensors = trained(vit, 2).state_dict()
    for name in tensors:
        with pytest.raises((KeyError, RuntimeError)):
            Adapters.from_tensors({other: value for other, value in tensors.items() if other != name}, 0.1)
    with pytest.raises((KeyError, ValueError)):
        Adapters.from_tensors({"blocks.first.down.weight": tensors["blocks.2.down.weight"]}, 0.1)
    with pytest.raises(KeyError):
        Adapters.from_tensors({}, 0.1)


def test_a_compiled_network_with_adapters_in_the_last_blocks(vit, images):
    torch.compiler.reset()
    compiled = vit.compile_for({len(images)}, "eager")
    try:
        for first in (0, 3):
            adapters = trained(vit, first)
            mine, plain = compiled(images, adapters), vit.forward_eager(images, adapters)
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(gradients(mine, adapters), gradients(plain, adapters), rtol=1e-4, atol=1e-4)
            below = compiled.forward_to_block(images, adapters, 2)
            expected = vit.forward_blocks(vit.embed(images), adapters, stop=2)
            torch.testing.assert_close(below, expected, rtol=1e-5, atol=1e-5)
            blank = vit.forward_blocks(vit.embed(images), stop=2)
            assert torch.allclose(below, blank, atol=1e-5) == (first > 2), (
                "adapters in earlier blocks change the tokens"
            )
    finally:
        vit.compile_for(())
