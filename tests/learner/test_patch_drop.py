# SPDX-License-Identifier: Apache-2.0
"""Patch dropout in training: less work per step, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.methods import learn_all, prepared
from support.tiny import write_tiny_vit
from support.toys import images_for, toy

from onea.errors import OneaError
from onea.learner import optimisation
from onea.learner.adapter_training import AdapterTraining, initial_adapters, train_adapter
from onea.research.runs.evaluation import count_flops
from onea.vit.adapter import Adapters
from onea.vit.backbones import load_backbone
from onea.vit.batching import num_kept_patches, sample_patches
from onea.vit.hooks import NO_HOOKS

HALF = {"patch_drop_rate": 0.5}


def prepare_run(values: dict, method: str = "one-a-plus", **options):
    return prepared(values, method, options=values["options"] | options)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.floats(0, 0.99), st.integers(0, 99))
def test_every_image_has_its_own_sample_of_patches(patches, rate, seed):
    kept = num_kept_patches(patches, rate)
    assert 1 <= kept <= patches
    drawn, again = (sample_patches(kept, patches, 50, torch.Generator().manual_seed(seed)) for _ in range(2))
    assert torch.equal(drawn, again)
    assert drawn.shape == (50, kept)
    assert all(
        len(set(row)) == kept and row == sorted(row) and set(row) <= set(range(patches)) for row in drawn.tolist()
    )
    if 1 < kept < patches:
        assert len({tuple(row) for row in drawn.tolist()}) > 1


def test_every_patch_is_kept_equally_often():
    counts = torch.bincount(sample_patches(3, 12, 40_000, torch.Generator().manual_seed(1)).flatten())
    assert ((counts - 10_000).abs() < 6 * (40_000 * 0.25 * 0.75) ** 0.5).all()


@pytest.mark.parametrize("name", ["DINOv2", "CLIP", "SigLIP"])
def test_the_network_gets_prefix_tokens_and_sampled_patches(name):
    vit = toy(name)
    images, prefix = images_for(vit), vit.vit.num_prefix_tokens
    patches = sample_patches(2, vit.tokens - prefix, len(images), torch.Generator().manual_seed(1))
    tokens = vit.embed(images)
    for image, own in enumerate(patches.tolist()):  # as in timm's blocks for a single image
        x = tokens[image : image + 1, [*range(prefix), *(prefix + patch for patch in own)]]
        for block in vit.vit.blocks:
            x = block(x)
        expected = vit.vit.forward_head(vit.vit.norm(x), pre_logits=True)
        torch.testing.assert_close(vit(images, NO_HOOKS, patches)[image], expected[0], rtol=1e-4, atol=1e-5)
    every = torch.arange(vit.tokens - prefix).expand(len(images), -1)
    torch.testing.assert_close(vit(images, NO_HOOKS, every), vit(images))


def test_compiled_passes_get_the_same_patches(tiny_vit):
    torch.compiler.reset()
    vit = load_backbone(str(tiny_vit))
    images = images_for(vit, 5)
    hooks = Adapters(2, vit.width, 4, generator=torch.Generator().manual_seed(1), dropout=0.0, first_block=1)
    first, second = (sample_patches(2, 4, 5, torch.Generator().manual_seed(seed)) for seed in (1, 2))

    def features(patches):
        return vit.forward_from_block(vit.forward_to_block(images, hooks), hooks, patches), vit(images, hooks, patches)

    expected = [features(patches) for patches in (first, second)]
    assert not torch.allclose(expected[0][1], expected[1][1])
    vit.compile_for({8}, "aot_eager")  # five images are padded to eight
    torch.testing.assert_close(features(first), expected[0], rtol=1e-4, atol=1e-4)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(features(second), expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"adapter_blocks": 1, "cached_views": 2}, {"adapter_blocks": 1, "cached_views": 0}]
)
def test_only_training_steps_drop_patches(tiny_run, options):
    ready = prepare_run(tiny_run, **HALF, **options)
    seen: dict[bool, set[int]] = {True: set(), False: set()}
    block = ready.method.vit.vit.blocks[-1]
    block.norm1.register_forward_pre_hook(lambda _, inputs: seen[torch.is_grad_enabled()].add(inputs[0].shape[1]))
    assert ready.method.learn(ready.task(0))["trained"]
    assert seen == {True: {1 + 2}, False: {1 + 4}}


def test_patch_dropout_of_cached_tokens_under_autocast(tiny_run):
    """A CPU computes in bfloat16 and caches tokens in float16, which CPU autocast does not concatenate."""
    ready = prepare_run(tiny_run | {"precision": "bf16"}, **HALF, adapter_blocks=1, cached_views=2)
    report = ready.method.learn(ready.task(0))
    assert report["trained"]
    assert torch.tensor(report["losses"]).isfinite().all()


def test_every_batch_has_new_patches_and_a_seed_repeats_them(tiny_run, monkeypatch):
    drawn: list[torch.Tensor] = []

    def record(*args):
        drawn.append(sample_patches(*args))
        return drawn[-1]

    monkeypatch.setattr("onea.learner.adapter_training.sample_patches", record)
    first, second = (learn_all(prepare_run(tiny_run, **HALF), [0]) for _ in range(2))
    batches = len(drawn) // 2
    assert batches > 2
    assert len({tuple(batch.flatten().tolist()) for batch in drawn[:batches]}) == batches
    assert all(torch.equal(*pair) for pair in zip(drawn[:batches], drawn[batches:], strict=True))
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    other = learn_all(prepare_run(tiny_run), [0])
    assert not all(torch.equal(value, other.state_dict()[name]) for name, value in first.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"adapter_blocks": 1, "cached_views": 2}])
@pytest.mark.parametrize("method", ["one-a", "one-a-plus"])
def test_a_resumed_run_equals_an_uninterrupted_one(tiny_run, method, options):
    whole = learn_all(prepare_run(tiny_run, method, **HALF, **options))
    first, second = (prepare_run(tiny_run, method, **HALF, **options) for _ in range(2))
    learn_all(first, [0, 1])
    second.method.load_state_dict({name: value.clone() for name, value in first.method.state_dict().items()})
    learn_all(second, [2])
    found = second.method.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in whole.state_dict().items())


def test_each_process_gets_the_patches_of_its_images(tiny_run, monkeypatch):
    ready = prepare_run(tiny_run, **HALF)
    task, runtime, seen = ready.task(0), ready.method.runtime, []
    trained = optimisation.ParamGroup(torch.nn.Linear(1, 1))

    def loss(images, labels, rows):
        seen.append((len(images), rows, len(labels)))
        return trained.module.weight.sum()

    monkeypatch.setattr(type(runtime.processes), "shard", lambda _, batch: batch[1::2])
    recipe = AdapterTraining(batch_size=6).recipe(epochs=1)
    optimisation.train(
        [trained], loss, task, recipe, runtime, sharded=True, sampler=lambda count, _: torch.arange(count)[:, None]
    )
    assert seen
    assert all(rows[:, 0].tolist() == list(range(1, whole, 2)) and len(rows) == own for own, rows, whole in seen)


def test_the_cost_of_a_step_is_proportional_to_the_patches(tiny_run, tmp_path):
    write_tiny_vit(tmp_path / "vit.safetensors", depth=4, size=112)
    ready = prepared(tiny_run | {"backbone": str(tmp_path / "vit.safetensors")}, "one-a")
    task, vit, runtime = ready.task(0), ready.method.vit, ready.method.runtime

    def work(rate: float) -> int:
        options = AdapterTraining(rank=11, batch_size=8, epochs=1, min_epochs=1, max_epochs=1, patch_drop_rate=rate)
        adapters = initial_adapters(vit, options, 1)
        return count_flops(lambda: train_adapter(vit, adapters, task, options, runtime, None))

    whole = work(0.0)
    # Images are cropped and embedded whole; that is a tenth of the work of a network so narrow, and 2 % of a ViT-S's.
    assert work(0.5) < 0.6 * whole
    assert work(0.75) < 0.36 * whole


@pytest.mark.parametrize("rate", [-0.1, 1.0, 2])
def test_a_rate_of_one_is_refused(rate):
    with pytest.raises(OneaError, match=r"patch_drop_rate is .*; it must lie in \[0, 1\)"):
        AdapterTraining(patch_drop_rate=rate)


@pytest.mark.parametrize("name", ["DINOv3", "EVA-02", "PE"])
def test_networks_with_rotary_positions_are_refused(name):
    with pytest.raises(OneaError, match=r"patch_drop_rate is 0\.5, but '.*' uses rotary .*; set it to 0\."):
        initial_adapters(toy(name), AdapterTraining(**HALF), 1)
    initial_adapters(toy(name), AdapterTraining(), 1)
