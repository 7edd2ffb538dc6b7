# SPDX-License-Identifier: Apache-2.0
"""EASE and per-task adapters: the methods that store an adapter for every task."""

from __future__ import annotations

import pytest
import torch
from support.methods import learn_all, passes, prepared, shown_images
from torch.nn import functional as F

from onea.errors import OneaError
from onea.options import make_options
from onea.research.methods import method_class
from onea.research.methods.ease import EASEOptions, subspace_weights, synthesise_prototypes
from onea.research.methods.presets import preset_options


def with_options(values: dict, **changes) -> dict:
    return values | {"options": values["options"] | changes}


def ranges_of(*sizes: int) -> list[range]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def random_prototypes(*sizes: int, width: int = 5) -> torch.Tensor:
    shape = (len(sizes), sum(sizes), width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).float()


# Both methods


@pytest.mark.parametrize("name", ["ease", "per-task"])
def test_old_adapters_are_frozen_and_never_change(name, tiny_run):
    ready = prepared(tiny_run, name)
    method = ready.method
    previous = {}
    for index in range(3):
        report = method.learn(ready.task(index))
        assert len(report["losses"]) == report["epochs"] == 2
        state = {key: value.clone() for key, value in method.state_dict().items() if key.startswith("adapters.")}
        assert all(torch.equal(state[key], value) for key, value in previous.items())
        assert {key.split(".")[1] for key in state} == {str(task) for task in range(index + 1)}
        previous = state
    assert not any(module.training for adapters in method.adapters for module in adapters.modules())
    assert not any(value.requires_grad for adapters in method.adapters for value in adapters.parameters())
    assert method.ranges == [range(3), range(3, 4), range(4, 6)]
    assert passes(method, shown_images(ready)) == method.forward_passes(method.options, 3) == 3


@pytest.mark.parametrize("name", ["ease", "per-task"])
def test_loading_a_state_replaces_everything_learned_before(name, tiny_run):
    first, second = prepared(tiny_run, name, sizes="2,1,3"), prepared(tiny_run, name, sizes="4,2")
    learn_all(first)
    learn_all(second)
    second.method.load_state_dict(first.method.state_dict())
    images = shown_images(first)
    assert torch.equal(second.method.scores(images), first.method.scores(images))


def test_adapters_of_single_class_tasks_stay_the_identity(tiny_run):
    ready = prepared(tiny_run, "ease", sizes="2,1,3")
    method = learn_all(ready)
    images = shown_images(ready)
    first, second, third = (method.features(images, hooks) for hooks in method.adapters)
    plain = method.features(images)
    assert torch.equal(second, plain)
    assert not torch.equal(first, plain)
    assert not torch.equal(third, plain)


# Per-task adapters


def test_per_task_scores_are_cosines_under_the_adapter_of_each_class(tiny_run):
    ready = prepared(tiny_run, "per-task")
    method = learn_all(ready)
    scores = method.scores(shown_images(ready))
    for adapters, classes in zip(method.adapters, method.ranges, strict=True):
        train = method.features(ready.train.images.test_views(torch.arange(len(ready.train.labels))), adapters)
        test = method.features(shown_images(ready), adapters)
        for position in classes:
            mean = train[ready.train.labels == position].mean(0)
            expected = F.cosine_similarity(test, mean[None])
            torch.testing.assert_close(scores[:, position], expected, rtol=1e-4, atol=1e-5)


def test_per_task_on_single_class_tasks_equals_simplecil(tiny_run):
    ready, simple = (prepared(tiny_run, name, sizes="1,1,1,1,1,1") for name in ("per-task", "simplecil"))
    images = shown_images(ready)
    actual, expected = learn_all(ready).scores(images), learn_all(simple).scores(images)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(ready.method.prototypes, simple.method.prototypes)
    assert torch.equal(actual.argmax(1), expected.argmax(1))


def test_per_task_equals_ease_without_other_subspaces(tiny_run):
    ready = prepared(tiny_run, "per-task")
    ease = learn_all(prepared(with_options(tiny_run, alpha=0.0), "ease"))
    images = shown_images(ready)
    actual, expected = learn_all(ready).scores(images), ease.scores(images)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(actual.argmax(1), expected.argmax(1))


# EASE


