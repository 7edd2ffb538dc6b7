# SPDX-License-Identifier: Apache-2.0
"""Features of frozen modules are computed once per image, and results do not change."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support.methods import prepared
from support.records import comparable_fields

from onea.errors import OneaError
from onea.research.methods import METHODS, method_class
from onea.research.runs.config import make_config
from onea.research.runs.evaluation import FeatureCache, predict_tasks
from onea.research.runs.runner import run
from onea.runtime import Progress
from onea.vit.batching import padded_size

SIZES = "2,1,1,2"
ADAPTER_PER_TASK = ["ease", "per-task"]
FROZEN = ["simplecil", "aper-adapter", "aper-finetune", "aper-ssf", "aper-vpt-shallow", "aper-vpt-deep"]


@pytest.fixture
def _no_padding(monkeypatch):
    """Batches without padding, for counts of forward passes."""
    monkeypatch.setattr("onea.vit.batching.padded_size", int)


class PassCounter:
    """Counts the images that went through the whole network since the last call of ``take``."""

    def __init__(self, vit):
        self.images = 0
        vit.vit.blocks[0].attn.qkv.register_forward_pre_hook(self._count)

    def _count(self, _, inputs):
        self.images += len(inputs[0])

    def take(self) -> int:
        taken, self.images = self.images, 0
        return taken


def evaluate_all_tasks(
    values: dict, method: str, max_bytes: int | None
) -> tuple[list[list[int]], list[int], list[int]]:
    """Correct predictions after each task, forward passes and test images of each evaluation."""
    ready = prepared(values, method, sizes=SIZES)
    passes, feature_cache = PassCounter(ready.method.vit), FeatureCache(ready.test.rows, max_bytes)
    correct, num_passes, num_images = [], [], []
    for index in range(ready.stream.tasks):
        ready.method.learn(ready.task(index))
        passes.take()
        predicted = predict_tasks(ready.method, ready.test, ready.class_ranges(index), ready.seed, feature_cache)
        correct.append(predicted.correct_per_class())
        num_passes.append(passes.take())
        num_images.append(int((ready.test.labels[ready.test.rows] < ready.task(index).classes.stop).sum()))
    return correct, num_passes, num_images


@pytest.mark.parametrize("method", sorted(METHODS.builtin))
def test_predictions_are_the_same_with_and_without_a_cache(method, tiny_run):
    with_cache, num_passes, _ = evaluate_all_tasks(tiny_run, method, None)
    without, num_passes_without, _ = evaluate_all_tasks(tiny_run, method, 0)
    assert with_cache == without
    assert sum(num_passes) <= sum(num_passes_without)


@pytest.mark.usefixtures("_no_padding")
@pytest.mark.parametrize("method", ADAPTER_PER_TASK)
def test_methods_with_an_adapter_per_task_pass_each_image_once_per_adapter(method, tiny_run):
    _, num_passes, num_images = evaluate_all_tasks(tiny_run, method, None)
    tasks, images = len(num_images), num_images[-1]
    assert sum(num_passes) == images * tasks, "each pair of image and adapter once"
    new_images = [num_images[0], *(after - before for before, after in pairwise(num_images))]
    # The newest adapter runs on all images seen, older ones only on images that are new.
    assert num_passes == [num_images[t] + t * new_images[t] for t in range(tasks)]
    _, num_passes, _ = evaluate_all_tasks(tiny_run, method, 0)
    assert num_passes == [(t + 1) * num_images[t] for t in range(tasks)]


@pytest.mark.usefixtures("_no_padding")
@pytest.mark.parametrize("method", FROZEN)
def test_frozen_modules_cost_one_pass_per_image_and_module(method, tiny_run):
    _, num_passes, num_images = evaluate_all_tasks(tiny_run, method, None)
    num_modules = 1 if method == "simplecil" else 2
    assert sum(num_passes) == num_modules * num_images[-1]


@pytest.mark.usefixtures("_no_padding")
def test_cached_features_of_acmap_are_valid_after_the_limit(tiny_run):
    values = tiny_run | {"options": tiny_run["options"] | {"limit": 2}}
    _, num_passes, num_images = evaluate_all_tasks(values, "acmap", None)
    assert num_passes[:2] == num_images[:2]
    assert sum(num_passes[1:]) == num_images[-1], "from the second task on, only new images are passed"


def test_scores_from_cached_features_equal_those_of_a_forward_pass(tiny_run):
    ready = prepared(tiny_run, "ease")
    for index in range(3):
        ready.method.learn(ready.task(index))
    images = ready.test.images.test_views(ready.test.rows)
    features = {name: ready.method.features(images, hooks) for name, hooks in ready.method.cacheable_modules().items()}
    assert torch.equal(ready.method.scores_from_features(features), ready.method.scores(images))


def test_features_beyond_the_memory_limit_are_recomputed():
    rows, width = torch.tensor([4, 7, 9]), 5
    cache = FeatureCache(rows, max_bytes=3 * width * 4)
    calls = []

    def compute(module: str):
        calls.append(module)
        return torch.arange(3 * width, dtype=torch.float32).reshape(3, width)

    for module in ("a", "b", "a", "b"):
        assert torch.equal(cache.features(module, rows, lambda module=module: compute(module)), compute("expected"))
    assert [call for call in calls if call != "expected"] == ["a", "b", "b"]
    assert cache.bytes == 3 * width * 4
    cache.keep_only(["b"])
    assert cache.bytes == 0
    cache.features("b", rows[:1], lambda: compute("b")[:1])
    cache.features("b", rows[:1], lambda: pytest.fail("cached"))
    calls.clear()
    cache.features("b", rows, lambda: compute("b"))
    assert calls == ["b"], "one of the three was cached, which is not enough"


def test_a_run_resumed_without_its_cache_has_the_same_record(tiny_run, tmp_path):
    """A resumed run computes old features again; its record is the same."""
    values = {**tiny_run, "method": "ease", "sizes": SIZES, "options": {"rank": 4, "epochs": 1, "batch_size": 8}}
    config = make_config(values)
    whole = run(config, tmp_path / "whole")

    class StopAfterTwo(Progress):
        def end_task(self, task, accuracy):
            if task == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "resumed", StopAfterTwo())
    assert comparable_fields(run(config, tmp_path / "resumed")) == comparable_fields(whole)
    without = run(make_config(values | {"cache_gb": 0}), tmp_path / "without")
    assert comparable_fields(without) == comparable_fields(whole)


def test_only_frozen_modules_are_cacheable(tiny_run):
    """Cached features of a module that changes would be outdated."""
    for name in sorted(METHODS.builtin):
        if method_class(name).cacheable_modules.__qualname__.startswith("Method."):
            continue
        ready = prepared(tiny_run, name, sizes=SIZES)
        images = ready.test.images.test_views(ready.test.rows)
        first: dict[str, torch.Tensor] = {}
        for index in range(ready.stream.tasks):
            ready.method.learn(ready.task(index))
            for module, hooks in ready.method.cacheable_modules().items():
                features = ready.method.features(images, hooks)
                assert torch.equal(first.setdefault(module, features), features), (name, module)


def test_a_negative_cache_size_is_refused(tiny_run):
    with pytest.raises(OneaError, match="cache_gb is -1"):
        make_config(tiny_run | {"cache_gb": -1})


def test_batches_are_padded_to_few_sizes(tiny_run):
    """On a CPU, every new batch size costs memory."""
    sizes = set()
    for method in ("one-a", "ease"):
        ready = prepared(tiny_run, method, sizes=SIZES)
        for index in range(ready.stream.tasks):
            ready.method.learn(ready.task(index))
            hook = ready.method.vit.vit.norm_pre.register_forward_pre_hook(lambda _, inputs: sizes.add(len(inputs[0])))
            predict_tasks(ready.method, ready.test, ready.class_ranges(index), ready.seed)
            ready.method.compute_prototypes(ready.task(index))
            hook.remove()
    assert sizes
    assert all(size == padded_size(size) for size in sizes)


def test_padded_rows_do_not_count(tiny_run, monkeypatch):
    ready = prepared(tiny_run)
    ready.method.learn(ready.task(0))
    padded = ready.method.compute_prototypes(ready.task(0))
    monkeypatch.setattr("onea.vit.batching.padded_size", int)
    torch.testing.assert_close(ready.method.compute_prototypes(ready.task(0)), padded)
