# SPDX-License-Identifier: Apache-2.0
"""What SSIAT, MACIL and TUNA share: CosFace, alignment, mean shift, and tasks of one class."""

from __future__ import annotations

import math

import pytest
import torch
from support.methods import learn_all, prepared, shown_images
from support.tiny import write_tiny_images
from torch.nn import functional as F

from onea.errors import OneaError
from onea.learner.tasks import StreamPlan
from onea.options import make_options
from onea.research.methods import method_class
from onea.research.methods.cosface import CosFaceOptions, cosface_loss, mean_scales, mean_shifts
from onea.research.methods.presets import preset_options

METHODS = ("ssiat", "macil", "tuna")


@pytest.fixture(params=METHODS)
def name(request) -> str:
    return request.param


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ready_for(tiny_run, name, sizes="3,1,2", **options):
    return prepared(tiny_run, name, sizes=sizes, options=tiny_run["options"] | options)


def copied(state):
    return {name: value.clone() for name, value in state.items()}


def changed(before, after):
    """The first parts of the names of the tensors that differ."""
    return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_cosface_equals_the_formula(margin):
    cosines = torch.rand(5, 4, generator=generator(1)) * 2 - 1
    labels, s = torch.tensor([0, 3, 1, 1, 2]), 20.0
    losses = []
    for row, label in zip(cosines, labels.tolist(), strict=True):
        correct = math.exp(s * (float(row[label]) - margin))
        others = sum(math.exp(s * float(cosine)) for index, cosine in enumerate(row) if index != label)
        losses.append(-s * (float(row[label]) - margin) + math.log(correct + others))
    value = cosface_loss(s * cosines, labels, s * margin)
    assert float(value) == pytest.approx(sum(losses) / 5, rel=1e-5)
    if not margin:
        torch.testing.assert_close(value, F.cross_entropy(s * cosines, labels))


def test_cosface_of_one_class_is_zero_and_has_no_gradient():
    logits = torch.randn(6, 1, generator=generator(1)).requires_grad_()
    value = cosface_loss(logits, torch.zeros(6, dtype=torch.int64), 6.0)
    value.backward()
    assert value == 0
    assert torch.equal(logits.grad, torch.zeros(6, 1))


def test_rho_by_task_lies_between_0_9_and_1_for_tasks_of_any_size():
    scales = mean_scales(torch.tensor([36, 1, 2, 9]), "by-task", 9)
    assert scales[:36].tolist() == pytest.approx([0.925] * 36)
    assert scales[36:].tolist() == pytest.approx([0.95] + [0.975] * 2 + [1.0] * 9)
    assert torch.equal(mean_scales(torch.tensor([3, 1]), "none", 1), torch.ones(4))


def test_official_rho_is_correct_for_equal_tasks_only():
    equal = torch.tensor([5, 5, 5])
    torch.testing.assert_close(mean_scales(equal, "official", 5), mean_scales(equal, "by-task", 5))
    assert mean_scales(torch.tensor([36, 1]), "official", 1)[35] == pytest.approx(2.7)
    reverse = mean_scales(torch.tensor([20] * 10), "official", -20)  # TUNA divides by a negative size
    assert reverse[-1] == pytest.approx(0.81)
    assert bool((reverse.diff() <= 0).all())


def test_mean_shifts_equal_loops():
    before, after = (torch.randn(7, 3, generator=generator(seed)) for seed in (1, 2))
    means = 2 * torch.randn(4, 3, generator=generator(3))
    for sigma in (0.3, 1.0, 4.0):
        expected = []
        for mean in means:
            weights = [math.exp(-float((row - mean).square().sum()) / (2 * sigma**2)) + 1e-5 for row in before]
            moved = sum(weight * (new - old) for weight, new, old in zip(weights, after, before, strict=True))
            expected.append(moved / sum(weights))
        torch.testing.assert_close(mean_shifts(means, before, after, sigma), torch.stack(expected))


def test_a_wide_kernel_or_a_distant_mean_moves_by_the_mean_drift():
    before, after = (torch.randn(50, 3, generator=generator(seed)) for seed in (1, 2))
    drift = (after - before).mean(0)
    means = torch.randn(4, 3, generator=generator(3))
    torch.testing.assert_close(mean_shifts(means, before, after, 1e6), drift.expand(4, 3))
    torch.testing.assert_close(mean_shifts(means + 100, before, after, 1.0), drift.expand(4, 3))
    shuffled = after[torch.randperm(50, generator=generator(4))]  # a permutation does not change the mean
    torch.testing.assert_close(mean_shifts(means, before, shuffled, 1e6), drift.expand(4, 3))
    assert torch.equal(mean_shifts(means, before, before, 1.0), torch.zeros(4, 3))


def test_published_epochs_are_halved_after_the_first_task():
    plan = StreamPlan(100, 10)
    options = CosFaceOptions(epochs=20, later_share=0.5)
    assert [options.epochs_of_task(task, 10, plan) for task in range(3)] == [20, 10, 10]
    assert [options.epochs_of_task(task, 1, plan) for task in range(2)] == [0, 0]
    trained = CosFaceOptions(epochs=1, later_share=0.1, single_class="train")
    assert [trained.epochs_of_task(task, 1, plan) for task in range(2)] == [1, 1]
    for name in ("ssiat", "macil"):
        kind = method_class(name)
        options = make_options(kind.Options, preset_options(name, "paper/cub200"))
        assert kind.epochs_per_task(options, [20, 20, 1, 159]) == [20, 10, 0, 10]


