# SPDX-License-Identifier: Apache-2.0
"""SEMA: the mixture, its expansion, and which parameters are trained."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from safetensors.torch import load, save
from support.methods import prepared, shown_images
from support.tiny import write_tiny_vit

from onea import seeds
from onea.errors import OneaError
from onea.learner.tasks import Task
from onea.research.methods.presets import preset_options
from onea.research.methods.sema import (
    SEMA,
    Descriptor,
    ExpandableAdapters,
    Expert,
    MeanTokenRecorder,
    Mixture,
    SEMAOptions,
)
from onea.runtime import make_runtime
from onea.vit.backbones import load_backbone

WIDTH = 8


class ShiftedTask(Task):
    """A task whose images are far from those of earlier tasks."""

    def train_batches(self, *arguments, **named):
        for images, labels in super().train_batches(*arguments, **named):
            yield 2 * images + 3, labels


def sema(values: dict, sizes: str = "3,1,2", **options):
    return prepared(values, "sema", sizes=sizes, options=values["options"] | options)


def random_mixture(count: int, *, zero: bool = False) -> Mixture:
    mixture = Mixture()
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        expert = Expert(WIDTH, 3, 1.0, 4, 500, generator)
        if not zero:
            with torch.no_grad():
                for parameter in expert.adapter.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        mixture.experts.append(expert)
    return mixture.requires_grad_(False)


def tokens(batch: int = 5) -> torch.Tensor:
    return torch.randn(batch, 4, WIDTH, generator=torch.Generator().manual_seed(99))


def copy_of(state: dict) -> dict:
    return {name: value.clone() for name, value in state.items()}


def unchanged(before: dict, after: dict) -> bool:
    return all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_mixture_of_one_module_equals_its_adapter():
    mixture = random_mixture(1)
    assert torch.equal(mixture(tokens()), mixture[0].adapter(tokens()))


def test_a_mixture_is_the_routed_sum_of_its_adapters():
    mixture, u = random_mixture(3), tokens()
    actual = mixture(u)
    for image in range(len(u)):
        mean_tokens = u[image].mean(0)
        logits = [float(mixture[k].route.weight[0] @ mean_tokens + mixture[k].route.bias) for k in range(3)]
        weights = torch.tensor(logits).exp() / torch.tensor(logits).exp().sum()
        expected = torch.zeros_like(u[image])
        for k in range(3):
            adapter = mixture[k].adapter
            hidden = (u[image] @ adapter.down.weight.T + adapter.down.bias).clamp_min(0)
            expected += weights[k] * (hidden @ adapter.up.weight.T + adapter.up.bias)
        torch.testing.assert_close(actual[image], expected, rtol=1e-4, atol=1e-5)


def test_a_new_module_reduces_the_weights_of_the_others():
    mixture, u = random_mixture(2), tokens()
    before = mixture(u)
    mixture.experts.append(Expert(WIDTH, 3, 1.0, 4, 500, torch.Generator().manual_seed(7)))
    weight = mixture.routing_weights(u.mean(1))[:, -1]
    torch.testing.assert_close(mixture(u), (1 - weight)[:, None, None] * before)
    assert ((weight > 0) & (weight < 1)).all()


def test_the_router_of_a_single_module_has_zero_gradient():
    for count, has_gradient in ((1, False), (2, True)):
        mixture = random_mixture(count)
        mixture[-1].route.requires_grad_(True)
        mixture(tokens()).square().sum().backward()
        assert bool((mixture[-1].route.weight.grad != 0).any()) is has_gradient


def test_descriptor_losses_and_z_scores_by_hand():
    descriptor = Descriptor(WIDTH, 4, 500, torch.Generator().manual_seed(0)).requires_grad_(False)
    mean_tokens = tokens().mean(1)
    hidden = mean_tokens @ descriptor.encode.weight.T + descriptor.encode.bias
    rebuilt = hidden @ descriptor.decode.weight.T + descriptor.decode.bias
    losses = ((rebuilt - mean_tokens) ** 2).sum(1) / WIDTH
    torch.testing.assert_close(descriptor(mean_tokens), losses)
    descriptor.append_losses(torch.tensor([1.0, 3.0]))
    assert (descriptor.z_scores(mean_tokens) == 0).all(), "two losses are too few"
    descriptor.append_losses(torch.tensor([5.0]))  # mean 3, unbiased deviation 2
    torch.testing.assert_close(descriptor.z_scores(mean_tokens), (losses - 3).abs() / 2)


def test_equal_losses_do_not_cause_division_by_zero():
    descriptor = Descriptor(WIDTH, 4, 500, torch.Generator().manual_seed(0)).requires_grad_(False)
    mean_tokens = tokens().mean(1)
    for value in (0.0, 0.5):
        descriptor.recent = torch.full((10,), value)
        assert torch.isfinite(descriptor.z_scores(mean_tokens)).all()
    torch.testing.assert_close(descriptor.z_scores(mean_tokens), (descriptor(mean_tokens) - 0.5).abs() / (1e-3 * 0.5))


@pytest.mark.parametrize("batches", [[3, 3, 3], [1, 12], [2], [7, 1, 1, 1]])
def test_only_the_latest_losses_are_stored(batches):
    descriptor = Descriptor(WIDTH, 4, 5, torch.Generator())
    numbers, expected = itertools.count(), []
    for size in batches:
        values = [float(next(numbers)) for _ in range(size)]
        expected = (expected + values)[-5:]
        descriptor.append_losses(torch.tensor(values))
    assert descriptor.recent.tolist() == expected


def test_the_z_score_of_a_mixture_is_that_of_its_best_module():
    mixture, mean_tokens = random_mixture(3), tokens().mean(1)
    for k in range(3):
        mixture[k].descriptor.append_losses(torch.tensor([1.0, 2.0, 3.0]) * (k + 1))
    expected = []
    for k in range(3):
        losses = mixture[k].descriptor(mean_tokens)
        expected.append(float(((losses - 2 * (k + 1)) / (k + 1)).abs().mean()))
    assert mixture.z_score(mean_tokens) == pytest.approx(min(expected), rel=1e-5)


def test_the_last_quarter_of_the_blocks_is_expandable(tmp_path, tiny_vit):
    write_tiny_vit(tmp_path / "deep.safetensors", depth=12)
    runtime = make_runtime("cpu", "fp32", 1)
    deep, shallow = load_backbone(str(tmp_path / "deep.safetensors")), load_backbone(tiny_vit)
    assert SEMA(deep, SEMAOptions(), runtime).modules.expandable == range(9, 12)
    assert SEMA(shallow, SEMAOptions(), runtime).modules.expandable == range(1, 2)
    assert SEMA(shallow, SEMAOptions(expandable=1.0), runtime).modules.expandable == range(2)


def test_the_size_of_a_published_module():
    expert = Expert(768, 16, 1.0, 128, 500, torch.Generator())
    count = {name: sum(p.numel() for p in part.parameters()) for name, part in expert.named_children()}
    assert count == {"adapter": 2 * 768 * 16 + 16 + 768, "route": 769, "descriptor": 2 * 768 * 128 + 128 + 768}


def test_an_added_module_changes_only_the_inputs_of_later_blocks(tiny_run):
    ready = sema(tiny_run, expandable=1.0)
    ready.method.learn(ready.task(0))
    means = []
    for _ in range(2):
        recorder = MeanTokenRecorder(ready.method.modules)
        ready.method.features(shown_images(ready), recorder)
        means.append(recorder.means)
        ready.method.modules.expand(0, torch.Generator().manual_seed(3))
    assert torch.equal(means[0][0], means[1][0])
    assert not torch.equal(means[0][1], means[1][1])


def test_at_most_one_module_per_block_and_task_is_added(tiny_run):
    ready = sema(tiny_run, "2,1,1,2", expandable=1.0, threshold=0.0)
    for index in range(4):
        report = ready.method.learn(ready.task(index))
        assert report["expanded"] == ([0, 1] if index else [])
        assert report["modules"] == [index + 1] * 2
        num_trainings = len(report["expanded"]) or 1
        assert len(report["losses"]) == num_trainings * 2
        assert len(report["descriptor_losses"]) == num_trainings * 2


def test_old_modules_are_bit_identical_after_a_task(tiny_run):
    ready = sema(tiny_run, "3,2,1", threshold=0.0)
    method = ready.method
    method.learn(ready.task(0))
    before = copy_of(method.modules.state_dict())
    assert method.learn(ready.task(1))["modules"] == [2]
    after = method.modules.state_dict()
    assert unchanged(before, after)
    new = method.modules.mixture(1)[1]
    fresh = Expert(64, 4, 1.0, 128, 500, seeds.generator(ready.seed, 1, "module 1"))
    for name, value in fresh.named_parameters():
        assert not torch.equal(value, new.state_dict()[name]), f"{name} was trained"
    assert not any(parameter.requires_grad for parameter in method.modules.parameters())
    assert not any(module.training for module in method.modules.modules())


def test_the_first_router_row_stays_random_and_descriptors_learn(tiny_run):
    ready = sema(tiny_run, weight_decay=0.0, descriptor_epochs=8)
    report = ready.method.learn(ready.task(0))
    generator = seeds.generator(ready.seed, 0, "modules")
    fresh = ExpandableAdapters(2, 1, 64, 4, 1.0, 128, 500)
    fresh.initialise(generator)
    row = ready.method.modules.mixture(1)[0].route
    assert unchanged(fresh.mixture(1)[0].route.state_dict(), row.state_dict())
    assert bool((ready.method.modules.fixed[0].up.weight != 0).any())
    assert report["descriptor_losses"][-1] < report["descriptor_losses"][0]


def test_descriptors_store_losses_of_both_training_phases(tiny_run):
    for buffer, expected in ((500, 18 * (2 + 2)), (50, 50)):
        ready = sema(tiny_run, buffer=buffer, standardise=False)
        ready.method.learn(ready.task(0))
        assert len(ready.method.modules.mixture(1)[0].descriptor.recent) == expected


def test_standardised_losses_do_not_depend_on_the_scale_of_tokens():
    means = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(2))
    losses = []
    for size in (1.0, 1e-3, 1e3):
        descriptor = Descriptor(WIDTH, 3, 500, torch.Generator().manual_seed(1))
        descriptor.append_losses(torch.ones(4))
        descriptor.standardise(size * means + 5 * size)
        assert len(descriptor.recent) == 0, "losses on another scale are discarded"
        losses.append(descriptor(size * means + 5 * size).detach())
    for actual in losses[1:]:
        torch.testing.assert_close(actual, losses[0], rtol=1e-3, atol=1e-4)
    one = Descriptor(WIDTH, 3, 500, torch.Generator())
    one.standardise(means[:1])
    assert torch.isfinite(one(means)).all(), "a single image has no deviation"


def test_standardised_descriptors_are_saved(tiny_run):
    ready = sema(tiny_run, descriptor_epochs=2)
    ready.method.learn(ready.task(0))
    descriptor = ready.method.modules.mixture(1)[0].descriptor
    assert len(descriptor.recent) == 18 * 2, "only losses of standardised tokens"
    assert not torch.equal(descriptor.spread, torch.ones(64))
    other = sema(tiny_run, descriptor_epochs=2)
    other.method.load_state_dict(copy_of(ready.method.state_dict()))
    restored = other.method.modules.mixture(1)[0].descriptor
    assert torch.equal(restored.centre, descriptor.centre)
    assert torch.equal(restored.spread, descriptor.spread)


def test_only_data_unlike_earlier_ones_add_a_module(tiny_run):
    ready = sema(tiny_run, weight_decay=0.0, descriptor_epochs=30, descriptor_rate=0.01)
    method, task = ready.method, ready.task(0)
    method.learn(task)
    first = copy_of(method.state_dict())
    with_new_classes = {"index": 1, "classes": range(3, 6), "labels": task.labels + 3}

    report = method.learn(dataclasses.replace(task, **with_new_classes))
    assert report["expanded"] == []
    assert 0 < report["surprise"]["1"] < 2
    modules = {name: value for name, value in first.items() if name.startswith("modules.")}
    assert unchanged(modules, method.state_dict())
    assert torch.equal(method.head.weight[:3], first["head.weight"]), "masked: old rows have no gradient"
    assert len(method.head.weight) == 6

    method.load_state_dict(first)
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(Task)}
    report = method.learn(ShiftedTask(**(fields | with_new_classes)))
    assert report["expanded"] == [1]
    assert report["surprise"]["1"] > 2


def test_weight_decay_shrinks_old_rows_as_published(tiny_run):
    ready = sema(tiny_run, threshold=1e9, weight_decay=0.1)
    ready.method.learn(ready.task(0))
    old = ready.method.head.weight.detach().clone()
    ready.method.learn(ready.task(1))
    ratio = ready.method.head.weight[:3] / old
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-4, atol=1e-5)
    assert 0.9 < float(ratio.mean()) < 1


def test_the_row_of_a_single_class_keeps_its_initial_values(tiny_run):
    ready = sema(tiny_run, threshold=1e9, weight_decay=0.0)
    ready.method.learn(ready.task(0))
    report = ready.method.learn(ready.task(1))
    assert report["losses"] == [0.0, 0.0]
    bound = 64**-0.5
    start = torch.empty(1, 64).uniform_(-bound, bound, generator=seeds.generator(ready.seed, 1, "head"))
    assert torch.equal(ready.method.head.weight[3:].detach(), start)
    assert float(ready.method.head.bias[3]) == 0


def test_fixed_adapters_stay_zero_after_a_single_class_first_task(tiny_run):
    ready = sema(tiny_run, "1,4,1", threshold=0.0)
    for index in range(3):
        ready.method.learn(ready.task(index))
        assert (ready.method.modules.fixed[0].up.weight == 0).all()
    assert bool((ready.method.modules.mixture(1)[1].adapter.up.weight != 0).any()), "the second task's module learned"


def test_saving_preserves_z_scores_and_modules(tiny_run):
    first, second = sema(tiny_run, threshold=0.0), sema(tiny_run, threshold=0.0)
    for index in range(2):
        first.method.learn(first.task(index))
    state = {name: value.contiguous() for name, value in first.method.state_dict().items()}
    second.method.load_state_dict(load(save(state)))
    surprises = []
    for ready in (first, second):
        recorder = MeanTokenRecorder(ready.method.modules)
        ready.method.features(shown_images(ready), recorder)
        surprises.append(ready.method.modules.mixture(1).z_score(recorder.means[1]))
    assert surprises[0] == surprises[1] > 0
    assert torch.equal(first.method.scores(shown_images(first)), second.method.scores(shown_images(second)))
    reports = [ready.method.learn(ready.task(2)) for ready in (first, second)]
    assert reports[0] == reports[1]
    assert unchanged(first.method.state_dict(), second.method.state_dict())


def test_an_untrained_state_can_be_saved_and_loaded(tiny_run):
    first, second = sema(tiny_run), sema(tiny_run)
    second.method.load_state_dict(first.method.state_dict())
    for ready in (first, second):
        ready.method.learn(ready.task(0))
    assert unchanged(first.method.state_dict(), second.method.state_dict())


@pytest.mark.parametrize(
    "switch",
    [
        {"scale": 0.1},
        {"rank": 5},
        {"expandable": 1.0},
        {"threshold": 1e9},
        {"descriptor_epochs": 3},
        {"descriptor_rate": 0.02},
        {"descriptor_width": 16},
        {"buffer": 30},
        {"standardise": False},
        {"epochs": 1},
    ],
)
def test_every_option_changes_the_result(switch, tiny_run):
    states = []
    for options in ({}, switch):
        ready = sema(tiny_run, "3,2,1", **({"threshold": 0.0} | options))
        for index in range(2):
            ready.method.learn(ready.task(index))
        states.append(ready.method.state_dict())
    assert states[0].keys() != states[1].keys() or any(
        value.shape != states[1][name].shape or not torch.equal(value, states[1][name])
        for name, value in states[0].items()
    )


def test_the_error_for_diverging_descriptors_names_their_learning_rate(tiny_run):
    ready = sema(tiny_run, descriptor_rate=1e4, descriptor_epochs=20)
    with pytest.raises(OneaError, match="--descriptor-rate"):
        ready.method.learn(ready.task(0))


@pytest.mark.parametrize(
    "option", [{"rank": 0}, {"expandable": 0.0}, {"expandable": 1.5}, {"threshold": -1.0}, {"buffer": 0}]
)
def test_impossible_options_are_refused(option):
    with pytest.raises(OneaError, match=next(iter(option))):
        SEMAOptions(**option)


def test_published_options():
    for data, epochs, threshold in (
        ("cifar100", 5, 2),
        ("imagenet-a", 20, 1),
        ("imagenet-r", 20, 2),
        ("cub200", 20, 2),
    ):
        options = SEMAOptions(**preset_options("sema", f"paper/{data}"))
        assert (options.epochs, options.threshold) == (epochs, threshold)
        assert (options.learning_rate, options.batch_size, options.weight_decay, options.rank) == (0.005, 32, 5e-4, 16)
        assert options.descriptor_recipe().learning_rate == 0.01