def test_one_task_is_an_adapter_with_nearest_prototypes(tiny_run):
    ready, alone = (prepared(tiny_run, name, sizes="6") for name in ("ease", "per-task"))
    learn_all(ready)
    learn_all(alone)
    images = shown_images(ready)
    torch.testing.assert_close(ready.method.scores(images), alone.method.scores(images), rtol=1e-5, atol=1e-6)
    assert torch.equal(ready.method.prototypes[0], alone.method.prototypes)


def test_scores_are_weighted_sums_over_subspaces(tiny_run):
    ready = prepared(with_options(tiny_run, alpha=0.3), "ease")
    method = learn_all(ready)
    images = shown_images(ready)
    scores, features = method.scores(images), [method.features(images, hooks) for hooks in method.adapters]
    for own, classes in enumerate(method.ranges):
        for position in classes:
            cosines = [F.cosine_similarity(features[j], method.prototypes[j, position][None]) for j in range(3)]
            others = sum(cosines[j] for j in range(3) if j != own)
            expected = cosines[own] + 0.3 / 2 * others
            torch.testing.assert_close(scores[:, position], expected, rtol=1e-4, atol=1e-5)


def test_prototypes_with_images_are_class_means_and_never_change(tiny_run):
    ready = prepared(tiny_run, "ease", sizes="2,1,1,2")
    method = ready.method
    train = ready.train.images.test_views(torch.arange(len(ready.train.labels)))
    previous, has_images = None, None
    for index in range(4):
        method.learn(ready.task(index))
        if previous is not None:
            tasks, classes = has_images.shape
            assert torch.equal(method.prototypes[:tasks, :classes][has_images], previous[has_images])
        task_of_class = torch.arange(index + 1).repeat_interleave(method.sizes)
        previous, has_images = method.prototypes.clone(), task_of_class[None, :] >= torch.arange(index + 1)[:, None]
    assert has_images.tolist() == [
        [True, True, True, True, True, True],
        [False, False, True, True, True, True],
        [False, False, False, True, True, True],
        [False, False, False, False, True, True],
    ]
    for j, adapters in enumerate(method.adapters):
        features = method.features(train, adapters)
        means = torch.stack([features[ready.train.labels == c].mean(0) for c in range(6)])
        torch.testing.assert_close(previous[j][has_images[j]], means[has_images[j]], rtol=1e-4, atol=1e-5)
        if j:
            assert (previous[j][~has_images[j]] - means[~has_images[j]]).abs().max() > 1e-3, (
                "the others are synthesised"
            )


def test_synthetic_prototypes_worked_by_hand():
    """Class 0 is orthogonal to source 1 and has the direction of source 2: weights 1 / (1 + e) and e / (1 + e)."""
    prototypes = torch.zeros(2, 3, 2)
    prototypes[0] = torch.tensor([[2.0, 0.0], [0.0, 5.0], [3.0, 0.0]])
    prototypes[1, 1:] = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    actual = synthesise_prototypes(prototypes, ranges_of(1, 2), include_later=True)[1, 0]
    torch.testing.assert_close(actual, torch.tensor([0.26894142, 0.73105858]))


@pytest.mark.parametrize("include_later", [True, False])
def test_synthesis_equals_the_definition_in_plain_loops(include_later):
    sizes = (2, 1, 3, 1)
    ranges, real = ranges_of(*sizes), random_prototypes(*sizes)
    actual = synthesise_prototypes(real, ranges, include_later)
    for i, old in enumerate(ranges):
        for j in range(len(sizes)):
            last = len(sizes) - 1 if include_later else j
            sources = [k for task in range(j, last + 1) for k in ranges[task]]
            for c in old:
                if j <= i:
                    assert torch.equal(actual[j, c], real[j, c])
                    continue
                similarities = torch.stack([F.cosine_similarity(real[i, c], real[i, k], dim=0) for k in sources]).exp()
                expected = sum(a / similarities.sum() * real[j, k] for a, k in zip(similarities, sources, strict=True))
                torch.testing.assert_close(actual[j, c], expected)
                others = real[j, sources]
                assert (actual[j, c] >= others.amin(0) - 1e-6).all()
                assert (actual[j, c] <= others.amax(0) + 1e-6).all(), "in the convex hull of the sources"


