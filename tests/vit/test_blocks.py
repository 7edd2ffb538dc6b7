# SPDX-License-Identifier: Apache-2.0
"""Hooks on common families of networks, each against timm's own forward pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from support.toys import SHAPES, images_for, toy, toy_config
from torch import nn
from torch.nn import functional as F

from onea.errors import OneaError
from onea.research.methods.aper import SSF, VPT, FineTuned
from onea.research.methods.lora import LowRank, LowRankUpdates, check_rank
from onea.research.methods.prompting import InputPrompts, PrefixPrompts
from onea.vit.adapter import Adapters
from onea.vit.backbones import load_backbone
from onea.vit.blocks import rotary_embeddings
from onea.vit.frozen import FrozenFeatures, FrozenViT, freeze


@pytest.fixture(params=sorted(SHAPES), scope="module")
def vit(request) -> FrozenViT:
    return toy(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def timms(vit: FrozenViT, network: Any = None) -> torch.Tensor:
    network = vit.vit if network is None else network
    return network.forward_head(network.forward_features(images_for(vit)), pre_logits=True)


def check_hooked(found: torch.Tensor, expected: torch.Tensor, plain: torch.Tensor) -> None:
    """The hooked features equal timm's and differ from those without hooks."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, plain, rtol=1e-2, atol=1e-3)


def trained(vit: FrozenViT, generator: torch.Generator) -> Adapters:
    adapters = Adapters(vit.depth, vit.width, 4, generator=generator).eval()
    for adapter in adapters.adapters():
        adapter.up.weight.normal_(std=2.0, generator=generator)
    return adapters


def test_adapters(vit, generator):
    """Adapters are parallel to the MLP, for all norms and layer scales; also in compiled and split forward passes."""
    adapters = trained(vit, generator)
    network, streams = copy.deepcopy(vit.vit), {}
    for index, block in enumerate(network.blocks):
        own = adapters.blocks[index]
        block.norm2.register_forward_pre_hook(lambda _, x, i=index: streams.__setitem__(i, x[0]))
        block.register_forward_hook(lambda _, __, out, i=index, own=own: out + own(streams[i]))
    found, images = vit(images_for(vit), adapters), images_for(vit)
    check_hooked(found, timms(vit, network), vit(images))
    torch.testing.assert_close(vit.forward_from_block(vit.forward_to_block(images, adapters), adapters), found)
    torch.compiler.reset()
    try:
        torch.testing.assert_close(vit.compile_for({4}, "eager")(images, adapters), found, rtol=1e-4, atol=1e-5)
    finally:
        vit.compile_for(())


def test_lora(vit, generator):
    """LoRA equals adding its products to the projection matrices."""
    down = torch.randn(3, vit.width, generator=generator) / 7
    updates = [{name: LowRank(down, trains_down=True) for name in ("q", "v")} for _ in range(vit.depth)]
    hooks = LowRankUpdates(updates)
    network = copy.deepcopy(vit.vit)
    for index, block in enumerate(network.blocks):
        for name, update in hooks.block(index).items():
            update.up.normal_(generator=generator)
            row = "qkv".index(name) * vit.width
            joint = block.attn.qkv
            target = (
                joint.weight[row : row + vit.width] if joint is not None else getattr(block.attn, f"{name}_proj").weight
            )
            target += update.matrix()
    check_hooked(vit(images_for(vit), hooks), timms(vit, network), vit(images_for(vit)))


def test_prompts_between_class_token_and_patches(vit, generator):
    """Patches keep their rotary positions, and prompts have none."""
    hooks = InputPrompts(vit, torch.randn(1, 3, vit.width, generator=generator))
    network, images = copy.deepcopy(vit.vit), images_for(vit)
    x = network._pos_embed(network.patch_embed(images))
    x, rope = x if isinstance(x, tuple) else (x, None)
    x = network.norm_pre(hooks.tokens(x, vit))
    for block in network.blocks:
        if hasattr(block.attn, "num_prefix_tokens"):
            block.attn.num_prefix_tokens += 3
        x = block(x, rope=rope) if rope is not None else block(x)
    check_hooked(vit(images, hooks), hooks.pool(network.norm(x)), vit(images))


