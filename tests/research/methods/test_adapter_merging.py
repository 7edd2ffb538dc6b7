# SPDX-License-Identifier: Apache-2.0
"""The method `adapter`: runs with every operator, including those with statistics and other initial weights."""

from __future__ import annotations

import json

import pytest
import torch
from support.methods import learn_all, prepared, shown_images
from torch.nn import functional as F

from onea.errors import OneaError
from onea.learner.adapter_training import train_adapter
from onea.learner.local_head import local_head
from onea.learner.merged_adapter import AdapterCache, diagonal_fisher, gram_matrices
from onea.merging import OPERATORS, make_operator
from onea.merging.operator import Sizes
from onea.vit.adapter import Adapters


def method_with(tiny_run, merge: str, adapter_cache=None, **changes):
    options = tiny_run["options"] | {"merge": merge} | changes.pop("options", {})
    return prepared(tiny_run, "adapter", adapter_cache, options=options, **changes)


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(params=sorted(OPERATORS.builtin))
def merge(request) -> str:
    return request.param


def test_every_operator_runs_and_resumes_bit_for_bit(merge, tiny_run):
    whole = learn_all(method_with(tiny_run, merge))
    first, second = method_with(tiny_run, merge), method_with(tiny_run, merge)
    reports = [first.method.learn(first.task(index)) for index in (0, 1)]
    json.dumps(reports)
    second.method.load_state_dict({name: value.clone() for name, value in first.method.state_dict().items()})
    learn_all(second, [2])
    assert same(whole.state_dict(), second.method.state_dict())
    assert torch.isfinite(whole.scores(shown_images(second))).all()


@pytest.mark.parametrize("merge", ["fisher", "regmean", "magmax", "opcm", "iso-c"])
@pytest.mark.parametrize("sizes", ["1,2,1,1,1", "1,1,1,1,1,1"])
def test_single_class_tasks_leave_everything_finite(merge, sizes, tiny_run):
    ready = method_with(tiny_run, merge, sizes=sizes)
    method = learn_all(ready)
    assert all(torch.isfinite(value).all() for value in method.state_dict().values())


@pytest.mark.parametrize("name", ["one-a", "running-mean"])
def test_the_adapter_method_equals_the_named_methods(name, tiny_run):
    options = {"single_class": "train"}  # in which their presets differ
    by_name = learn_all(method_with(tiny_run, name, options=options))
    expected = learn_all(prepared(tiny_run, name, options=tiny_run["options"] | options))
    assert same(by_name.state_dict(), expected.state_dict())


def test_trained_adapters_are_shared_between_operators(tiny_run):
    adapter_cache = AdapterCache()
    learn_all(method_with(tiny_run, "ties", adapter_cache))
    assert len(adapter_cache) == 3
    learn_all(method_with(tiny_run, "opcm", adapter_cache))
    assert len(adapter_cache) == 3


def test_keeping_the_head_does_not_change_the_training(tiny_run):
    ready = method_with(tiny_run, "fisher")
    task, method = ready.task(0), ready.method
    plain = train_adapter(
        method.vit,
        method.learner.new_adapters(task.seed, task.index),
        task,
        method.options,
        method.runtime,
        method.plan,
    )
    trained = method.learner._train(method.merged, task, None, None)
    assert same(trained.tensors, plain.tensors)
    assert trained.report == plain.report


def test_operator_options_are_passed_and_validated(tiny_run):
    ready = method_with(tiny_run, "ties", options={"merge_options": "density=0.5, scale=0.6"})
    assert ready.method.learner.operator == make_operator("ties", density=0.5, scale=0.6)
    for merge, text, message in (
        ("ties", "density", "name=value"),
        ("ties", "densty=1", "did you mean 'density'"),
        ("tis", "", "did you mean 'ties'"),
    ):
        with pytest.raises(OneaError, match=message):
            method_with(tiny_run, merge, options={"merge_options": text})


def adapters_and_head(ready, index: int):
    """An adapter and a head with random weights, so that no gradient vanishes."""
    task, vit = ready.task(index), ready.method.vit
    generator = torch.Generator().manual_seed(3)
    adapters = Adapters(vit.depth, vit.width, 4, generator=generator).eval()
    with torch.no_grad():
        for parameter in adapters.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return task, vit, adapters, local_head(vit.width, task, "linear")


def test_fisher_is_the_sum_of_squared_gradients_sample_by_sample(tiny_run):
    ready = method_with(tiny_run, "fisher")
    task, vit, adapters, head = adapters_and_head(ready, 0)
    actual = diagonal_fisher(vit, adapters, head, task, ready.method.runtime)
    expected = {f"fisher.{name}": torch.zeros_like(p, dtype=torch.float64) for name, p in adapters.named_parameters()}
    for images, labels in task.whole_image_batches(1):
        loss = F.cross_entropy(head(vit(images, adapters)), labels - task.classes.start)
        gradients = torch.autograd.grad(loss, list(adapters.parameters()))
        for (name, _), gradient in zip(adapters.named_parameters(), gradients, strict=True):
            expected[f"fisher.{name}"] += gradient.double().square()
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-3, atol=1e-12)
    assert all(parameter.grad is None for parameter in adapters.parameters())
    assert not any(module._forward_hooks for module in adapters.modules())


