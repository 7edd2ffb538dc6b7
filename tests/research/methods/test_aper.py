# SPDX-License-Identifier: Apache-2.0
"""The five variants of APER, and the modules that they insert into the frozen network."""

from __future__ import annotations

import copy

import pytest
import torch
from support.methods import learn_all, passes, prepared, shown_images
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn import functional as F

from onea.errors import OneaError
from onea.options import make_options
from onea.research.methods import method_class
from onea.research.methods.aper import SSF, VPT, AperAdapterOptions, AperVPTOptions, FineTuned
from onea.research.methods.presets import preset_options
from onea.vit.backbones import digest_of
from onea.vit.frozen import FrozenViT
from onea.vit.network_config import NetworkConfig

VARIANTS = ["aper-adapter", "aper-finetune", "aper-ssf", "aper-vpt-shallow", "aper-vpt-deep"]
# Plain ViTs with every kind of pooling, prefix tokens and missing biases.
SHAPES = {
    "class token": {},
    "average": {"class_token": False, "global_pool": "avg"},
    "average of all, with registers": {"reg_tokens": 2, "global_pool": "avg", "pool_include_prefix": True},
    "no biases": {"qkv_bias": False, "pre_norm": True},
    "extra norms": {"qk_norm": True, "init_values": 0.3},
}


@pytest.fixture(params=VARIANTS)
def variant(request) -> str:
    return request.param


@pytest.fixture(params=sorted(SHAPES))
def vit(request) -> FrozenViT:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = VisionTransformer(
            img_size=28, patch_size=14, embed_dim=32, depth=3, num_heads=2, num_classes=0, **SHAPES[request.param]
        )
        for parameter in model.parameters():  # zero biases and unit norms would hide mistakes
            parameter.data += 0.1 * torch.randn_like(parameter)
    return FrozenViT(model, "tiny", "", NetworkConfig())


def images_of(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 3, 28, 28, generator=torch.Generator().manual_seed(5))


# The method


def test_a_single_class_first_task_reduces_aper_to_simplecil(variant, tiny_run):
    ready, simple = (prepared(tiny_run, name, sizes="1,3,2") for name in (variant, "simplecil"))
    assert ready.method.learn(ready.task(0)) == {"trained": False}
    learn_all(ready, [1, 2])
    learn_all(simple)
    images = shown_images(ready)
    # Two equivalent computations, whose rounding may differ.
    torch.testing.assert_close(ready.method.scores(images), simple.method.scores(images), rtol=1e-5, atol=1e-6)
    assert passes(ready.method, images) == 1


def test_training_on_a_single_class_keeps_the_adapter_at_the_identity(tiny_run):
    options = tiny_run["options"] | {"single_class": "train"}
    ready, simple = (prepared(tiny_run, name, sizes="1,3,2", options=options) for name in ("aper-adapter", "simplecil"))
    learn_all(ready)
    learn_all(simple)
    images = shown_images(ready)
    assert torch.equal(ready.method.features(images), ready.method.features(images, ready.method.adapted))
    # The cosine of [f, f] is that of f.
    torch.testing.assert_close(ready.method.scores(images), simple.method.scores(images), rtol=1e-5, atol=1e-6)


def test_requested_training_on_a_single_class_is_finite(variant, tiny_run):
    options = tiny_run["options"] | {"single_class": "train"}
    ready = prepared(tiny_run, variant, sizes="1,5", options=options)
    report = ready.method.learn(ready.task(0))
    assert report["losses"] == [0.0, 0.0]
    ready.method.learn(ready.task(1))
    assert torch.isfinite(ready.method.scores(shown_images(ready))).all()
    assert passes(ready.method, shown_images(ready)) == 2


def test_only_the_first_task_trains(variant, tiny_run):
    ready = prepared(tiny_run, variant)
    report = ready.method.learn(ready.task(0))
    assert report["trained"]
    assert len(report["losses"]) == report["epochs"] == 2
    first = {name: value.clone() for name, value in ready.method.adapted.state_dict().items()}
    untrained = ready.method.new_module(torch.Generator()).state_dict()
    assert any(not torch.equal(value, untrained[name]) for name, value in first.items())
    assert ready.method.learn(ready.task(1)) == ready.method.learn(ready.task(2)) == {"trained": False}
    assert all(torch.equal(value, first[name]) for name, value in ready.method.adapted.state_dict().items())
    assert not any(value.requires_grad for value in ready.method.adapted.parameters())
    assert not any(module.training for module in ready.method.adapted.modules())
    assert passes(ready.method, shown_images(ready)) == ready.method.forward_passes(ready.method.options, 3) == 2


