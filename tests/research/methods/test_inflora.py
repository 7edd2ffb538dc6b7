# SPDX-License-Identifier: Apache-2.0
"""InfLoRA: directions of the updates, folding, memory, and tasks of one class."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from support.methods import learn_all, prepared, shown_images

from onea import seeds
from onea.errors import OneaError
from onea.research.methods.inflora import (
    InfLoRA,
    InfLoRAOptions,
    Memory,
    energy_threshold,
    reduction_matrix,
    update_memory,
)
from onea.research.methods.lora import LowRank, LowRankUpdates, SecondMoments, SummedUpdates
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
    vit, tokens_by_block = ready.method.vit, {}
    for index, block in enumerate(vit.vit.blocks):
        block.attn.qkv.register_forward_pre_hook(
            lambda _, inputs, index=index: tokens_by_block.setdefault(index, []).extend(
                inputs[0].flatten(0, 1).double()
            )
        )
    recorder = SecondMoments(vit.depth, vit.width)
    images = shown_images(ready)
    plain = ready.method.features(images)
    tokens_by_block.clear()
    for batch in images.split(4):  # the last is smaller: tokens count, not batches
        ready.method.features(batch, recorder)
    for index, moment in enumerate(recorder.means()):
        naive = sum(torch.outer(token, token) for token in tokens_by_block[index]) / len(tokens_by_block[index])
        torch.testing.assert_close(moment, naive, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ready.method.features(images, SecondMoments(vit.depth, vit.width)), plain)


def test_a_new_update_is_zero_and_orthogonal_to_used_directions(ready):
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


def test_folding_preserves_the_features(ready):
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


def test_queries_are_not_updated(ready):
    learn_all(ready)
    update = ready.method.folded.qkv_update(1, torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)))
    assert (update[..., :64] == 0).all()
    assert update[..., 64:].abs().min(dim=1).values.max() > 0


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


def test_memory_grows_with_the_planned_thresholds(ready):
    reports = [ready.method.learn(ready.task(index)) for index in range(3)]
    shares = [report["threshold"] for report in reports]
    assert shares == pytest.approx([0.95, 0.95 + 0.05 / 3, 0.95 + 0.1 / 3])
    for before, after in itertools.pairwise(reports):
        assert all(a <= b for a, b in zip(before["directions_used"], after["directions_used"], strict=True))
    for memory in ready.method.memories:
        gram = memory.basis.T @ memory.basis
        torch.testing.assert_close(gram, torch.eye(len(gram), dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_threshold_is_constant_without_a_plan(ready):
    method = InfLoRA(ready.method.vit, ready.method.options, ready.method.runtime)
    assert [method.learn(ready.task(index))["threshold"] for index in range(3)] == [0.95] * 3


def test_a_single_class_trains_nothing_but_extends_the_memory(tiny_run):
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


def test_learning_without_free_directions(ready):
    learn_all(ready, [0])
    ready.method.memories = [Memory(memory.basis[:, :0], retain=True) for memory in ready.method.memories]
    folded = ready.method.folded.weight.clone()
    report = ready.method.learn(ready.task(2))
    assert report["directions_used"] == [64, 64]
    assert torch.equal(ready.method.folded.weight, folded)
    assert torch.isfinite(torch.tensor(report["losses"])).all()


def test_both_forms_of_memory_are_saved(ready):
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


WIDTH = 24


def moment(seed: int, decay: float = 0.75, width: int = WIDTH) -> torch.Tensor:
    """A random second moment whose spectrum decays like that of real attention inputs."""
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
    return rotation @ torch.diag(decay ** torch.arange(width, dtype=torch.float64)) @ rotation.T


def projector(basis: torch.Tensor) -> torch.Tensor:
    return basis @ basis.T


def used_projector(memory: Memory) -> torch.Tensor:
    own = projector(memory.basis)
    return torch.eye(len(own), dtype=own.dtype) - own if memory.retain else own


def published_step(basis, mode, matrix, share):
    """One update as in the official code, with the wrong label of the first task corrected."""
    width = len(matrix)
    total = (torch.linalg.svdvals(matrix) ** 2).sum()
    if basis is None:
        left, values, _ = torch.linalg.svd(matrix)
        count = max(1, sum(1 for j in range(width) if (values[: j + 1] ** 2).sum() / total < share))
        return (left[:, count:], "retain") if count >= width / 2 else (left[:, :count], "remove")
    inside = projector(basis) @ matrix
    left, values, _ = torch.linalg.svd(matrix - inside if mode == "remove" else inside)
    ratios = values**2 / total
    count = 0
    if mode == "remove":
        captured = 1 - ratios.sum()
        while captured < share:
            captured, count = captured + ratios[count], count + 1
        basis = torch.cat([basis, left[:, :count]], dim=1)
        if basis.shape[1] > width / 2:
            return torch.linalg.svd(basis)[0][:, basis.shape[1] :], "retain"
        return basis, "remove"
    captured = ratios.sum()
    while captured >= 1 - share:
        captured, count = captured - ratios[count], count + 1
    rest = basis - projector(left[:, :count]) @ basis
    return torch.linalg.svd(rest)[0][:, : basis.shape[1] - count], "retain"


@pytest.mark.parametrize("epsilon", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("seed", [0, 100])
def test_a_whole_stream_equals_the_published_algorithm(epsilon, seed):
    memory, basis, mode = None, None, "remove"
    modes, used = [], 0
    for task in range(8):
        new, share = moment(seed + task), energy_threshold(epsilon, task, 8)
        memory = update_memory(memory, new, share)
        basis, mode = published_step(basis, mode, new, share)
        assert memory.retain == (mode == "retain")
        assert memory.basis.shape == basis.shape
        torch.testing.assert_close(projector(memory.basis), projector(basis), rtol=0, atol=1e-8)
        orthonormal = memory.basis.T @ memory.basis
        torch.testing.assert_close(orthonormal, torch.eye(len(orthonormal), dtype=torch.float64), rtol=0, atol=1e-12)
        assert memory.used >= used, "used directions are never freed"
        used = memory.used
        modes.append(mode)
    assert modes[0] == "remove"
    assert modes[-1] == "retain"


def test_memory_of_a_hand_worked_example():
    """Singular values 4, 2, 1, 1 have the published energies 16, 4, 1, 1 of 22 and the textbook's 4, 2, 1, 1 of 8."""
    first = torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64))
    memory = update_memory(None, first, 0.8)
    assert not memory.retain
    torch.testing.assert_close(memory.basis.abs(), torch.eye(4, dtype=torch.float64)[:, :1])
    assert update_memory(None, first, 0.1).used == 1, "at least one"
    assert update_memory(None, first, 0.8, "textbook").used == 2
    second = torch.diag(torch.tensor([1.0, 3.0, 0.5, 0.0], dtype=torch.float64))  # energies 1, 9, 0.25 of 10.25
    assert update_memory(memory, second, 0.09).used == 1, "the old direction holds 0.098 of it"
    grown = update_memory(memory, second, 0.97)
    assert (grown.used, grown.retain) == (2, False)
    torch.testing.assert_close(used_projector(grown), torch.diag(torch.tensor([1.0, 1, 0, 0], dtype=torch.float64)))
    full = update_memory(memory, second, 0.98)
    assert (full.used, full.retain) == (3, True)
    torch.testing.assert_close(full.basis.abs()[:, 0], torch.eye(4, dtype=torch.float64)[3])