def test_fisher_of_a_single_class_is_zero(tiny_run):
    ready = method_with(tiny_run, "fisher")
    task, vit, adapters, head = adapters_and_head(ready, 1)
    assert len(task.classes) == 1
    actual = diagonal_fisher(vit, adapters, head, task, ready.method.runtime)
    assert all((value == 0).all() for value in actual.values())


def test_gram_matrices_are_those_of_the_inputs_of_every_layer(tiny_run):
    ready = method_with(tiny_run, "regmean")
    task, vit, adapters, _ = adapters_and_head(ready, 0)
    actual = gram_matrices(vit, adapters, task, ready.method.runtime)
    inputs_by_block = []
    original = adapters.mlp_update
    adapters.mlp_update = lambda block, u: inputs_by_block.append((block, u.detach())) or original(block, u)
    with torch.no_grad():
        for images, _ in task.whole_image_batches(5):
            vit(images, adapters)
    for block, layer in enumerate(adapters.blocks):
        inputs = torch.cat([u.flatten(0, 1) for index, u in inputs_by_block if index == block]).double()
        hidden = F.relu(inputs @ layer.down.weight.double().T + layer.down.bias.double())
        for name, rows in (("down", inputs), ("up", hidden)):
            torch.testing.assert_close(
                actual.pop(f"gram.blocks.{block}.{name}.weight"), (rows.T @ rows).detach(), rtol=1e-3, atol=1e-3
            )
    assert not actual


def test_magmax_trains_from_the_previous_adapter_and_compares_with_the_first_start(tiny_run):
    ready = method_with(tiny_run, "magmax")
    method, trained = ready.method, []
    original = method.learner._train
    method.learner._train = lambda *arguments: trained.append(original(*arguments)) or trained[-1]
    learn_all(ready)
    assert same(method.merged.start, trained[-1].tensors)
    fresh = learn_all(method_with(tiny_run, "running-mean", adapter_cache := AdapterCache()))
    assert not same(fresh.state_dict(), method.state_dict())
    weights = [next(iter(adapter_cache.values()))[0], trained[0].tensors]
    assert same(*weights), "the first task starts from random weights"
    for name, merged in method.adapter.state_dict().items():
        changes = torch.stack([result.tensors[name] - method.merged.origin[name] for result in trained])
        largest = changes.gather(0, changes.abs().argmax(0, keepdim=True))[0]
        torch.testing.assert_close(merged, method.merged.origin[name] + 0.5 * largest, rtol=1e-4, atol=1e-5)


def test_acmap_trains_later_tasks_from_the_first_trained_adapter(tiny_run):
    ready = method_with(tiny_run, "acmap")
    ready.method.learn(ready.task(0))
    first = {name: value.clone() for name, value in ready.method.adapter.state_dict().items()}
    learn_all(ready, [1, 2])
    assert same(ready.method.merged.start, first)


def test_deltas_are_taken_from_a_shared_start(tiny_run):
    adapter_cache = AdapterCache()
    options = {"merge_options": "scale=0.5"}
    method = learn_all(method_with(tiny_run, "task-arithmetic", adapter_cache, options=options))
    for name, merged in method.adapter.state_dict().items():
        total = sum(tensors[name] - method.merged.origin[name] for tensors, _ in adapter_cache.values())
        torch.testing.assert_close(merged, method.merged.origin[name] + 0.5 * total)
    options = {"start": "fresh"}
    from_fresh = learn_all(method_with(tiny_run, "task-arithmetic", adapter_cache := AdapterCache(), options=options))
    assert not from_fresh.merged.origin
    for name, merged in from_fresh.adapter.state_dict().items():
        torch.testing.assert_close(merged, 0.3 * sum(tensors[name] for tensors, _ in adapter_cache.values()))


def test_operators_on_deltas_start_from_shared_weights_by_default(merge, tiny_run):
    method = method_with(tiny_run, merge).method
    fresh_start = method_with(tiny_run, merge, options={"start": "fresh"}).method
    default_start = make_operator(merge).starts_from
    assert (method.learner.start, fresh_start.learner.start) == (default_start, "fresh")
    assert (default_start != "fresh") or not make_operator(merge).on_deltas


def test_fisher_merges_with_the_statistics_of_both_adapters(tiny_run):
    ready = method_with(tiny_run, "fisher")
    method = ready.method
    method.learn(ready.task(0))
    old, old_fisher = dict(method.adapter.state_dict()), dict(method.merged.operator_state)
    old = {name: value.clone() for name, value in old.items()}
    assert set(old_fisher) == {f"fisher.{name}" for name in old}
    trained = method.learner._train(method.merged, ready.task(2), None, None)
    fresh = method.learner._statistics(trained, ready.task(2))
    state = old_fisher | {f"new_{name}": value for name, value in fresh.items()}
    expected, operator_state = make_operator("fisher")(old, trained.tensors, Sizes(3, 2, 18, 12), state)
    method.learn(ready.task(2))
    assert same(dict(method.adapter.state_dict()), expected)
    assert same(method.merged.operator_state, operator_state)
