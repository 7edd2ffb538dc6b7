# SPDX-License-Identifier: Apache-2.0
"""CL-LoRA: shared and task-specific updates, and the two steps for each batch."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from support.methods import learn_all, prepared, shown_images
from torch.nn import functional as F

from onea.errors import OneaError
from onea.research.methods import cl_lora
from onea.research.methods.cl_lora import CLLoRA, CLLoRAOptions, distillation, orthonormal_rows, overlap, row_weights
from onea.research.methods.lora import LowRank, LowRankUpdates, SummedUpdates
from onea.vit.heads import cosine_scores


@pytest.fixture
def ready(tiny_run):
    return prepared(tiny_run, "cl-lora")


@pytest.fixture
def second_task_training(ready, monkeypatch):
    """The arguments of the training of the second task, which is not executed: modules, losses and ``before_step``."""
    learn_all(ready, [0])
    captured = {}

    def capture(trained, losses, task, recipe, runtime, *, before_step):
        captured.update(modules=[item.module for item in trained], losses=losses, before_step=before_step)
        return [0.0]

    teacher = copy.deepcopy(ready.method.shared)
    monkeypatch.setattr(cl_lora, "train", capture)
    task = ready.task(2)
    ready.method.learn(task)
    rows = torch.arange(len(task))
    return captured | {"batch": (task.images.test_views(task.rows[rows]), task.labels[rows]), "teacher": teacher}


def trained_only(module):
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def test_trained_parameters_without_the_head_at_vit_b():
    def updates(trains_down, gains=None):
        blocks = [{name: LowRank(torch.empty(8, 768), trains_down=trains_down) for name in "qv"} for _ in range(6)]
        return LowRankUpdates(blocks, gains=gains)

    modules = updates(False), updates(True, torch.ones(3, 6))
    assert sum(p.numel() for module in modules for p in trained_only(module)) == 221_202


def test_down_projections_are_orthonormal_and_their_first_row_is_nearly_constant():
    down = orthonormal_rows(8, 768, torch.Generator().manual_seed(1))
    torch.testing.assert_close(down @ down.T, torch.eye(8), rtol=0, atol=1e-5)
    assert float(F.cosine_similarity(down[0], torch.ones(768), dim=0).abs()) == pytest.approx(0.866, abs=0.03)


def test_only_shared_up_projections_are_trained_in_later_tasks(ready):
    learn_all(ready, [0])
    downs = [update.down.clone() for update in ready.method.shared.block(0).values()]
    ups = [up.clone() for up in ready.method.shared.ups()]
    assert all(up.abs().max() > 0 for up in ups)
    specific = {name: value.clone() for name, value in ready.method.specific[0].state_dict().items()}
    prototypes = ready.method.prototypes[0].clone()
    learn_all(ready, [2])
    assert all(torch.equal(a, b.down) for a, b in zip(downs, ready.method.shared.block(0).values(), strict=True))
    assert all(not torch.equal(a, b) for a, b in zip(ups, ready.method.shared.ups(), strict=True))
    assert all(torch.equal(specific[name], value) for name, value in ready.method.specific[0].state_dict().items())
    assert torch.equal(ready.method.prototypes[0], prototypes)


def test_the_first_half_is_shared_and_keys_are_not_updated(ready):
    method = ready.method
    learn_all(ready)
    h = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    shared, specific = method.shared.qkv_update(0, h), method.specific[0].qkv_update(1, h)
    assert method.shared.qkv_update(1, h) is None
    assert method.specific[0].qkv_update(0, h) is None
    assert (shared[..., 64:128] == 0).all()
    assert (specific[..., 64:128] == 0).all()
    block, gains = method.specific[0].block(0), method.specific[0].gains
    for start, name, gain in ((0, "q", gains[0, 0]), (128, "v", gains[2, 0])):
        by_hand = gain * (h @ block[name].down.T @ block[name].up.T)
        torch.testing.assert_close(specific[..., start : start + 64], by_hand, rtol=1e-4, atol=1e-6)
    assert gains.shape == (3, 1)


def test_scores_with_a_shared_first_half_equal_full_passes(ready):
    learn_all(ready)
    method, images = ready.method, shown_images(ready)
    full = [
        cosine_scores(method.features(images, SummedUpdates(method.shared, specific)), prototypes)
        for specific, prototypes in zip(method.specific, method.prototypes.split(method.sizes.tolist()), strict=True)
    ]
    assert [part.shape[1] for part in full] == [3, 1, 2]
    torch.testing.assert_close(method.scores(images), torch.cat(full, 1))
    assert [method.forward_passes(method.options, tasks) for tasks in (1, 2, 40)] == [1, 1.5, 20.5]


def test_the_first_task_has_no_distillation(ready, monkeypatch):
    captured = []
    monkeypatch.setattr(cl_lora, "train", lambda trained, losses, *rest, **named: captured.append(len(losses)) or [0.0])
    learn_all(ready)
    assert captured == [1, 2, 2]


def test_an_unmoved_student_gets_no_distillation_gradient(second_task_training):
    shared, specific, head = second_task_training["modules"]
    shared.zero_grad()
    second_task_training["losses"][0](*second_task_training["batch"]).backward()
    assert all(up.grad.abs().max() < 1e-6 for up in shared.ups())
    assert all(parameter.grad is None for parameter in specific.parameters())
    assert head.weight.grad.abs().max() > 0


def test_the_distillation_step_does_not_change_specific_updates(second_task_training):
    shared, specific, head = second_task_training["modules"]
    optimiser = torch.optim.SGD(
        [p for module in (shared, specific, head) for p in trained_only(module)], lr=0.1, momentum=0.9, weight_decay=0.1
    )
    with torch.no_grad():
        for up in shared.ups():
            up += 0.3 * torch.randn(up.shape, generator=torch.Generator().manual_seed(1))
    kd, ce = second_task_training["losses"]
    ce(*second_task_training["batch"]).backward()
    optimiser.step()  # creates a momentum
    before = {name: value.clone() for name, value in specific.state_dict().items()}
    old = [up.clone() for up in shared.ups()]
    optimiser.zero_grad(set_to_none=True)
    kd(*second_task_training["batch"]).backward()
    optimiser.step()
    assert all(torch.equal(before[name], value) for name, value in specific.state_dict().items())
    assert all(not torch.equal(a, b) for a, b in zip(old, shared.ups(), strict=True))


def test_gradient_rows_are_reassigned_before_the_distillation_step_only(second_task_training):
    shared = second_task_training["modules"][0]
    for up in shared.ups():
        up.grad = torch.ones_like(up)
    second_task_training["before_step"](1)
    assert all((up.grad == 1).all() for up in shared.ups())
    second_task_training["before_step"](0)
    for up, old in zip(shared.ups(), second_task_training["teacher"].ups(), strict=True):
        norms = torch.tensor([float(sum(value**2 for value in row)) ** 0.5 for row in old.detach()])
        torch.testing.assert_close(up.grad, (64 * norms / norms.sum())[:, None].expand_as(up))
        assert float(up.grad.mean()) == pytest.approx(1, rel=1e-5)


def test_distillation_matches_a_naive_loop_and_reaches_both_sides():
    generator = torch.Generator().manual_seed(4)
    student, teacher = (torch.randn(5, 3, generator=generator, requires_grad=True) for _ in range(2))
    naive = 0.0
    for s, t in zip(student, teacher, strict=True):
        p, q = (t / 2).exp() / (t / 2).exp().sum(), (s / 2).exp() / (s / 2).exp().sum()
        naive = naive - (p * q.log()).sum() / 5
    loss = distillation(student, teacher, 2.0)
    torch.testing.assert_close(loss, naive)
    loss.backward()
    assert teacher.grad.abs().max() > 0
    torch.testing.assert_close(student.grad, (F.softmax(student / 2, 1) - F.softmax(teacher / 2, 1)).detach() / 10)


def test_early_features_are_those_after_the_shared_half(ready):
    learn_all(ready, [0])
    method, images = ready.method, shown_images(ready)
    with torch.no_grad():
        tokens = method.vit.forward_blocks(method.vit.embed(images), method.shared, stop=1)
        expected = method.vit.vit.norm(tokens)[:, 0]
        torch.testing.assert_close(method.early_features(images, method.shared), expected)


def test_overlap_is_the_mean_absolute_cosine():
    gains = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    earlier = [-2 * gains, torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]])]
    assert float(overlap(gains, earlier)) == pytest.approx((1 + 0.6) / 2)


def test_row_weights_average_to_one():
    weights = row_weights(torch.randn(64, 4, generator=torch.Generator().manual_seed(5)))
    assert float(weights.mean()) == pytest.approx(1)
    assert (row_weights(torch.zeros(64, 4)) == 1).all()


def test_single_class_tasks_reduce_cl_lora_to_simplecil(tiny_run):
    ready = prepared(tiny_run, "cl-lora", sizes="1,1,1,1,1,1")
    plain = prepared(tiny_run, "simplecil", sizes="1,1,1,1,1,1")
    learn_all(ready)
    learn_all(plain)
    assert all((up == 0).all() for updates in [ready.method.shared, *ready.method.specific] for up in updates.ups())
    torch.testing.assert_close(ready.method.scores(shown_images(ready)), plain.method.scores(shown_images(plain)))


def test_the_task_after_a_single_class_first_task_is_finite(tiny_run):
    """In the official code, a division of zero by zero destroys the shared updates here."""
    ready = prepared(tiny_run, "cl-lora", sizes="1,5")
    assert ready.method.learn(ready.task(0))["without_gradient"]
    ready.method.learn(ready.task(1))
    assert all(torch.isfinite(up).all() and up.abs().max() > 0 for up in ready.method.shared.ups())


@pytest.mark.parametrize("depth", [1, 3])
def test_a_middle_block_is_shared(depth, ready):
    vit = copy.copy(ready.method.vit)
    vit.depth = depth
    method = CLLoRA(vit, ready.method.options, ready.method.runtime)
    assert method.half == (depth + 1) // 2
    assert all(
        (method.half + tasks * (depth - method.half)) / depth <= method.forward_passes(method.options, tasks)
        for tasks in (1, 2, 9)
    )


def test_state_is_restored_from_tensors(ready):
    learn_all(ready)
    again = CLLoRA(ready.method.vit, ready.method.options, ready.method.runtime)
    again.load_state_dict(ready.method.state_dict())
    assert torch.equal(again.scores(shown_images(ready)), ready.method.scores(shown_images(ready)))
    blank = CLLoRA(ready.method.vit, ready.method.options, ready.method.runtime)
    blank.load_state_dict(CLLoRA(ready.method.vit, ready.method.options, ready.method.runtime).state_dict())
    assert blank.specific == []


@pytest.mark.parametrize(
    "switch", [{"distillation": 0.0}, {"temperature": 1.0}, {"orthogonality": 10.0}, {"head_scale": 4.0}, {"rank": 3}]
)
def test_every_option_changes_the_result(switch, tiny_run):
    plain = learn_all(prepared(tiny_run, "cl-lora")).state_dict()
    changed = learn_all(prepared(tiny_run, "cl-lora", options=tiny_run["options"] | switch)).state_dict()
    assert any(
        plain[name].shape != changed[name].shape or not torch.equal(plain[name], changed[name]) for name in plain
    )


def test_impossible_options_are_refused(ready):
    with pytest.raises(OneaError, match="temperature"):
        CLLoRAOptions(temperature=0.0)
    with pytest.raises(OneaError, match="rank is 0"):
        CLLoRA(ready.method.vit, dataclasses.replace(ready.method.options, rank=0), ready.method.runtime)
