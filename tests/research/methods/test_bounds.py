# SPDX-License-Identifier: Apache-2.0
"""The bounds: joint training and sequential fine-tuning."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.methods import learn_all, prepared, shown_images
from torch.nn import functional as F

from onea import seeds
from onea.errors import OneaError
from onea.learner.local_head import local_head, new_adapters, train_with_local_head
from onea.learner.tasks import Task
from onea.schedules import cosine

SIZES = "3,1,2"


def bound(values: dict, method: str, sizes: str = SIZES, **options):
    return prepared(values, method, sizes=sizes, options=values["options"] | options)


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def test_joint_does_not_depend_on_earlier_training(tiny_run):
    whole, last_task_only = bound(tiny_run, "joint"), bound(tiny_run, "joint")
    assert same(learn_all(whole).state_dict(), learn_all(last_task_only, [2]).state_dict())


def test_joint_equals_one_training_on_all_images_with_the_seeds_of_the_last_task(tiny_run):
    ready = bound(tiny_run, "joint", classifier="prototypes")
    state = learn_all(ready).state_dict()
    method, options = ready.method, ready.method.options
    everything = Task(
        2, "all", range(6), ready.train.images, torch.arange(len(ready.train.labels)), ready.train.labels, ready.seed
    )
    adapters = new_adapters(method.vit, options, seeds.generator(ready.seed, 2, "adapter"))
    head = local_head(method.vit.width, everything, options.head, options.head_scale)
    train_with_local_head(method.vit, adapters, head, everything, options.recipe(), method.runtime)
    for name, value in adapters.state_dict().items():
        assert torch.equal(state[f"adapter.{name}"], value)
    for name, value in head.state_dict().items():
        assert torch.equal(state[f"head.{name}"], value)
    features = method.features(ready.train.images.test_views(everything.rows), adapters)
    means = torch.stack([features[ready.train.labels == label].mean(0) for label in range(6)])
    torch.testing.assert_close(state["prototypes"], means)


def test_joint_predicts_with_its_head(tiny_run):
    ready = bound(tiny_run, "joint")
    images = shown_images(ready)
    method = learn_all(ready)
    features = method.features(images, method.adapter)
    with torch.no_grad():
        torch.testing.assert_close(method.scores(images), method.head(features))


def test_joint_trains_on_all_images_so_far(tiny_run):
    ready = bound(tiny_run, "joint")
    reports = [ready.method.learn(ready.task(index)) for index in range(3)]
    assert [report["images"] for report in reports] == [18, 24, 36]
    assert all(report["losses"][0] > 0 for report in reports), "also in a task of one class"


def test_joint_training_depends_reproducibly_on_the_task(tiny_run):
    ready = bound(tiny_run, "joint", "6")
    task = ready.task(0)
    states = []
    for index in (0, 1, 1):
        ready.method.learn(dataclasses.replace(task, index=index))
        states.append({name: value.clone() for name, value in ready.method.state_dict().items()})
    assert same(states[1], states[2])
    for part in ("down", "up"):
        name = f"adapter.blocks.0.{part}.weight"
        assert not torch.equal(states[0][name], states[1][name])


def test_joint_without_old_images_is_refused(tiny_run):
    ready = bound(tiny_run, "joint")
    before = {name: value.clone() for name, value in ready.method.state_dict().items()}
    with pytest.raises(OneaError, match="all earlier tasks"):
        ready.method.learn(dataclasses.replace(ready.task(0), cumulative_task=None))
    assert same(before, ready.method.state_dict())


def test_joint_without_training_equals_simplecil(tiny_run):
    joint = learn_all(bound(tiny_run, "joint", learning_rate=0.0, classifier="prototypes"))
    simple = prepared(tiny_run, "simplecil", sizes=SIZES)
    images = shown_images(simple)
    torch.testing.assert_close(joint.scores(images), learn_all(simple).scores(images))


def test_sequential_equals_a_plain_loop(tiny_run):
    """Two tasks by hand: momentum, weight decay, cosine schedule and a softmax over all classes seen."""
    ready = bound(tiny_run, "sequential", dropout=0.0, weight_decay=0.01)
    state = learn_all(ready, [0, 1]).state_dict()
    method, options = ready.method, ready.method.options
    adapters = new_adapters(method.vit, options, seeds.generator(ready.seed, 0, "adapter"))
    weight, bias = torch.empty(0, 64), torch.empty(0)
    for index in (0, 1):
        task = ready.task(index)
        generator = seeds.generator(ready.seed, index, "head")
        rows = torch.empty(len(task.classes), 64).uniform_(-1 / 8, 1 / 8, generator=generator)
        biases = torch.empty(len(task.classes)).uniform_(-1 / 8, 1 / 8, generator=generator)
        weight = torch.cat([weight.detach(), rows]).requires_grad_(True)
        bias = torch.cat([bias.detach(), biases]).requires_grad_(True)
        parameters = [*adapters.parameters(), weight, bias]
        momenta = [torch.zeros_like(parameter) for parameter in parameters]
        order, crops = (seeds.generator(ready.seed, index, name) for name in ("order", "crops"))
        for epoch in range(options.epochs):
            rate = options.learning_rate * cosine(epoch, options.epochs)
            for images, labels in task.train_batches(options.batch_size, options.crop_scale, order, crops):
                logits = method.vit(images, adapters) @ weight.T + bias
                log_likelihood = logits.log_softmax(1)[torch.arange(len(labels)), labels]
                gradients = torch.autograd.grad(-log_likelihood.mean(), parameters)
                with torch.no_grad():
                    for parameter, gradient, momentum in zip(parameters, gradients, momenta, strict=True):
                        momentum.mul_(0.9).add_(gradient + options.weight_decay * parameter)
                        parameter.sub_(rate * momentum)
    torch.testing.assert_close(state["head.weight"], weight.detach(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(state["head.bias"], bias.detach(), rtol=1e-3, atol=1e-5)
    for name, value in adapters.state_dict().items():
        torch.testing.assert_close(state[f"adapter.{name}"], value, rtol=1e-3, atol=1e-5)


def test_sequential_lowers_the_scores_of_old_classes(tiny_run):
    ready = bound(tiny_run, "sequential", weight_decay=0.0, epochs=10)
    ready.method.learn(ready.task(0))
    before = {name: value.clone() for name, value in ready.method.state_dict().items()}
    images = ready.train.images.test_views(ready.task(1).rows)
    old = ready.method.scores(images)
    report = ready.method.learn(ready.task(1))
    assert report["losses"][0] > report["losses"][-1] > 0, (
        "a single class has a gradient, because old classes are in the softmax"
    )
    share = F.softmax(ready.method.scores(images), 1)[:, :3].sum(1)
    assert share.mean() < 0.5, "most of the probability goes to the new class"
    assert not torch.equal(ready.method.head.weight[:3], before["head.weight"])
    assert len(old[0]) == 3


def test_sequential_with_a_learning_rate_of_zero_only_adds_rows(tiny_run):
    ready = bound(tiny_run, "sequential", learning_rate=0.0)
    ready.method.learn(ready.task(0))
    before = {name: value.clone() for name, value in ready.method.state_dict().items()}
    ready.method.learn(ready.task(1))
    after = ready.method.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("adapter."))
    assert torch.equal(after["head.weight"][:3], before["head.weight"])
    assert after["head.weight"].shape == (4, 64)


def test_sequential_forgets_and_joint_does_not(tiny_run):
    """After longer training in two tasks, fine-tuning predicts only new classes, and joint training also old ones."""
    options = {"epochs": 25, "learning_rate": 0.2, "crop_scale": 0.6, "scale": 0.5}
    accuracy = {}
    for method in ("sequential", "joint"):
        ready = bound(tiny_run, method, "3,3", **options)
        learn_all(ready)
        rows = torch.arange(len(ready.train.labels))
        predictions = ready.method.scores(ready.train.images.test_views(rows)).argmax(1)
        accuracy[method] = float((predictions == ready.train.labels)[ready.train.labels < 3].float().mean())
    assert accuracy["sequential"] < 0.4
    assert accuracy["joint"] > accuracy["sequential"] + 0.3
