# SPDX-License-Identifier: Apache-2.0
"""TUNA: the universal adapter, the choice by entropy, and the orthogonality loss."""

from __future__ import annotations

import math

import pytest
import torch
from support.methods import learn_all, passes, prepared, shown_images
from torch.nn import functional as F

from onea import schedules
from onea.options import make_options
from onea.research.methods.presets import preset_options
from onea.research.methods.tuna import TUNA, elect_largest, mean_directions, merge_adapters, overlap
from onea.vit.adapter import Adapters


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tuna(tiny_run, sizes="3,1,2", **options):
    return prepared(tiny_run, "tuna", sizes=sizes, options=tiny_run["options"] | options)


def random_adapters(seed: int) -> Adapters:
    adapters = Adapters(3, 8, 4, generator=generator(seed)).eval()
    for parameter in adapters.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator(seed + parameter.numel()))
    return adapters


def randomise(method: TUNA) -> None:
    """Random adapters and a random head, so that different adapters are chosen."""
    random_generator = generator(5)
    for part in (*method.snapshots, method.head):
        for parameter in part.parameters():
            parameter.data = torch.randn(parameter.shape, generator=random_generator)
    method._set_snapshots(method.snapshots)


def copied(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(state, module):
    return all(torch.equal(value, module.state_dict()[name]) for name, value in state.items())


def test_the_universal_adapter_equals_a_loop_over_entries():
    values = torch.randn(4, 30, generator=generator(1))
    values[:, 0] = torch.tensor([1.0, -1.0, 2.0, -2.0])  # a mean of zero
    values[:, 1] = 0.0
    expected = []
    for entries in values.T.tolist():
        sign = 1 if sum(entries) > 0 else -1
        expected.append(sign * max([abs(entry) for entry in entries if entry * sign > 0], default=0.0))
    assert elect_largest(values).tolist() == pytest.approx(expected)
    assert elect_largest(values)[0] == -2


def test_the_merge_of_equal_adapters_is_that_adapter_and_the_order_is_irrelevant():
    first, second, third = map(random_adapters, (1, 2, 3))
    assert same(copied(first), merge_adapters([first, first, first]))
    merged = merge_adapters([first, second, third])
    assert same(copied(merged), merge_adapters([third, first, second]))
    assert not same(copied(merged), first)
    for name, value in merged.state_dict().items():
        assert torch.equal(value, elect_largest(torch.stack([a.state_dict()[name] for a in (first, second, third)])))


def test_one_task_is_an_adapter_with_a_cosine_head(tiny_run):
    ready = tuna(tiny_run, "6")
    method, images = learn_all(ready), shown_images(ready)
    assert method.universal is None
    assert passes(method, images) == 1
    probabilities = method.head(method.features(images, method.snapshots[0])).softmax(1)
    torch.testing.assert_close(method.scores(images), 2 * probabilities)


@pytest.mark.parametrize("universal", ["paper", "official"])
def test_scores_equal_a_loop_over_images(universal, tiny_run):
    ready = tuna(tiny_run, "2,2,2", tuna_universal=universal)
    method, images = learn_all(ready), shown_images(ready)
    randomise(method)
    rows, chosen = [], set()
    for image in images:
        votes = [method.head(method.features(image[None], each))[0].softmax(0) for each in method.snapshots]
        entropies = [-sum(p * math.log(p) for p in vote.tolist() if p > 0) for vote in votes]
        best = min(range(3), key=entropies.__getitem__)
        other = method.universal if universal == "paper" else method.snapshots[-1]
        rows.append(votes[best] + method.head(method.features(image[None], other))[0].softmax(0))
        chosen.add(best)
    assert len(chosen) > 1
    torch.testing.assert_close(method.scores(images), torch.stack(rows).detach(), rtol=1e-4, atol=1e-5)


def test_the_official_universal_prediction_is_that_of_the_newest_adapter(tiny_run):
    paper, official = (tuna(tiny_run, "2,2,2", tuna_universal=universal) for universal in ("paper", "official"))
    images = shown_images(paper)
    for ready in (paper, official):
        randomise(learn_all(ready))
    assert all(
        torch.equal(a, b)
        for a, b in zip(paper.method.state_dict().values(), official.method.state_dict().values(), strict=True)
    ), "the switch concerns the inference only"
    assert [passes(ready.method, images) for ready in (paper, official)] == [4, 3]
    method = official.method
    features = {name: method.features(images, hooks) for name, hooks in method.cacheable_modules().items()}
    votes = [method.head(value).softmax(1) for value in features.values()]
    specific = torch.stack(votes)[torch.special.entr(torch.stack(votes)).sum(2).argmin(0), torch.arange(len(images))]
    assert torch.equal(method.scores_from_features(features), specific + votes[-1])


def test_declared_costs():
    for universal, costs in (("paper", [1, 3, 11]), ("official", [1, 2, 10])):
        options = TUNA.Options(tuna_universal=universal)
        assert [TUNA.forward_passes(options, tasks) for tasks in (1, 2, 10)] == costs
        assert [TUNA.adapters_used(options, tasks) for tasks in (1, 2, 10)] == costs


def test_each_task_continues_from_the_previous_adapter(tiny_run):
    first, second, third = learn_all(tuna(tiny_run, "2,2,2", learning_rate=0.0)).snapshots
    assert same(copied(first), second)
    assert same(copied(first), third)


def test_earlier_adapters_do_not_change_unless_the_official_loss_trains_them(tiny_run):
    for detach in (True, False):
        values = {"tuna_detach": detach, "orthogonality": 1.0, "learning_rate": 0.2}
        ready = tuna(tiny_run, "2,2,2", **values)
        learn_all(ready, [0, 1])
        before = [copied(snapshot) for snapshot in ready.method.snapshots]
        names = set(ready.method.cacheable_modules())
        learn_all(ready, [2])
        for state, snapshot in zip(before, ready.method.snapshots, strict=False):
            changed = {name for name in state if not torch.equal(state[name], snapshot.state_dict()[name])}
            assert changed == (set() if detach else {name for name in state if name.endswith("up.weight")})
        assert not any(p.requires_grad for snapshot in ready.method.snapshots for p in snapshot.parameters())
        kept = names & set(ready.method.cacheable_modules())
        assert kept == ({"adapter 0", "adapter 1"} if detach else set()), "cached features of changed adapters"


def test_the_orthogonality_loss_equals_loops_over_rows():
    adapters, *earlier = map(random_adapters, (1, 2, 3))
    total = 0.0
    for old in earlier:
        for new_layer, old_layer in zip(adapters.adapters(), old.adapters(), strict=True):
            ours, theirs = (F.normalize(layer.up.weight.detach(), dim=1) for layer in (new_layer, old_layer))
            total += abs(float((ours @ theirs.T).mean())) / 3
    value = overlap(mean_directions(adapters), torch.stack([mean_directions(old) for old in earlier]))
    assert float(value.detach()) == pytest.approx(total, rel=1e-4)


def test_the_orthogonality_loss_decreases_with_the_number_of_the_task(tiny_run, monkeypatch):
    ready, seen = tuna(tiny_run, "2,2,2", orthogonality=0.7), []
    train = TUNA.train_by_cosface

    def recorded(self, hooks, rows, task, *, others, regulariser):
        if regulariser is not None:
            directions = torch.stack([mean_directions(old) for old in self.snapshots])
            ratio = regulariser() / overlap(mean_directions(hooks), directions)
            seen.append(float(ratio.detach()))
        return train(self, hooks, rows, task, others=others, regulariser=regulariser)

    monkeypatch.setattr(TUNA, "train_by_cosface", recorded)
    learn_all(ready)
    assert seen == pytest.approx([0.7 * math.exp(-2), 0.7 * math.exp(-3)], rel=1e-4)


def test_an_initial_adapter_has_no_orthogonality_loss_and_finite_gradients():
    fresh, old = (Adapters(2, 8, 4, generator=generator(seed)) for seed in (1, 2))
    value = overlap(mean_directions(fresh), mean_directions(old)[None])
    value.backward()
    assert value == 0
    assert all(not adapter.up.weight.grad.any() for adapter in fresh.adapters())


@pytest.mark.parametrize(("policy", "counts"), [("skip", [1, 2, 2, 3]), ("train", [1, 2, 3, 4])])
def test_a_skipped_task_adds_no_adapter(policy, counts, tiny_run):
    ready = tuna(tiny_run, "1,2,1,2", single_class=policy)
    images = shown_images(ready)
    for index, count in enumerate(counts):
        ready.method.learn(ready.task(index))
        assert len(ready.method.snapshots) == count
        assert passes(ready.method, images) == count + (count > 1)
    first = ready.method.snapshots[0]
    assert all(not adapter.up.weight.any() for adapter in first.adapters()), "one class trains nothing"


def test_gaussians_are_those_of_the_adapter_of_their_task(tiny_run):
    ready = tuna(tiny_run, "2,2,2", learning_rate=0.5, scale=1.0)
    method = learn_all(ready)
    for index, snapshot in enumerate(method.snapshots):
        task = ready.task(index)
        features = method.features(task.images.test_views(task.rows), snapshot)
        for position in task.classes:
            mean = features[task.labels == position].mean(0)
            torch.testing.assert_close(method.gaussians.means[position], mean, rtol=1e-4, atol=1e-4)
    factor = method.gaussians.factor_of(0)
    features = method.features(ready.task(0).images.test_views(ready.task(0).rows), method.snapshots[0])
    expected = torch.cov(features[ready.task(0).labels == 0].T) + 1e-4 * torch.eye(64)
    torch.testing.assert_close(factor @ factor.T, expected, rtol=1e-3, atol=1e-3)


def test_the_official_schedule_of_the_alignment_rises_again(tiny_run):
    correct, official = (
        tuna(tiny_run, tuna_alignment=kind).method.alignment_schedule() for kind in ("cosine", "official")
    )
    assert [correct(epoch, 30) for epoch in range(30)] == [schedules.cosine(epoch, 30) for epoch in range(30)]
    rates = [official(epoch, 30) for epoch in range(11)]
    assert rates[5] == pytest.approx(0)
    assert rates[10] == pytest.approx(1)
    assert rates[6:] == pytest.approx(rates[4::-1])


@pytest.mark.parametrize(
    "switch",
    [
        {"orthogonality": 5.0},
        {"tuna_detach": False, "orthogonality": 5.0},
        {"tuna_alignment": "official", "alignment_epochs": 7},
        {"scale": 0.5},
        {"dropout": 0.0},
    ],
)
def test_every_option_changes_the_result(switch, tiny_run):
    values = {"learning_rate": 0.2, "alignment_epochs": 7}
    reference = {"orthogonality": 5.0} if "tuna_detach" in switch else {}
    states = [learn_all(tuna(tiny_run, "3,3", **values | change)).state_dict() for change in (reference, switch)]
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_published_values():
    assert 12 * (2 * 768 * TUNA.Options().rank + TUNA.Options().rank + 768) == 304_320
    recipes = {}
    for data in ("cifar100", "imagenet-a", "imagenet-r"):
        options = make_options(TUNA.Options, preset_options("tuna", f"paper/{data}"))
        assert options.alignment_samples == 5 * options.batch_size
        assert (options.rank, options.weight_decay, options.logit_scale) == (16, 5e-4, 20.0)
        alignment = (options.alignment_epochs, options.alignment_learning_rate, options.rho)
        recipes[data] = (options.epochs, options.learning_rate, options.batch_size, options.margin), alignment
        assert options.orthogonality == (0.0 if data == "cifar100" else 1e-3)
    assert recipes == {
        "cifar100": ((15, 0.01, 16, 0.0), (30, 0.005, "none")),
        "imagenet-a": ((20, 0.01, 16, 0.3), (10, 0.01, "by-task")),
        "imagenet-r": ((10, 0.02, 32, 0.0), (30, 0.005, "by-task")),
    }