def test_the_free_directions_are_stored_if_the_first_task_uses_half_or_more():
    """The official code stores the used directions but labels them as free."""
    matrix = torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64))
    memory = update_memory(None, matrix, 0.95)
    assert (memory.retain, memory.used) == (True, 2)
    torch.testing.assert_close(
        projector(memory.basis), torch.diag(torch.tensor([0.0, 0, 1, 1], dtype=torch.float64)), atol=1e-12, rtol=0
    )
    torch.testing.assert_close(reduction_matrix(matrix, memory, 2)[:, :2], torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("used", [4, 15])
def test_both_forms_of_a_memory_are_equivalent(used):
    basis = torch.linalg.svd(moment(3))[0]
    removing, retaining = Memory(basis[:, :used], retain=False), Memory(basis[:, used:], retain=True)
    assert removing.used == retaining.used == used
    for energy in ("published", "textbook"):
        remove_form, retain_form = (update_memory(memory, moment(4), 0.99, energy) for memory in (removing, retaining))
        torch.testing.assert_close(used_projector(remove_form), used_projector(retain_form), rtol=0, atol=1e-10)
    rows = [reduction_matrix(moment(4), memory, 3) for memory in (removing, retaining)]
    torch.testing.assert_close(rows[0].T @ rows[0], rows[1].T @ rows[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("retain", [None, False, True])
def test_the_reduction_matrix_spans_the_leading_free_directions(retain):
    basis = torch.linalg.svd(moment(5))[0][:, :7]
    memory = None if retain is None else Memory(basis, retain)
    matrix, rank = moment(6), 5
    down = reduction_matrix(matrix, memory, rank)
    torch.testing.assert_close(down @ down.T, torch.eye(rank, dtype=torch.float64) / 3)
    hat = {None: matrix, False: matrix - projector(basis) @ matrix, True: projector(basis) @ matrix}[retain]
    expected = torch.linalg.svd(hat)[0][:, :rank]
    torch.testing.assert_close(3 * down.T @ down, projector(expected), rtol=0, atol=1e-8)
    if memory is not None:
        up = torch.randn(WIDTH, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        assert (up @ down @ used_projector(memory)).abs().max() < 1e-12


def test_the_row_norm_is_that_of_a_kaiming_uniform_row():
    rows = torch.empty(2000, 768)
    torch.nn.init.kaiming_uniform_(rows, a=math.sqrt(5))
    assert float(rows.norm(dim=1).mean()) == pytest.approx(1 / math.sqrt(3), rel=1e-2)


def test_textbook_energy_equals_gradient_projection_memory():
    generator = torch.Generator().manual_seed(2)
    inputs = [moment(seed) @ torch.randn(WIDTH, 200, generator=generator, dtype=torch.float64) for seed in (7, 8)]
    moments = [tokens @ tokens.T / 200 for tokens in inputs]
    first = update_memory(None, moments[0], 0.7, "textbook")
    left, values, _ = torch.linalg.svd(inputs[0], full_matrices=False)
    count = int((values.square().cumsum(0) / values.square().sum() < 0.7).sum())
    torch.testing.assert_close(used_projector(first), projector(left[:, :count]), rtol=0, atol=1e-8)
    second = update_memory(first, moments[1], 0.8, "textbook")
    rest = inputs[1] - used_projector(first) @ inputs[1]
    left, values, _ = torch.linalg.svd(rest, full_matrices=False)
    total = inputs[1].square().sum()
    captured, added = 1 - values.square().sum() / total, 0
    while captured < 0.8:
        captured, added = captured + values[added] ** 2 / total, added + 1
    expected = used_projector(first) + projector(left[:, :added])
    torch.testing.assert_close(used_projector(second), expected, rtol=0, atol=1e-8)
    assert update_memory(None, moments[0], 0.9, "textbook").used > update_memory(None, moments[0], 0.9).used


def test_the_reduction_matrix_has_fewer_rows_if_few_directions_are_free():
    basis = torch.linalg.svd(moment(9))[0]
    assert reduction_matrix(moment(1), Memory(basis[:, :2], retain=True), 5).shape == (2, WIDTH)
    nothing = Memory(basis[:, :0], retain=True)
    assert reduction_matrix(moment(1), nothing, 5).shape == (0, WIDTH)
    assert update_memory(nothing, moment(1), 0.99).used == WIDTH


def test_the_threshold_stays_below_one():
    assert energy_threshold(0.95, 12, 10) == energy_threshold(0.95, 9, 10) < 1
    assert energy_threshold(0.9, 7, None) == 0.9
