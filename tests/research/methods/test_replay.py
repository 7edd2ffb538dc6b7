# SPDX-License-Identifier: Apache-2.0
"""Methods that keep images: which images they train on, and how iCaRL distils, chooses exemplars and answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.methods import learn_all, prepared, shown_images
from torch.nn import functional as F

from onea import seeds
from onea.data.image_storage import PackedImages
from onea.errors import OneaError
from onea.learner.local_head import local_head, new_adapters, train_with_local_head
from onea.options import make_options
from onea.research.methods import method_class
from onea.research.methods.replay import distillation_targets, herd
from onea.schedules import cosine

SIZES = "3,1,2"
PER_CLASS = 6
REHEARSAL = ["replay", "gdumb", "icarl"]


def keeping(values: dict, method: str, memory: int = 2, sizes: str = SIZES, **options):
    return prepared(values, method, sizes=sizes, options=values["options"] | {"memory": memory} | options)


def copied(method) -> dict:
    return {name: value.clone() for name, value in method.state_dict().items()}


def assert_same(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(value, right[name]) for name, value in left.items())


def shown_of_classes(ready, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The training images of the first classes as network inputs, with their labels."""
    rows = (ready.train.labels < classes).nonzero()[:, 0]
    return ready.train.images.test_views(rows), ready.train.labels[rows]


@pytest.fixture
def trained_rows(monkeypatch) -> list[torch.Tensor]:
    """The rows of each epoch that is trained from now on."""
    epochs: list[torch.Tensor] = []
    original = PackedImages.train_batches

    def spied(self, rows, *args):
        epochs.append(rows)
        return original(self, rows, *args)

    monkeypatch.setattr(PackedImages, "train_batches", spied)
    return epochs


@pytest.mark.parametrize("method", REHEARSAL)
@pytest.mark.parametrize("memory", [1, 2, 100])
def test_which_images_are_trained_on_in_each_task(method, memory, tiny_run, trained_rows):
    """All images of new classes (with GDumb only the kept ones) and the kept images of old ones, once in each epoch."""
    ready = keeping(tiny_run, method, memory)
    labels = ready.train.labels
    for index in range(3):
        task, before = ready.task(index), ready.method.memory
        trained_rows.clear()
        report = ready.method.learn(task)
        after = ready.method.memory
        new = after.rows[len(before) :] if method == "gdumb" else task.rows
        expected = sorted([*before.rows.tolist(), *new.tolist()])
        assert len(trained_rows) == report["epochs"]
        assert all(sorted(rows.tolist()) == expected for rows in trained_rows)
        assert report["memory"] == {"images": len(after), "replayed": len(before)}

        assert torch.equal(after.rows[: len(before)], before.rows), "exemplars of old classes stay"
        assert torch.isin(after.rows[len(before) :], task.rows).all()
        assert torch.equal(after.labels, labels[after.rows])
        assert len(after.rows.unique()) == len(after)
        kept = Counter(after.labels.tolist())
        assert kept == dict.fromkeys(range(task.classes.stop), min(memory, PER_CLASS))