def test_the_order_of_later_tasks_does_not_matter(variant, tiny_run):
    ready, swapped = prepared(tiny_run, variant), prepared(tiny_run, variant)
    learn_all(ready, [0, 1, 2])
    learn_all(swapped, [0, 2, 1])
    images = shown_images(ready)
    columns = [0, 1, 2, 4, 5, 3]  # tasks of three, one and two classes
    assert torch.equal(ready.method.prototypes[columns], swapped.method.prototypes)
    torch.testing.assert_close(ready.method.scores(images)[:, columns], swapped.method.scores(images))


def test_scores_are_cosines_of_concatenated_features(variant, tiny_run):
    options = tiny_run["options"] | {"scale": 10.0}  # an adapter strong enough to tell the two branches apart
    ready = prepared(tiny_run, variant, options=options)
    method = learn_all(ready)

    def plain_and_adapted(images):
        return method.features(images).double(), method.features(images, method.adapted).double()

    test = plain_and_adapted(shown_images(ready))
    train = plain_and_adapted(ready.train.images.test_views(torch.arange(len(ready.train.labels))))
    means = [torch.stack([part[ready.train.labels == c].mean(0) for c in range(6)]) for part in train]
    dots = sum(features @ mean.T for features, mean in zip(test, means, strict=True))
    lengths = [sum(part.pow(2).sum(1) for part in parts).sqrt() for parts in (test, means)]
    expected = dots / (lengths[0][:, None] * lengths[1][None, :])
    scores = method.scores(shown_images(ready)).double()
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    averaged = sum(F.normalize(f) @ F.normalize(m).T for f, m in zip(test, means, strict=True)) / 2
    assert (averaged - expected).abs().max() > 1e-6, "averaging two cosines is another classifier"


def test_training_on_a_bf16_network_is_in_float32(variant, tiny_run):
    ready = prepared(tiny_run, variant, precision="bf16")
    before = digest_of(ready.method.vit.state_dict())
    assert ready.method.vit.vit.blocks[0].attn.qkv.weight.dtype == torch.bfloat16
    learn_all(ready)
    assert {value.dtype for value in ready.method.state_dict().values()} == {torch.float32}
    assert torch.isfinite(ready.method.scores(shown_images(ready))).all()
    assert digest_of(ready.method.vit.state_dict()) == before


def test_published_options_are_those_of_the_official_configurations(variant):
    kind = method_class(variant)
    official = {
        "aper-adapter": (20, 0.01, 48, 5e-4),
        "aper-finetune": (5, 0.01, 128, 5e-4),
        "aper-ssf": (20, 0.01, 48, 5e-4),
        "aper-vpt-shallow": (20, 0.01, 48, 5e-4),
        "aper-vpt-deep": (5, 0.05, 16, 5e-4),
    }[variant]
    for data in ("cifar100", "cub200", "imagenet-a"):
        options = make_options(kind.Options, preset_options(variant, f"paper/{data}"))
        actual = (options.epochs, options.learning_rate, options.batch_size, options.weight_decay)
        assert actual == official
        assert (options.head, options.head_scale) == ("cosine", 1.0)
    imagenet_r = preset_options(variant, "paper/imagenet-r")
    assert imagenet_r == preset_options(variant, "paper")
    assert (imagenet_r["learning_rate"] == 0.05) == (variant in ("aper-adapter", "aper-vpt-deep"))


@pytest.mark.parametrize("switch", [{"optimiser": "sgd"}, {"head_rate": 1.0}])
def test_optimiser_and_head_rate_of_fine_tuning(switch, tiny_run):
    options = tiny_run["options"] | {"learning_rate": 1e-4}
    plain, switched = (prepared(tiny_run, "aper-finetune", options=options | change).method for change in ({}, switch))
    for method in (plain, switched):
        method.learn(prepared(tiny_run, "aper-finetune").task(0))
    assert not torch.equal(plain.prototypes, switched.prototypes)
    with pytest.raises(OneaError, match="head_rate is 0"):
        prepared(tiny_run, "aper-finetune", options=options | {"head_rate": 0.0})


def test_options_are_checked():
    assert AperAdapterOptions().rank == 64
    assert AperVPTOptions().prompt_length == 5
    for kind, values in ((AperAdapterOptions, {"rank": 0}), (AperVPTOptions, {"prompt_length": 0})):
        with pytest.raises(OneaError, match="must be at least 1"):
            kind(**values)


# The modules


def test_ssf_equals_scaling_and_shifting_every_output(vit):
    ssf = SSF(vit, torch.Generator().manual_seed(1), deviation=0.3)
    explicit = copy.deepcopy(vit.vit)
    for name, module in explicit.named_modules():
        if isinstance(module, nn.LayerNorm | nn.Linear | nn.Conv2d):
            key = name.replace(".", "_")
            shape = (-1, 1, 1) if isinstance(module, nn.Conv2d) else (-1,)
            scale, shift = ssf.scale[key].reshape(shape), ssf.shift[key].reshape(shape)
            module.register_forward_hook(lambda _, __, y, scale=scale, shift=shift: y * scale + shift)
    features = explicit.forward_head(explicit.forward_features(images_of()), pre_logits=True)
    torch.testing.assert_close(vit(images_of(), ssf), features, rtol=1e-4, atol=1e-4)