@pytest.mark.parametrize("deep", [False, True])
def test_tokens_after_the_patches(vit, generator, deep):
    hooks = VPT(vit.depth, vit.width, 2, deep=deep)
    hooks.prompts.normal_(generator=generator)
    images, turned = images_for(vit), rotary_embeddings(vit.vit, 0)
    x = vit.embed(images)
    for index, block in enumerate(vit.vit.blocks):
        x = hooks.before_block(index, x)
        if turned:  # an angle of zero for the tokens after the patches
            table = turned[index].table
            still = table.new_tensor([0.0, 1.0]).repeat_interleave(table.shape[-1] // 2).expand(2, -1)
            x = block(x, rope=torch.cat([table, still]))
        else:
            x = block(x)
        x = hooks.after_block(index, x)
    check_hooked(vit(images, hooks), vit.features(x), vit(images))


def test_prefixes_of_keys_and_values(vit, generator, monkeypatch):
    by_block = {i: tuple(torch.randn(2, 1, 2, vit.width, generator=generator)) for i in range(vit.depth)}
    hooks = PrefixPrompts(vit.heads, by_block)
    found, plain = vit(images_for(vit), hooks), vit(images_for(vit))
    attend, waiting = F.scaled_dot_product_attention, iter(range(vit.depth))

    def prefixed(q, k, v, **rest):
        if (index := next(waiting, None)) is not None:  # attention pooling follows after the blocks
            keys, values = (part.expand(len(k), -1, -1, -1) for part in hooks.prefix(index))
            k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        return attend(q, k, v, **rest)

    monkeypatch.setattr(F, "scaled_dot_product_attention", prefixed)
    check_hooked(found, timms(vit), plain)


def test_scales_and_shifts(vit, generator):
    """Scales and shifts follow every operation; a projection with separate biases is one operation."""
    ssf = SSF(vit, generator, deviation=0.3)
    network = copy.deepcopy(vit.vit)

    def wrap(name: str, layer: nn.Module) -> None:
        key = name.replace(".", "_")
        bias: torch.Tensor | float = 0.0
        if name.endswith(".qkv") and getattr(parent := network.get_submodule(name[:-4]), "q_bias", None) is not None:
            bias = torch.cat([parent.q_bias, parent.k_bias, parent.v_bias]).clone()
            parent.q_bias.zero_(), parent.v_bias.zero_()
            parent.qkv_bias_separate = True  # otherwise timm bypasses the layer
        shape = (-1, 1, 1) if isinstance(layer, nn.Conv2d) else (-1,)
        scale, shift = ssf.scale[key].view(shape), ssf.shift[key].view(shape)
        layer.register_forward_hook(lambda _, __, out: (out + bias) * scale + shift)

    for name, layer in network.named_modules():
        if isinstance(layer, nn.LayerNorm | nn.Linear | nn.Conv2d):
            wrap(name, layer)
    check_hooked(vit(images_for(vit), ssf), timms(vit, network), vit(images_for(vit)))


def test_fine_tuning(vit):
    tuned = FineTuned(vit)
    for parameter in tuned.parameters():
        parameter.mul_(1.1)
    check_hooked(vit(images_for(vit), tuned), timms(vit, tuned.copy), vit(images_for(vit)))


def test_fp8_products_approximate_full_precision(vit):
    """FP8 works in the layers of all families; the original layers are restored."""
    images, copied = images_for(vit), copy.deepcopy(vit)
    plain = vit(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        small = copied.cast_matrices(torch.bfloat16, fp8=True)(images)
    assert 0 < float((small - plain).norm() / plain.norm()) < 0.3


@pytest.mark.parametrize("name", ["DINOv3", "EVA-02", "DINOv2", "SigLIP"])
def test_image_size(name):
    """Positions are resampled as by timm; the digest is still that of the weights."""
    vit = toy(name)
    size = vit.size + 2 * vit.vit.patch_embed.patch_size[0]
    network = copy.deepcopy(vit.vit)
    network.set_input_size(img_size=(size, size))
    assert vit.with_image_size(size).size == size
    assert vit.tokens == network.num_prefix_tokens + network.patch_embed.num_patches
    torch.testing.assert_close(vit(images_for(vit)), timms(vit, network))
    assert not any(parameter.requires_grad for parameter in vit.parameters())
    with pytest.raises(OneaError, match=f"image_size is {size + 1}, but patches of '{name}' are .* choose {size}"):
        vit.with_image_size(size + 1)


def test_heads_with_shared_keys_support_all_hooks_but_lora():
    """LoRA is not supported, because the three projections differ in width."""
    if not timm.is_model(name := "vit_large_patch16_sapiens2"):
        pytest.skip("this timm has no such architecture")
    config = toy_config(name, num_kv_heads=[3, 1])
    vit = freeze(timm.create_model(config.architecture, **config.build_args()).eval(), "shared", "", config)
    torch.testing.assert_close(vit(images_for(vit)), timms(vit))
    with pytest.raises(OneaError, match=r"share keys and values.*LoRA does not fit; choose a method with adapters"):
        check_rank(4, vit)
    with pytest.raises(OneaError, match="has a RmsNorm, which SSF does not support"):
        SSF(vit, torch.Generator())


@pytest.mark.parametrize("name", ["test_convnext", "swin_tiny_patch4_window7_224", "beit_base_patch16_224"])
def test_other_networks_give_features_without_hooks(name, generator):
    small = {"swin_tiny_patch4_window7_224": {"img_size": 56, "embed_dim": 24, "depths": (1, 1), "num_heads": (1, 2)}}
    small["beit_base_patch16_224"] = {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 3}
    network = timm.create_model(name, num_classes=0, **small.get(name, {})).eval()
    config = toy_config(name)
    vit = freeze(network, name, "", config)
    vit.size = small.get(name, {}).get("img_size", 64)
    assert isinstance(vit, FrozenFeatures)
    found = vit(images_for(vit))
    assert found.shape == (3, vit.width)
    torch.testing.assert_close(found, timms(vit).flatten(1))
    with pytest.raises(OneaError, match=f"Backbone '{name}' does not support hooks: it is timm's"):
        vit(images_for(vit), Adapters(2, vit.width, 2, generator=generator))


def test_hook_support_is_checked_without_a_download(monkeypatch):
    from onea.research.methods import method_class
    from onea.vit.backbones import nearest_with_hooks, no_hooks_reason

    monkeypatch.setattr("onea.vit.weight_files.pretrained_network", lambda *_: pytest.fail("fetched"))
    assert no_hooks_reason("vit_small_patch16_dinov3.lvd1689m") == ""
    reason = no_hooks_reason("convnext_tiny.in12k")
    assert nearest_with_hooks("beit_base_patch16_224.in22k_ft_in22k").startswith("deit3_base_patch16_224.fb_in22k")
    assert not no_hooks_reason(nearest_with_hooks("resnet50.a1_in1k"))
    with pytest.raises(OneaError, match=r"One-A trains an adapter.*it is timm's ConvNeXt.*choose simplecil"):
        method_class("one-a").check_backbone("convnext_tiny.in12k", reason)
    method_class("simplecil").check_backbone("convnext_tiny.in12k", reason)
    with pytest.raises(OneaError, match="Unknown backbone"):
        load_backbone("vit_small_patch16_dinov4.lvd1689m")
