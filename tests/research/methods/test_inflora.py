# SPDX-License-Identifier: Apache-2.0
"""InfLoRA: where a task may act, what folding keeps, and what a single class does."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from support.methods import learn_all, prepared, shown_images

from onea import seeds
from onea.errors import OneaError
from onea.research.hooks.lora import LowRank, LowRankUpdates, SecondMoments, SummedUpdates
from onea.research.methods.dual_gpm import Memory
from onea.research.methods.inflora import InfLoRA, InfLoRAOptions
from onea.vit.heads import GrowingHead


def used_basis(memory: Memory) -> torch.Tensor:
    return (
        torch.linalg.qr(memory.basis, mode="complete")[0][:, memory.basis.shape[1] :] if memory.retain else memory.basis
    )


@pytest.fixture
def ready(tiny_run):
    return prepared(tiny_run, "inflora")


def test_trained_parameters_per_task_at_vit_b():
    blocks = [{name: LowRank(torch.empty(10, 768), trains_down=False) for name in "kv"} for _ in range(12)]
    assert sum(p.numel() for p in LowRankUpdates(blocks).parameters() if p.requires_grad) == 184_320


def test_second_moments_are_the_mean_outer_product_of_all_attention_inputs(ready):
    vit, seen = ready.method.vit, {}
    for index, block in enumerate(vit.vit.blocks):
        block.attn.qkv.register_forward_pre_hook(
            lambda _, inputs, index=index: seen.setdefault(index, []).extend(inputs[0].flatten(0, 1).double())
        )
    watching = SecondMoments(vit.depth, vit.width)
    images = shown_images(ready)
    plain = ready.method.features(images)
    seen.clear()
    for batch in images.split(4):  # the last is smaller: tokens count, not batches
        ready.method.features(batch, watching)
    for index, moment in enumerate(watching.means()):
        naive = sum(torch.outer(token, token) for token in seen[index]) / len(seen[index])
        torch.testing.assert_close(moment, naive, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ready.method.features(images, SecondMoments(vit.depth, vit.width)), plain)


def test_a_new_update_changes_nothing_and_reads_no_used_direction(ready):
    method = ready.method
    learn_all(ready, [0])
    before = method.scores(shown_images(ready))
    updates = method.new_updates(ready.task(1))
    hooks = SummedUpdates(method.folded, updates)
    torch.testing.assert_close(method.head(method.features(shown_images(ready), hooks)), before, rtol=0, atol=0)
    for index, memory in enumerate(method.memories):
        keys, values = updates.block(index).values()
        assert torch.equal(keys.down, values.down)
        assert not keys.down.requires_grad
        rank = len(keys.down)
        torch.testing.assert_close(keys.down @ keys.down.T, torch.eye(rank) / 3)
        assert (keys.down.double() @ used_basis(memory)).abs().max() < 1e-6


def test_a_task_does_not_act_on_the_inputs_that_old_tasks_used(ready):
    method = ready.method
    learn_all(ready, [0])
    folded, memories = method.folded.weight.double(), list(method.memories)
    learn_all(ready, [2])
    change = method.folded.weight.double() - folded
    assert change.abs().amax((1, 2, 3)).min() > 1e-3
    for block, memory in zip(change, memories, strict=True):
        for matrix in block:
            assert torch.linalg.matrix_rank(matrix, rtol=1e-4) <= 4
            assert (matrix @ used_basis(memory)).abs().max() < 1e-5 * matrix.abs().max() + 1e-6


def test_folding_keeps_the_features_and_is_an_update_of_the_weights(ready):
    method, images = ready.method, shown_images(ready)
    learn_all(ready, [0])
    updates = method.new_updates(ready.task(2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for up in updates.ups():
            up.normal_(0, 0.5, generator=generator)
    unfolded = method.features(images, SummedUpdates(method.folded, updates))
    products = [[update.up @ update.down for update in updates.block(index).values()] for index in range(2)]
    expected = method.folded.weight + torch.stack([torch.stack(block) for block in products])
    method.folded.fold(updates)
    torch.testing.assert_close(method.folded.weight, expected)
    folded = method.features(images, method.folded)
    torch.testing.assert_close(folded, unfolded, rtol=1e-4, atol=1e-5)
    assert (folded - method.features(images)).abs().max() > 1e-2
    with torch.no_grad():  # the same by hand: the rows of keys and values in the joint projection
        for block, weight in zip(method.vit.vit.blocks, method.folded.weight, strict=True):
            block.attn.qkv.weight[64:128] += weight[0]
            block.attn.qkv.weight[128:] += weight[1]
    torch.testing.assert_close(method.features(images), folded, rtol=1e-4, atol=1e-5)


def test_queries_are_left_alone(ready):
    learn_all(ready)
    beside = ready.method.folded.qkv_update(1, torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)))
    assert (beside[..., :64] == 0).all()
    assert beside[..., 64:].abs().min(dim=1).values.max() > 0


def test_old_heads_stay_bit_identical_even_under_weight_decay(tiny_run):
    ready = prepared(tiny_run, "inflora", options=tiny_run["options"] | {"weight_decay": 0.1})
    learn_all(ready, [0])
    weight, bias = ready.method.head.weight.clone(), ready.method.head.bias.clone()
    learn_all(ready, [1, 2])
    assert torch.equal(ready.method.head.weight[:3], weight)
    assert torch.equal(ready.method.head.bias[:3], bias)
    assert ready.method.head.weight.shape == (6, 64)


def test_scores_are_the_logits_of_all_heads_side_by_side(ready):
    learn_all(ready)
    features = ready.method.features(shown_images(ready), ready.method.folded)
    state = ready.method.state_dict()
    parts = [features @ state["head.weight"][a:b].T + state["head.bias"][a:b] for a, b in ((0, 3), (3, 4), (4, 6))]
    torch.testing.assert_close(ready.method.scores(shown_images(ready)), torch.cat(parts, 1))


def test_memory_grows_and_records_what_the_plan_says(ready):
    reports = [ready.method.learn(ready.task(index)) for index in range(3)]
    shares = [report["threshold"] for report in reports]
    assert shares == pytest.approx([0.95, 0.95 + 0.05 / 3, 0.95 + 0.1 / 3])
    for before, after in itertools.pairwise(reports):
        assert all(a <= b for a, b in zip(before["directions_used"], after["directions_used"], strict=True))
    for memory in ready.method.memories:
        gram = memory.basis.T @ memory.basis
        torch.testing.assert_close(gram, torch.eye(len(gram), dtype=torch.float64), rtol=0, atol=1e-12)


def test_without_a_plan_the_threshold_stays(ready):
    method = InfLoRA(ready.method.vit, ready.method.options, ready.method.runtime)
    assert [method.learn(ready.task(index))["threshold"] for index in range(3)] == [0.95] * 3


def test_a_single_class_learns_no_update_and_a_random_row_yet_fills_the_memory(tiny_run):
    ready = prepared(tiny_run, "inflora", options=tiny_run["options"] | {"weight_decay": 0.0})
    learn_all(ready, [0])
    folded = ready.method.folded.weight.clone()
    report = ready.method.learn(ready.task(1))
    assert report["without_gradient"]
    assert report["losses"] == [0.0, 0.0]
    assert torch.equal(ready.method.folded.weight, folded)
    random = GrowingHead(64, start="uniform")
    random.grow(1, seeds.generator(ready.seed, 1, "head"))
    assert torch.equal(ready.method.head.weight[3:], random.weight)
    assert not ready.method.learn(ready.task(2))["without_gradient"]


def test_learning_goes_on_when_no_direction_is_free(ready):
    learn_all(ready, [0])
    ready.method.memories = [Memory(memory.basis[:, :0], retain=True) for memory in ready.method.memories]
    folded = ready.method.folded.weight.clone()
    report = ready.method.learn(ready.task(2))
    assert report["directions_used"] == [64, 64]
    assert torch.equal(ready.method.folded.weight, folded)
    assert torch.isfinite(torch.tensor(report["losses"])).all()


def test_both_modes_survive_a_save(ready):
    learn_all(ready, [0])
    memory = ready.method.memories[0]
    ready.method.memories[0] = Memory(memory.free(), retain=not memory.retain)
    again = InfLoRA(ready.method.vit, ready.method.options, ready.method.runtime, ready.method.plan)
    again.load_state_dict(ready.method.state_dict())
    for old, new in zip(ready.method.memories, again.memories, strict=True):
        assert old.retain == new.retain
        assert torch.equal(old.basis, new.basis)
    blank = InfLoRA(ready.method.vit, ready.method.options, ready.method.runtime)
    blank.load_state_dict(InfLoRA(ready.method.vit, ready.method.options, ready.method.runtime).state_dict())
    assert blank.memories == [None, None]


@pytest.mark.parametrize("switch", [{"energy": "textbook"}, {"epsilon": 0.5}, {"rank": 3}, {"schedule": "late-cosine"}])
def test_every_option_changes_the_result(switch, tiny_run):
    plain = learn_all(prepared(tiny_run, "inflora")).state_dict()
    changed = learn_all(prepared(tiny_run, "inflora", options=tiny_run["options"] | switch)).state_dict()
    assert any(
        plain[name].shape != changed[name].shape or not torch.equal(plain[name], changed[name]) for name in plain
    )


def test_one_epoch_is_enough(tiny_run):
    ready = prepared(tiny_run, "inflora", options=tiny_run["options"] | {"epochs": 1, "batch_size": 17})
    assert len(ready.method.learn(ready.task(0))["losses"]) == 1


def test_impossible_options_are_refused(ready):
    with pytest.raises(OneaError, match="epsilon"):
        InfLoRAOptions(epsilon=1.0)
    with pytest.raises(OneaError, match="width 64"):
        InfLoRA(ready.method.vit, dataclasses.replace(ready.method.options, rank=65), ready.method.runtime)