def test_ssf_starts_near_the_identity_and_gives_every_parameter_a_gradient(vit):
    assert torch.allclose(vit(images_of(), SSF(vit, torch.Generator(), deviation=0.0)), vit(images_of()), atol=1e-5)
    ssf = SSF(vit, torch.Generator().manual_seed(1))
    scales, shifts = (torch.cat([value.data for value in part.values()]) for part in (ssf.scale, ssf.shift))
    assert abs(scales.mean() - 1) < 0.002
    assert abs(shifts.mean()) < 0.002
    assert scales.std() == pytest.approx(0.02, rel=0.1)
    assert shifts.std() == pytest.approx(0.02, rel=0.1)
    (vit(images_of(), ssf) ** 3).sum().backward()
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in ssf.parameters())
    assert all(value.grad is None for value in vit.parameters())


def test_parameter_counts_at_vit_b_are_as_published():
    with torch.device("meta"):
        vit = FrozenViT(VisionTransformer(num_classes=0), "base", "", NetworkConfig())

    def size(module):
        return sum(value.numel() for value in module.parameters())

    # The SSF paper counts 0.28 M with a linear head of 100 classes.
    assert round((size(SSF(vit, torch.Generator())) + 100 * 769) / 1e6, 2) == 0.28
    assert size(VPT(12, 768, 5, deep=True)) == 12 * 5 * 768
    assert size(VPT(12, 768, 5, deep=False)) == 5 * 768


@pytest.mark.parametrize("deep", [False, True])
def test_vpt_equals_timm_blocks_on_a_longer_sequence(vit, deep):
    vpt = VPT(vit.depth, vit.width, 5, deep=deep)
    nn.init.normal_(vpt.prompts, generator=torch.Generator().manual_seed(1))
    images, model = images_of(), vit.vit
    x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    length = x.shape[1]
    for index, block in enumerate(model.blocks):
        if deep or index == 0:
            x = torch.cat([x[:, :length], vpt.prompts[index].expand(len(x), -1, -1)], dim=1)
        x = block(x)
    expected = model.forward_head(model.norm(x[:, :length]), pre_logits=True)
    torch.testing.assert_close(vit(images, vpt), expected, rtol=1e-4, atol=1e-5)
    assert vit.forward_blocks(vit.embed(images, vpt), vpt).shape[1] == length, "no prompt is pooled"


@pytest.mark.parametrize("deep", [False, True])
def test_zero_tokens_affect_the_features_and_get_gradients(vit, deep):
    vpt = VPT(vit.depth, vit.width, 5, deep=deep)
    assert (vpt.prompts == 0).all()
    features = vit(images_of(), vpt)
    assert (features - vit(images_of())).abs().max() > 1e-4
    (features**3).sum().backward()
    assert all(vpt.prompts.grad[block].abs().sum() > 0 for block in range(len(vpt.prompts)))


def test_a_fine_tuned_copy_trains_like_the_network_itself(vit):
    tuned, direct = FineTuned(vit), copy.deepcopy(vit.vit).requires_grad_(True)
    images = images_of()
    # The same weights at another address: PyTorch 2.6 may round each sum differently, by 2**-24 of its terms. Features
    # are sums over about ten layers of order 1, so 16 times that is allowed; wrong weights change the first digits.
    torch.testing.assert_close(vit(images, tuned), vit(images), rtol=0, atol=2**-20)
    for _ in range(2):  # two steps of plain gradient descent
        for features, module in ((vit(images, tuned), tuned), (direct(images), direct)):
            module.zero_grad()
            (features**3).mean().backward()
            for parameter in module.parameters():
                parameter.data -= 0.1 * parameter.grad
    for name, value in direct.named_parameters():
        torch.testing.assert_close(tuned.copy.get_parameter(name), value, rtol=1e-3, atol=1e-5)
    assert (vit(images, tuned) - vit(images)).abs().max() > 1e-3
    assert all(value.grad is None for value in vit.parameters())


def test_the_fine_tuned_copy_of_a_bf16_network_is_float32(vit):
    vit.cast_matrices(torch.bfloat16)
    tuned = FineTuned(vit)
    assert {value.dtype for value in tuned.parameters()} == {torch.float32}
    assert all(value.requires_grad for value in tuned.parameters())
    assert not any(value.requires_grad for value in vit.parameters())
