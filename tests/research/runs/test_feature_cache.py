# SPDX-License-Identifier: Apache-2.0
"""Features of frozen modules are computed once per image, and it shows in nothing but the work done."""

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
GROWING = ["ease", "per-task"]
STANDING = ["simplecil", "aper-adapter", "aper-finetune", "aper-ssf", "aper-vpt-shallow", "aper-vpt-deep"]


@pytest.fixture(autouse=True)
def _no_filling(monkeypatch, request):
    """Where passes are counted, batches are not filled up."""
    if "cost" in request.node.name or "limit" in request.node.name:
        monkeypatch.setattr("onea.vit.batching.padded_size", int)


class PassCounter:
    """How many images went through the whole network since it was last asked."""

    def __init__(self, vit):
        self.images = 0
        vit.vit.blocks[0].attn.qkv.register_forward_pre_hook(self._count)

    def _count(self, _, inputs):
        self.images += len(inputs[0])

    def take(self) -> int:
        taken, self.images = self.images, 0
        return taken


def evaluations(values: dict, method: str, bound: int | None) -> tuple[list[list[int]], list[int], list[int]]:
    """Right answers after each task, passes of each evaluation, and test images seen at each."""
    ready = prepared(values, method, sizes=SIZES)
    passes, known = PassCounter(ready.method.vit), FeatureCache(ready.test.rows, bound)
    correct, counts, seen = [], [], []
    for index in range(ready.stream.tasks):
        ready.method.learn(ready.task(index))
        passes.take()
        predicted = predict_tasks(ready.method, ready.test, ready.class_ranges(index), ready.seed, known)
        correct.append(predicted.correct_per_class())
        counts.append(passes.take())
        seen.append(int((ready.test.labels[ready.test.rows] < ready.task(index).classes.stop).sum()))
    return correct, counts, seen


@pytest.mark.parametrize("method", sorted(METHODS.builtin))
def test_the_answers_are_the_same_with_and_without(method, tiny_run):
    with_cache, counts, _ = evaluations(tiny_run, method, None)
    without, more, _ = evaluations(tiny_run, method, 0)
    assert with_cache == without
    assert sum(counts) <= sum(more)


@pytest.mark.parametrize("method", GROWING)
def test_an_adapter_per_task_costs_each_image_one_pass_per_adapter(method, tiny_run):
    _, counts, seen = evaluations(tiny_run, method, None)
    tasks, images = len(seen), seen[-1]
    assert sum(counts) == images * tasks, "each pair of image and adapter once"
    new = [seen[0], *(after - before for before, after in pairwise(seen))]
    # The newest adapter runs on all images seen, older ones only on images that are new.
    assert counts == [seen[t] + t * new[t] for t in range(tasks)]
    _, counts, _ = evaluations(tiny_run, method, 0)
    assert counts == [(t + 1) * seen[t] for t in range(tasks)]


@pytest.mark.parametrize("method", STANDING)
def test_what_stands_still_costs_each_image_one_pass_per_part(method, tiny_run):
    _, counts, seen = evaluations(tiny_run, method, None)
    parts = 1 if method == "simplecil" else 2
    assert sum(counts) == parts * seen[-1]


def test_acmap_stands_still_after_its_limit(tiny_run):
    values = tiny_run | {"options": tiny_run["options"] | {"limit": 2}}
    _, counts, seen = evaluations(values, "acmap", None)
    assert counts[:2] == seen[:2]
    assert sum(counts[1:]) == seen[-1], "from the second task on, only new images are passed"


def test_features_scored_from_memory_are_those_of_a_pass(tiny_run):
    ready = prepared(tiny_run, "ease")
    for index in range(3):
        ready.method.learn(ready.task(index))
    images = ready.test.images.test_views(ready.test.rows)
    features = {name: ready.method.features(images, hooks) for name, hooks in ready.method.cacheable_modules().items()}
    assert torch.equal(ready.method.scores_from_features(features), ready.method.scores(images))


def test_a_bound_holds_and_what_does_not_fit_is_computed_again():
    rows, width = torch.tensor([4, 7, 9]), 5
    cache = FeatureCache(rows, max_bytes=3 * width * 4)
    calls = []

    def compute(part: str):
        calls.append(part)
        return torch.arange(3 * width, dtype=torch.float32).reshape(3, width)

    for part in ("a", "b", "a", "b"):
        assert torch.equal(cache.features(part, rows, lambda part=part: compute(part)), compute("expected"))
    assert [call for call in calls if call != "expected"] == ["a", "b", "b"]
    assert cache.bytes == 3 * width * 4
    cache.keep_only(["b"])
    assert cache.bytes == 0
    cache.features("b", rows[:1], lambda: compute("b")[:1])
    cache.features("b", rows[:1], lambda: pytest.fail("known"))
    calls.clear()
    cache.features("b", rows, lambda: compute("b"))
    assert calls == ["b"], "one of the three was known, which is not enough"


def test_a_run_resumed_without_its_cache_ends_the_same(tiny_run, tmp_path):
    """Whoever resumes has to compute old features again; the record must not tell."""
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


def test_only_frozen_things_are_named_parts(tiny_run):
    """A part that changed after it was named would be answered from stale features."""
    for name in sorted(METHODS.builtin):
        if method_class(name).cacheable_modules.__qualname__.startswith("Method."):
            continue
        ready = prepared(tiny_run, name, sizes=SIZES)
        images = ready.test.images.test_views(ready.test.rows)
        first: dict[str, torch.Tensor] = {}
        for index in range(ready.stream.tasks):
            ready.method.learn(ready.task(index))
            for part, hooks in ready.method.cacheable_modules().items():
                features = ready.method.features(images, hooks)
                assert torch.equal(first.setdefault(part, features), features), (name, part)


def test_the_option_is_checked(tiny_run):
    with pytest.raises(OneaError, match="cache_gb is -1"):
        make_config(tiny_run | {"cache_gb": -1})


def test_batches_are_filled_up_to_few_sizes(tiny_run):
    """A new batch size after every task would cost a CPU memory for each of them."""
    sizes = set()
    for method in ("one-a", "ease"):
        ready = prepared(tiny_run, method, sizes=SIZES)
        for index in range(ready.stream.tasks):
            ready.method.learn(ready.task(index))
            plain = ready.method.vit.vit.norm_pre.register_forward_pre_hook(lambda _, given: sizes.add(len(given[0])))
            predict_tasks(ready.method, ready.test, ready.class_ranges(index), ready.seed)
            ready.method.compute_prototypes(ready.task(index))
            plain.remove()
    assert sizes
    assert all(size == padded_size(size) for size in sizes)


def test_filled_rows_do_not_count(tiny_run, monkeypatch):
    ready = prepared(tiny_run)
    ready.method.learn(ready.task(0))
    filled = ready.method.compute_prototypes(ready.task(0))
    monkeypatch.setattr("onea.vit.batching.padded_size", int)
    torch.testing.assert_close(ready.method.compute_prototypes(ready.task(0)), filled)