@pytest.mark.parametrize("include_later", [True, False])
def test_synthesis_ignores_synthesised_prototypes(include_later):
    sizes = (2, 1, 3, 1)
    ranges, prototypes = ranges_of(*sizes), random_prototypes(*sizes)
    expected = synthesise_prototypes(prototypes, ranges, include_later)
    for task, classes in enumerate(ranges):
        prototypes[task + 1 :, classes.start : classes.stop] = torch.nan
    actual = synthesise_prototypes(prototypes, ranges, include_later)
    assert torch.equal(actual, expected)
    assert torch.equal(synthesise_prototypes(actual, ranges, include_later), expected)


def test_synthesis_from_equal_sources_equals_the_source():
    prototypes = random_prototypes(2, 3, 1)
    prototypes[1, 2:5] = prototypes[1, 2]  # all sources of subspace 1 are equal, except for the last class
    prototypes[1, 5] = prototypes[1, 2]
    actual = synthesise_prototypes(prototypes, ranges_of(2, 3, 1), include_later=True)
    torch.testing.assert_close(actual[1, :2], prototypes[1, 2].expand(2, -1))
    torch.testing.assert_close(actual[2, :5], prototypes[2, 5].expand(5, -1))


def test_recalculation_updates_synthesised_prototypes(tiny_run):
    runs = {}
    for recalc in (True, False):
        ready = prepared(with_options(tiny_run, ease_recalc=recalc), "ease", sizes="2,2,2")
        runs[recalc] = []
        for index in range(3):
            ready.method.learn(ready.task(index))
            runs[recalc].append(ready.method.prototypes.clone())
    assert torch.equal(runs[True][1], runs[False][1]), "with one later task there is nothing to recalculate"
    assert torch.equal(runs[False][2][1, :2], runs[False][1][1, :2])
    assert not torch.equal(runs[True][2][1, :2], runs[True][1][1, :2])
    assert torch.equal(runs[True][2][2], runs[False][2][2]), "the newest subspace has the same sources"


def test_the_pretrained_network_as_an_additional_subspace(tiny_run):
    without, ready = prepared(tiny_run, "ease"), prepared(with_options(tiny_run, ptm_beta=0.7), "ease")
    simple = prepared(tiny_run, "simplecil")
    images = shown_images(ready)
    expected = learn_all(without).scores(images) + 0.7 * learn_all(simple).scores(images)
    torch.testing.assert_close(learn_all(ready).scores(images), expected, rtol=1e-5, atol=1e-6)
    assert passes(ready.method, images) == ready.method.forward_passes(ready.method.options, 3) == 4
    assert without.method.forward_passes(without.method.options, 3) == 3
    resumed = prepared(with_options(tiny_run, ptm_beta=0.7), "ease")
    resumed.method.load_state_dict(ready.method.state_dict())
    assert torch.equal(resumed.method.scores(images), ready.method.scores(images))
    with pytest.raises(OneaError, match="ptm_beta"):
        resumed.method.load_state_dict(without.method.state_dict())


def test_the_other_subspaces_share_alpha():
    weights = subspace_weights(torch.tensor([3, 1, 2]), 0.1)
    torch.testing.assert_close(weights.sum(0), torch.full((6,), 1.1))
    assert torch.equal(subspace_weights(torch.tensor([4]), 0.1), torch.ones(1, 4))


def test_options_and_published_values():
    for name in ("alpha", "ptm_beta"):
        with pytest.raises(OneaError, match=name):
            EASEOptions(**{name: -0.1})
    official = {
        "cifar100": (0.025, 48, 5e-4, 0.1),
        "cub200": (0.008, 32, 5e-4, 0.05),
        "imagenet-a": (0.05, 32, 5e-3, 0.1),
        "imagenet-r": (0.05, 16, 5e-3, 0.1),
        "": (0.05, 16, 5e-3, 0.1),
    }
    for data, (learning_rate, batch, decay, alpha) in official.items():
        for name in ("ease", "per-task"):
            kind = method_class(name)
            options = make_options(kind.Options, preset_options(name, f"paper/{data}" if data else "paper"))
            assert (options.learning_rate, options.batch_size, options.weight_decay) == (learning_rate, batch, decay)
            assert (options.epochs, options.rank, options.head) == (20, 64, "cosine")
            assert getattr(options, "alpha", alpha) == alpha