@pytest.mark.parametrize("method", REHEARSAL)
@pytest.mark.parametrize("sizes", ["1,1,3,1", "4,2"])
def test_a_run_resumes_bit_for_bit(method, sizes, tiny_run):
    whole, first, second = (keeping(tiny_run, method, sizes=sizes) for _ in range(3))
    tasks = range(whole.stream.tasks)
    expected = copied(learn_all(whole))
    learn_all(first, tasks[: len(tasks) // 2])
    second.method.load_state_dict(copied(first.method))
    images = shown_images(whole)
    assert torch.equal(second.method.scores(images), first.method.scores(images))
    assert_same(copied(learn_all(second, tasks[len(tasks) // 2 :])), expected)


@pytest.mark.parametrize("method", REHEARSAL)
def test_tasks_of_one_class_are_learned(method, tiny_run):
    options = {"epochs": 25, "crop_scale": 0.6, "scale": 0.5, "learning_rate": 0.1}
    ready = keeping(tiny_run, method, 5, "1,1,1,1,1,1", **options)
    learn_all(ready)
    images, labels = shown_of_classes(ready, 6)
    assert (ready.method.scores(images).argmax(1) == labels).float().mean() > 0.6


@pytest.mark.parametrize("method", REHEARSAL)
@pytest.mark.parametrize("memory", [0, -1])
def test_a_memory_without_images_is_refused(method, memory):
    with pytest.raises(OneaError, match=r"memory is .*; it must be at least 1"):
        make_options(method_class(method).Options, {"memory": memory})


@pytest.mark.parametrize("method", REHEARSAL)
def test_one_pass_whatever_the_number_of_tasks(method):
    kind = method_class(method)
    options = make_options(kind.Options, {"epochs": 10, "epoch_growth": 0.5})
    assert [kind.forward_passes(options, tasks) for tasks in (1, 40)] == [1, 1]
    assert kind.epochs_per_task(options, [4, 1, 5]) == method_class("joint").epochs_per_task(options, [4, 1, 5])


def test_the_same_images_are_kept_as_by_one_a_plus(tiny_run):
    methods = ["replay", "gdumb", "one-a-plus"]
    one, two, three = (learn_all(keeping(tiny_run, method)).memory.rows for method in methods)
    assert torch.equal(one, two)
    assert torch.equal(one, three)


# --- experience replay ------------------------------------------------------------------------------------------------


def test_replay_is_sequential_fine_tuning_on_the_new_and_the_kept_images(tiny_run):
    replay, sequential = keeping(tiny_run, "replay"), keeping(tiny_run, "sequential")
    learn_all(replay, [0])
    learn_all(sequential, [0])
    memory, task = replay.method.memory, replay.task(1)
    joined = replace(
        task,
        classes=range(4),
        rows=torch.cat([task.rows, memory.rows]),
        labels=torch.cat([task.labels, memory.labels]),
    )
    replay.method.learn(task)
    sequential.method.add_classes(task)
    sequential.method.fine_tune(joined, sequential.method.cross_entropy)
    trained = {name: value for name, value in copied(replay.method).items() if not name.startswith("memory.")}
    assert_same(trained, copied(sequential.method))


def test_kept_images_prevent_forgetting(tiny_run):
    options = {"epochs": 25, "learning_rate": 0.2, "crop_scale": 0.6, "scale": 0.5}
    accuracy = {}
    for method in ("sequential", *REHEARSAL):
        ready = keeping(tiny_run, method, 3, "3,3", **options)
        learn_all(ready)
        images, labels = shown_of_classes(ready, 3)
        accuracy[method] = float((ready.method.scores(images).argmax(1) == labels).float().mean())
    assert all(accuracy[method] > accuracy["sequential"] + 0.2 for method in REHEARSAL), accuracy


# --- GDumb ------------------------------------------------------------------------------------------------------------


def test_gdumb_depends_on_no_earlier_adapter(tiny_run):
    plain, disturbed = keeping(tiny_run, "gdumb"), keeping(tiny_run, "gdumb")
    for ready in (plain, disturbed):
        learn_all(ready, [0, 1])
    with torch.no_grad():
        for parameter in (*disturbed.method.adapter.parameters(), *disturbed.method.head.parameters()):
            parameter.fill_(7.0)
    assert_same(copied(learn_all(plain, [2])), copied(learn_all(disturbed, [2])))


def test_gdumb_equals_one_training_on_the_kept_images(tiny_run):
    ready = keeping(tiny_run, "gdumb")
    state = copied(learn_all(ready))
    method, options, task = ready.method, ready.method.options, ready.task(2)
    kept = replace(task, classes=range(6), rows=method.memory.rows, labels=method.memory.labels)
    adapters = new_adapters(method.vit, options, seeds.generator(ready.seed, 2, "adapter"))
    head = local_head(method.vit.width, kept, options.head, options.head_scale)
    train_with_local_head(method.vit, adapters, head, kept, options.recipe(), method.runtime)
    assert all(torch.equal(state[f"adapter.{name}"], value) for name, value in adapters.state_dict().items())
    assert all(torch.equal(state[f"head.{name}"], value) for name, value in head.state_dict().items())


# --- iCaRL ------------------------------------------------------------------------------------------------------------


def chosen_by_brute_force(features: torch.Tensor, count: int) -> list[int]:
    """Compares the mean of every possible set of images with the class mean, all of unit length."""
    mean = F.normalize(features.double().mean(0), dim=0)
    chosen: list[int] = []
    while len(chosen) < min(count, len(features)):
        left = [each for each in range(len(features)) if each not in chosen]
        means = [F.normalize(features[[*chosen, each]].double().mean(0), dim=0) for each in left]
        distances = torch.stack([(mean - one).norm() for one in means])
        chosen.append(left[int(distances.argmin())])
    return chosen


@given(st.integers(1, 12), st.integers(2, 5), st.integers(1, 15), st.integers(0, 999))
def test_herding_equals_brute_force(images, width, count, seed):
    features = F.normalize(torch.randn(images, width, generator=torch.Generator().manual_seed(seed)), dim=1)
    assert herd(features, count).tolist() == chosen_by_brute_force(features, count)


def test_herding_of_equal_images_chooses_each_once():
    assert herd(torch.ones(4, 2) / 2**0.5, 9).tolist() == [0, 1, 2, 3]


def test_exemplars_are_herded_with_the_network_after_the_training(tiny_run):
    ready = keeping(tiny_run, "icarl", 3)
    for index in range(3):
        task, before = ready.task(index), len(ready.method.memory)
        ready.method.learn(task)
        expected = []
        for label in task.classes:
            rows = task.rows[task.labels == label]
            features = ready.method.features(task.images.test_views(rows), ready.method.adapter)
            expected += rows[chosen_by_brute_force(F.normalize(features, dim=1), 3)].tolist()
        assert ready.method.memory.rows[before:].tolist() == expected


def test_means_are_those_of_the_exemplars_with_the_current_network(tiny_run):
    ready = keeping(tiny_run, "icarl")
    method, test = ready.method, shown_images(ready)
    for index in range(3):
        method.learn(ready.task(index))
        features = method.features(ready.train.images.test_views(method.memory.rows), method.adapter)
        unit = features / features.norm(dim=1, keepdim=True)
        classes = range(ready.task(index).classes.stop)
        means = torch.stack([unit[method.memory.labels == label].mean(0) for label in classes])
        torch.testing.assert_close(method.means, means)
        shown = method.features(test, method.adapter)
        nearest = torch.cdist(F.normalize(shown, dim=1), F.normalize(means, dim=1)).argmin(1)
        assert torch.equal(method.scores(test).argmax(1), nearest)


def test_icarl_equals_a_plain_loop(tiny_run):
    """Three tasks by hand: a copy of the network gives the targets of old classes, images of new classes the others."""
    ready = keeping(tiny_run, "icarl", dropout=0.0, weight_decay=0.01)
    method, options = ready.method, ready.method.options
    adapters = new_adapters(method.vit, options, seeds.generator(ready.seed, 0, "adapter"))
    old_adapters = new_adapters(method.vit, options, torch.Generator())
    weight, bias = torch.empty(0, 64), torch.empty(0)
    for index in range(3):
        task, memory = ready.task(index), method.memory
        method.learn(task)
        old_adapters.load_state_dict(adapters.state_dict())
        old_weight, old_bias = weight.detach().clone(), bias.detach().clone()
        generator = seeds.generator(ready.seed, index, "head")
        rows = torch.empty(len(task.classes), 64).uniform_(-1 / 8, 1 / 8, generator=generator)
        biases = torch.empty(len(task.classes)).uniform_(-1 / 8, 1 / 8, generator=generator)
        weight = torch.cat([old_weight, rows]).requires_grad_(True)
        bias = torch.cat([old_bias, biases]).requires_grad_(True)
        parameters = [*adapters.parameters(), weight, bias]
        momenta = [torch.zeros_like(parameter) for parameter in parameters]
        order, crops = (seeds.generator(ready.seed, index, name) for name in ("order", "crops"))
        images_of_task = replace(
            task, rows=torch.cat([task.rows, memory.rows]), labels=torch.cat([task.labels, memory.labels])
        )
        for epoch in range(options.epochs):
            rate = options.learning_rate * cosine(epoch, options.epochs)
            for images, labels in images_of_task.train_batches(options.batch_size, options.crop_scale, order, crops):
                with torch.no_grad():
                    old = torch.sigmoid(method.vit(images, old_adapters) @ old_weight.T + old_bias)
                outputs = torch.sigmoid(method.vit(images, adapters) @ weight.T + bias)
                loss = torch.zeros(())
                for image, label in enumerate(labels.tolist()):
                    for position in range(task.classes.stop):
                        is_old = position < task.classes.start
                        target = old[image, position] if is_old else float(position == label)
                        output = outputs[image, position]
                        loss = loss - (target * output.log() + (1 - target) * (1 - output).log()) / len(labels)
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    for parameter, gradient, momentum in zip(parameters, gradients, momenta, strict=True):
                        momentum.mul_(0.9).add_(gradient + options.weight_decay * parameter)
                        parameter.sub_(rate * momentum)
        torch.testing.assert_close(method.head.weight, weight, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(method.head.bias, bias, rtol=1e-3, atol=1e-5)
        for name, value in adapters.state_dict().items():
            torch.testing.assert_close(method.adapter.state_dict()[name], value, rtol=1e-3, atol=1e-5)


def test_targets_of_old_classes_are_the_outputs_of_the_old_network(tiny_run):
    ready = keeping(tiny_run, "icarl")
    method = learn_all(ready, [0])
    images, labels = shown_of_classes(ready, 4)
    with torch.no_grad():
        expected = method.head(method.features(images, method.adapter)).sigmoid()
    outputs = method.frozen_outputs()
    method.learn(ready.task(1))
    assert torch.equal(outputs(images), expected), "not those of the network after the task"
    targets = distillation_targets(labels, expected, 4)
    assert torch.equal(targets[:, :3], expected)
    assert torch.equal(targets[:, 3], (labels == 3).float())


def test_distillation_vanishes_as_long_as_the_network_does_not_change(tiny_run):
    ready = keeping(tiny_run, "icarl", dropout=0.0)
    method, task = learn_all(ready, [0]), ready.task(1)
    images, labels = shown_of_classes(ready, 4)
    outputs = method.frozen_outputs()
    method.add_classes(task)

    def gradients():
        method.distillation_loss(outputs, images, labels).backward()
        return method.head.weight.grad.abs().amax(1)

    unchanged = gradients()
    assert unchanged[:3].max() < 1e-6
    assert unchanged[3] > 1e-3, "the new class has a gradient"
    with torch.no_grad():
        method.head.bias[:3] += 1.0
    method.head.weight.grad = None
    assert gradients()[:3].min() > 1e-3