@pytest.mark.parametrize("switch", [{}, {"rho": "official"}, {"single_class": "train"}])
def test_a_stream_of_very_uneven_tasks(name, switch, tiny_run, tmp_path):
    write_tiny_images(tmp_path, classes=48, train=2, test=1)
    values = tiny_run | {"data": f"folder:{tmp_path}"}
    ready = ready_for(values, name, "36,1,2,9", epochs=1, batch_size=16, alignment_samples=8, **switch)
    method = learn_all(ready)
    state = method.state_dict()
    assert all(torch.isfinite(value).all() for value in state.values())
    assert torch.isfinite(method.scores(shown_images(ready))).all()
    assert len(method.head.weight) == len(method.gaussians) == 48
    assert method.sizes.tolist() == [36, 1, 2, 9]


def test_one_image_per_class(name, tiny_run, tmp_path):
    write_tiny_images(tmp_path, train=1)
    ready = ready_for(tiny_run | {"data": f"folder:{tmp_path}"}, name, "1,3,2")
    assert torch.isfinite(learn_all(ready).scores(shown_images(ready))).all()


def test_alignment_changes_only_the_head_and_starts_with_the_second_task(name, tiny_run):
    plain, aligned = (ready_for(tiny_run, name, alignment_epochs=epochs) for epochs in (0, 2))
    reports = [(plain.method.learn(plain.task(i)), aligned.method.learn(aligned.task(i))) for i in (0, 1)]
    assert ["alignment_losses" in report for _, report in reports] == [False, True]
    assert changed(plain.method.state_dict(), aligned.method.state_dict()) == {"head"}


def test_training_does_not_change_the_rows_of_old_classes(name, tiny_run):
    ready = ready_for(tiny_run, name, alignment_epochs=0)
    learn_all(ready, [0])
    old = ready.method.head.weight.detach().clone()
    learn_all(ready, [1, 2])
    assert torch.equal(ready.method.head.weight[:3], old)


def test_alignment_learns_a_single_class(name, tiny_run):
    ready = ready_for(tiny_run, name, alignment_epochs=20, alignment_learning_rate=0.1)
    reports = [ready.method.learn(ready.task(index)) for index in (0, 1)]
    assert [report["trained"] for report in reports] == [True, False]
    assert reports[1]["alignment_losses"][-1] < reports[1]["alignment_losses"][0]
    assert ready.method.head(ready.method.gaussians.means).argmax(1).tolist() == [0, 1, 2, 3]


def test_training_on_a_single_class_has_no_effect_but_weight_decay(name, tiny_run):
    skipped, trained, decayed = (
        ready_for(tiny_run, name, "2,1,3", alignment_epochs=0, orthogonality=0.0, weight_decay=decay, single_class=how)
        for how, decay in (("skip", 0.0), ("train", 0.0), ("train", 0.5))
    )
    for ready in (skipped, trained, decayed):
        learn_all(ready, [0])
    modules = [list(each.method.hooks().state_dict().values()) for each in (skipped, trained)]
    assert all(torch.equal(a, b) for a, b in zip(*modules, strict=True))
    for ready in (skipped, trained, decayed):
        before = copied(ready.method.hooks().state_dict())
        report = ready.method.learn(ready.task(1))
        has_changed = bool(changed(before, ready.method.hooks().state_dict()))
        assert has_changed == (ready is decayed and name != "macil"), "the update of MACIL remains zero"
        assert report["trained"] == (ready is not skipped)
        assert set(report.get("losses", [0.0])) == {0.0}


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("ssiat", {"paired_rows": False}),
        ("ssiat", {"single_class": "train", "rho": "official"}),
        ("macil", {"paired_rows": False, "single_class": "train"}),
        ("tuna", {"tuna_detach": False, "orthogonality": 1.0}),
        ("tuna", {"tuna_universal": "official", "tuna_alignment": "official", "single_class": "train"}),
        ("tuna", {"rho": "official"}),
    ],
)
def test_runs_with_the_official_switches_resume_bit_for_bit(name, switch, tiny_run):
    for sizes in ("1,3,2", "2,1,3"):
        uninterrupted = learn_all(ready_for(tiny_run, name, sizes, **switch)).state_dict()
        before, after = (ready_for(tiny_run, name, sizes, **switch) for _ in range(2))
        learn_all(before, [0, 1])
        after.method.load_state_dict(copied(before.method.state_dict()))
        learn_all(after, [2])
        assert not changed(uninterrupted, after.method.state_dict())


@pytest.mark.parametrize(
    "switch",
    [
        {"later_share": 0.5},
        {"logit_scale": 5.0},
        {"margin": 0.3},
        {"alignment_learning_rate": 0.1},
        {"alignment_samples": 9},
        {"rho": "official"},
        {"rho": "none"},
    ],
)
def test_every_shared_option_changes_the_result(name, switch, tiny_run):
    plain, switched = (learn_all(ready_for(tiny_run, name, "1,3,2", **values)) for values in ({}, switch))
    assert changed(plain.state_dict(), switched.state_dict())


@pytest.mark.parametrize("option", [{"later_share": 0.0}, {"logit_scale": 0.0}, {"alignment_samples": 0}])
def test_impossible_options_are_refused(option):
    with pytest.raises(OneaError, match=next(iter(option))):
        CosFaceOptions(**option)
