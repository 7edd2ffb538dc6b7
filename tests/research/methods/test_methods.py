# SPDX-License-Identifier: Apache-2.0
"""Requirements for every method in the registry; a new method is tested automatically."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from support.methods import learn_all, prepared, shown_images
from support.tiny import but_slow

from onea.errors import OneaError
from onea.learner.merged_adapter import AdapterCache
from onea.options import make_options
from onea.research.methods import METHODS, method_class
from onea.research.methods.classification import FeatureClassification
from onea.vit.backbones import digest_of
from onea.vit.batching import EVALUATION_BATCH


def comparable_outputs(ready):
    """Scores, or features where a classifier fitted to a dozen images would magnify rounding errors."""
    method, images = ready.method, shown_images(ready)
    return (
        method.features(images, method.hooks()) if isinstance(method, FeatureClassification) else method.scores(images)
    )


BUILT_IN = sorted(METHODS.builtin)


@pytest.fixture(params=BUILT_IN)
def method(request) -> str:
    return request.param


# Compiled like another method, with a trained adapter or none; tested only with --slow.
REDUNDANT = ("acmap", "adapter", "aper-adapter", "first-task", "gdumb", "joint", "per-task", "ranpac", "ranpac-first")
REDUNDANT += ("replay", "running-mean", "running-mean-shared", "sequential", "slda")
WITH_DROPOUT = [
    name for name in BUILT_IN if any(field.name == "dropout" for field in fields(method_class(name).Options))
]


def test_frozen_weights_never_change_and_evaluation_has_no_effect(method, tiny_run):
    ready = prepared(tiny_run, method)
    before = digest_of(ready.method.vit.state_dict())
    learn_all(ready)
    images = shown_images(ready)
    first, second = ready.method.scores(images), ready.method.scores(images)
    assert torch.equal(first, second)
    assert first.shape == (len(images), ready.stream.classes)
    assert digest_of(ready.method.vit.state_dict()) == before


def test_scores_do_not_depend_on_unused_tokens(method, tiny_run, monkeypatch):
    """The last block computes only the tokens that are used; with all tokens, scores must be equal."""
    ready = prepared(tiny_run, method)
    learned = learn_all(ready)
    images = shown_images(ready)
    without_unused_tokens = learned.scores(images)
    monkeypatch.setattr(learned.vit, "_num_pooled", 0)
    torch.testing.assert_close(learned.scores(images), without_unused_tokens, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled_method", but_slow(BUILT_IN, REDUNDANT))
def test_compiled_networks_learn_the_same(compiled_method, tiny_run):
    """Traced, padded to full batches, adapters as one matrix: as on a GPU except for its kernels."""
    torch.compiler.reset()
    options = tiny_run["options"] | {"dropout": 0.0}  # padding would consume random numbers
    plain, traced = (prepared(tiny_run, compiled_method, options=options) for _ in range(2))
    traced.method.vit.compile_for({8, len(traced.test.labels), EVALUATION_BATCH}, "eager")
    for index in range(2):  # the second task uses what the first has compiled
        reports = [ready.method.learn(ready.task(index)) for ready in (plain, traced)]
        for plain_loss, traced_loss in zip(*(report.get("losses", []) for report in reports), strict=True):
            assert plain_loss == pytest.approx(traced_loss, rel=1e-3)
    expected, actual = (comparable_outputs(ready) for ready in (plain, traced))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled_method", but_slow(WITH_DROPOUT, {*REDUNDANT, "one-a-plus"}))
def test_compiled_networks_use_no_dropout_at_inference(compiled_method, tiny_run):
    torch.compiler.reset()
    ready = prepared(tiny_run, compiled_method, options=tiny_run["options"] | {"learning_rate": 0.5, "dropout": 0.5})
    ready.method.vit.compile_for({8, EVALUATION_BATCH}, "eager")
    ready.method.learn(ready.task(0))
    images = shown_images(ready)
    assert torch.equal(ready.method.scores(images), ready.method.scores(images))


def test_predictions_do_not_depend_on_the_batching(method, tiny_run):
    ready = prepared(tiny_run, method)
    learn_all(ready)
    images = shown_images(ready)
    batched = ready.method.scores(images)
    # A classifier magnifies rounding errors.
    tolerance = {"rtol": 1e-4, "atol": 1e-5 * max(1.0, float(batched.abs().max()))}
    torch.testing.assert_close(torch.cat([ready.method.scores(image[None]) for image in images]), batched, **tolerance)
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ready.method.scores(images[shuffled]), batched[shuffled], **tolerance)


def test_save_load_continue_equals_uninterrupted(method, tiny_run):
    uninterrupted = learn_all(prepared(tiny_run, method))
    first = prepared(tiny_run, method)
    learn_all(first, [0, 1])
    second = prepared(tiny_run, method)
    second.method.load_state_dict({name: value.clone() for name, value in first.method.state_dict().items()})
    learn_all(second, [2])
    expected, actual = uninterrupted.state_dict(), second.method.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize("sizes", ["1,2,1,1,1", "6", "1,1,1,1,1,1", "1,4,1"])
def test_single_class_first_middle_and_last_tasks(method, sizes, tiny_run):
    ready = prepared(tiny_run, method, sizes=sizes)
    reports = [ready.method.learn(ready.task(index)) for index in range(ready.stream.tasks)]
    losses = [loss for report in reports for loss in report.get("losses", [])]
    assert torch.isfinite(torch.tensor(losses)).all()
    assert torch.isfinite(ready.method.scores(shown_images(ready))).all()


@pytest.mark.parametrize("name", ["one-a", "simplecil", "running-mean"])
def test_the_state_does_not_grow_with_the_number_of_tasks(name, tiny_run):
    options = tiny_run["options"] | {"single_class": "train"}
    few, many = (learn_all(prepared(tiny_run, name, sizes=sizes, options=options)) for sizes in ("3,3", "1,1,1,1,1,1"))
    assert {k: v.shape for k, v in few.state_dict().items()} == {k: v.shape for k, v in many.state_dict().items()}
    assert few.forward_passes(few.options, 40) == few.forward_passes(few.options, 1) == 1


def test_forward_passes_do_not_exceed_the_declared_number(method, tiny_run):
    ready = prepared(tiny_run, method, sizes="2,1,3")
    images, passed = shown_images(ready), 0

    def count(_, inputs):
        nonlocal passed
        passed += len(inputs[0])

    for block in ready.method.vit.vit.blocks:
        block.attn.qkv.register_forward_pre_hook(count)
    for tasks in (1, 2, 3):
        ready.method.learn(ready.task(tasks - 1))
        passed = 0
        ready.method.scores(images)
        assert (
            passed / (len(images) * ready.method.vit.depth)
            <= ready.method.forward_passes(ready.method.options, tasks) + 1e-9
        )


def test_simplecil_ignores_order_and_split_and_equals_the_nearest_class_mean(tiny_run):
    predictions = []
    for sizes, seed in (("6", 1), ("1,2,3", 2), ("1,1,1,1,1,1", 3)):
        ready = prepared(tiny_run, "simplecil", sizes=sizes, seed=seed)
        learn_all(ready)
        order = torch.tensor(ready.stream.class_order)
        predictions.append(order[ready.method.scores(shown_images(ready)).argmax(1)])
    assert torch.equal(predictions[0], predictions[1])
    assert torch.equal(predictions[0], predictions[2])
    features = ready.method.features(ready.train.images.test_views(torch.arange(len(ready.train.labels))))
    means = torch.stack([features[ready.train.labels == c].mean(0) for c in range(6)])
    test = ready.method.features(shown_images(ready))
    nearest = torch.nn.functional.cosine_similarity(test[:, None], means[None], dim=2).argmax(1)
    assert torch.equal(order[nearest], predictions[2])


def test_skipped_single_class_tasks_do_not_change_the_adapter(tiny_run):
    options = tiny_run["options"] | {"single_class": "skip"}
    skipping = prepared(tiny_run, sizes="1,3,1,1", options=options)
    first = skipping.method.learn(skipping.task(0))
    assert first == {"trained": False}
    assert skipping.method.merged.classes == 0
    assert all((value == 0).all() for name, value in skipping.method.adapter.state_dict().items() if "up." in name)
    report = skipping.method.learn(skipping.task(1))
    assert report["merge"] == {}, "the first trained adapter is not merged"
    merged = {name: value.clone() for name, value in skipping.method.adapter.state_dict().items()}
    skipping.method.learn(skipping.task(2))
    assert all(torch.equal(merged[name], value) for name, value in skipping.method.adapter.state_dict().items())
    assert skipping.method.merged.classes == 3


def test_tasks_below_the_minimum_share_do_not_change_the_adapter(tiny_run):
    ready = prepared(tiny_run, sizes="2,2,1,1", options=tiny_run["options"] | {"min_share": 0.3})
    reports = [ready.method.learn(ready.task(index)) for index in range(2)]
    merged = {name: value.clone() for name, value in ready.method.adapter.state_dict().items()}
    reports += [ready.method.learn(ready.task(index)) for index in range(2, 4)]
    assert [report["trained"] for report in reports] == [True, True, False, False]
    assert all(torch.equal(merged[name], value) for name, value in ready.method.adapter.state_dict().items())
    assert ready.method.merged.classes == 4
    assert len(ready.method.prototypes) == 6
    with pytest.raises(OneaError, match="min_share is 2"):
        prepared(tiny_run, options=tiny_run["options"] | {"min_share": 2.0})


def test_old_prototypes_do_not_change_with_the_second_task(tiny_run):
    ready = prepared(tiny_run)
    ready.method.learn(ready.task(0))
    old = ready.method.prototypes.clone()
    report = ready.method.learn(ready.task(1))
    assert torch.equal(ready.method.prototypes[:3], old)
    assert report["merge"]["base"] == "accumulated"
    assert report["merge"]["align_share"] == pytest.approx(1 / 4)
    assert 0 < report["merge"]["gate_min"] < report["merge"]["gate_max"] < 1


def test_methods_that_differ_only_in_the_merge_can_share_trained_adapters(tiny_run):
    adapter_cache = AdapterCache()
    learn_all(prepared(tiny_run, "one-a", adapter_cache))
    assert len(adapter_cache) == 3
    shared = learn_all(prepared(tiny_run, "running-mean", adapter_cache))
    alone = learn_all(prepared(tiny_run, "running-mean"))
    assert len(adapter_cache) == 3
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in shared.state_dict().items())


def test_adapters_trained_on_other_views_are_not_shared(tiny_run):
    adapter_cache, last = AdapterCache(), tiny_run["options"] | {"adapter_blocks": 1, "cached_views": 3}
    learn_all(prepared(tiny_run, "one-a", adapter_cache, options=last))
    plain = last | {"enough_images": 1}
    shared = learn_all(prepared(tiny_run, "one-a", adapter_cache, options=plain))
    alone = learn_all(prepared(tiny_run, "one-a", options=plain))
    assert len(adapter_cache) == 6
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in shared.state_dict().items())


@pytest.mark.parametrize("start", ["merged", "first", "previous"])
def test_adapters_that_start_from_earlier_ones_are_not_shared(start, tiny_run):
    adapter_cache, options = (
        AdapterCache(),
        tiny_run["options"] | {"start": start, "learning_rate": 0.0, "weight_decay": 0.0},
    )
    ready = prepared(tiny_run, "running-mean", adapter_cache, options=options)
    ready.method.learn(ready.task(0))
    first = {name: value.clone() for name, value in ready.method.adapter.state_dict().items()}
    learn_all(ready, [1, 2])
    for name, value in ready.method.adapter.state_dict().items():  # without a step, all adapters are the first
        torch.testing.assert_close(value, first[name])
    assert not adapter_cache, "the start depends on how the earlier adapter was merged"
    trained_options = tiny_run["options"] | {"start": start}
    uninterrupted = learn_all(prepared(tiny_run, options=trained_options))
    before, after = prepared(tiny_run, options=trained_options), prepared(tiny_run, options=trained_options)
    learn_all(before, [0, 1])
    after.method.load_state_dict({name: value.clone() for name, value in before.method.state_dict().items()})
    learn_all(after, [2])
    assert all(
        torch.equal(value, after.method.state_dict()[name]) for name, value in uninterrupted.state_dict().items()
    )


def test_running_mean_shared_equals_running_mean_with_a_shared_start(tiny_run):
    shared = learn_all(prepared(tiny_run, "running-mean-shared"))
    options = tiny_run["options"] | {"start": "shared"}
    explicit = learn_all(prepared(tiny_run, "running-mean", options=options))
    assert all(torch.equal(value, explicit.state_dict()[name]) for name, value in shared.state_dict().items())
    fresh = learn_all(prepared(tiny_run, "running-mean"))
    assert not torch.equal(fresh.prototypes, shared.prototypes)


def test_declared_costs_follow_the_options():
    def type_and_options(method: str, **options):
        method_type = method_class(method)
        return method_type, make_options(method_type.Options, options)

    for refinements, passes in ((1, 2), (4, 5), (30, 10)):
        method_type, options = type_and_options("mos", refinements=refinements)
        assert method_type.forward_passes(options, 10) == passes
        assert method_type.adapters_used(options, 10) == 10
    for beta, passes in ((0.0, 10), (0.5, 11)):
        method_type, options = type_and_options("ease", ptm_beta=beta)
        assert method_type.forward_passes(options, 10) == passes
    method_type, options = type_and_options(
        "one-a", epochs=5, min_epochs=3, max_epochs=8, single_class="skip", min_share=0.25
    )
    assert method_type.epochs_per_task(options, [14, 1, 3, 6, 36]) == [5, 0, 0, 4, 8]
    method_type, options = type_and_options("acmap", epochs=7, limit=2)
    assert method_type.epochs_per_task(options, [1, 2, 3]) == [7, 7, 0]
    for policy, first in (("skip", 0), ("train", 9)):
        method_type, options = type_and_options("aper-adapter", epochs=9, single_class=policy)
        assert method_type.epochs_per_task(options, [1, 5]) == [first, 0]
    assert type_and_options("simplecil")[0].epochs_per_task(type_and_options("simplecil")[1], [3, 3]) == [0, 0]


def test_declared_epochs_equal_the_trained_epochs(method, tiny_run):
    ready = prepared(tiny_run, method, sizes="2,1,3", options=tiny_run["options"] | {"epoch_growth": 0.9})
    declared = ready.method.epochs_per_task(ready.method.options, ready.stream.sizes)
    trained = []
    for index in range(ready.stream.tasks):
        report = ready.method.learn(ready.task(index))
        trained.append(0 if report.get("trained") is False else report.get("epochs", 0))
    assert declared == trained


def test_running_mean_keeps_the_mean_of_all_trained_adapters(tiny_run):
    adapter_cache = AdapterCache()
    merged = learn_all(prepared(tiny_run, "running-mean", adapter_cache)).adapter.state_dict()
    for name, value in merged.items():
        mean = torch.stack([tensors[name] for tensors, _ in adapter_cache.values()]).mean(0)
        torch.testing.assert_close(value, mean)


@pytest.mark.parametrize(
    "switch",
    [
        {"alignment": False},
        {"weights": "uniform"},
        {"weights": "norm"},
        {"weights": "spectrum"},
        {"gating": False},
        {"kappa": 9.0},
        {"quantile": 0.9},
        {"contrastive": False},
        {"epoch_growth": 0.0},
        {"base_by": "classes"},
        {"head": "linear"},
        {"scale": 0.3},
        {"dropout": 0.0},
        {"start": "shared"},
        {"start": "merged"},
        {"start": "first"},
        {"start": "previous"},
        {"rank": 5},
        {"swapped_weights": True},
    ],
)
def test_every_option_of_one_a_changes_the_result(switch, tiny_run):
    """The second task becomes the base; the third has as many classes as all before, but fewer images."""
    changes = {"sizes": "1,2,3", "long_tail": 0.2}
    plain = learn_all(prepared(tiny_run, **changes))
    switched = learn_all(prepared(tiny_run, options=tiny_run["options"] | switch, **changes))
    old, new = plain.state_dict(), switched.state_dict()
    assert any(old[name].shape != new[name].shape or not torch.equal(old[name], new[name]) for name in old)
