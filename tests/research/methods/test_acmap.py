# SPDX-License-Identifier: Apache-2.0
"""ACMap against independent formulas: mean of the adapters, mapped prototypes and limit."""

from __future__ import annotations

import pytest
import torch
from support.methods import learn_all, prepared, shown_images
from support.tiny import write_tiny_images
from torch.nn import functional as F

from onea.errors import OneaError
from onea.research.methods.acmap import ACMap, ACMapOptions
from onea.schedules import cosine


def acmap(tiny_run, sizes="3,1,2", **options):
    return prepared(tiny_run, "acmap", sizes=sizes, options=tiny_run["options"] | options)


def record_trained(method: ACMap, monkeypatch):
    """A list to which each trained adapter is appended before it is merged."""
    trained = []
    original = method.train_with_local_head

    def train_and_record(adapters, task):
        report = original(adapters, task)
        trained.append({name: value.clone() for name, value in adapters.state_dict().items()})
        return report

    monkeypatch.setattr(method, "train_with_local_head", train_and_record)
    return trained


def class_means(method: ACMap, ready, index: int, adapter: int):
    """Prototypes of a task with a merged adapter, computed by a simple loop."""
    task = ready.task(index)
    features = method.features(task.images.test_views(task.rows), method.merged[adapter])
    return torch.stack([features[task.labels == position].mean(0) for position in task.classes])


def shrinkage(rate: float, decay: float, epochs: int, steps: int) -> float:
    """The factor by which SGD with momentum and weight decay shrinks a weight without a gradient."""
    weight, velocity = 1.0, 0.0
    for epoch in range(epochs):
        for step in range(steps):
            gradient = decay * weight
            velocity = gradient if epoch == step == 0 else 0.9 * velocity + gradient
            weight -= rate * cosine(epoch, epochs) * velocity
    return weight


def test_the_merged_adapter_is_the_mean_of_all_trained_adapters(tiny_run, monkeypatch):
    ready = acmap(tiny_run, "2,1,2,1")
    trained = record_trained(ready.method, monkeypatch)
    learn_all(ready)
    for count, merged in enumerate(ready.method.merged, 1):
        for name, value in merged.state_dict().items():
            torch.testing.assert_close(
                value, torch.stack([adapter_state[name] for adapter_state in trained[:count]]).mean(0)
            )
            assert not value.requires_grad
        assert not merged.training


def test_without_training_all_adapters_are_equal_and_prototypes_do_not_shift(tiny_run):
    ready = acmap(tiny_run, learning_rate=0.0)
    report = [ready.method.learn(ready.task(index)) for index in range(3)][-1]
    first, *rest = ready.method.merged
    for other in rest:
        for a, b in zip(first.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    assert report["shifts"] == pytest.approx([0, 0], abs=1e-6)
    torch.testing.assert_close(ready.method.prototypes, ready.method.sources)


def test_later_tasks_start_from_the_first_trained_adapter(tiny_run, monkeypatch):
    """A task of one class has no gradient, so its adapter is the initial one, shrunk by the weight decay."""
    ready = acmap(tiny_run, "3,2,1", weight_decay=0.1, batch_size=4, epochs=3)
    trained = record_trained(ready.method, monkeypatch)
    learn_all(ready)
    kept = shrinkage(0.05, 0.1, epochs=3, steps=2)
    assert 0.9 < kept < 0.99
    for name, value in trained[2].items():
        torch.testing.assert_close(value, kept * trained[0][name], rtol=1e-4, atol=1e-7)


def test_shrinkage_of_the_published_recipes():
    assert shrinkage(0.025, 5e-4, epochs=20, steps=-(-500 // 48)) == pytest.approx(0.987, abs=1e-3)
    assert shrinkage(0.05, 5e-3, epochs=20, steps=-(-120 // 16)) == pytest.approx(0.83, abs=1e-2)


def test_prototypes_are_mapped_from_their_original_values(tiny_run):
    ready = acmap(tiny_run, "2,2,2", learning_rate=1.0, scale=1.0)
    method = ready.method
    learn_all(ready, [0])
    first = class_means(method, ready, 0, 0)
    torch.testing.assert_close(method.prototypes, first)
    learn_all(ready, [1, 2])
    second = class_means(method, ready, 1, 1)
    current = class_means(method, ready, 2, 2)
    shifts = [current.mean(0) - class_means(method, ready, 2, adapter).mean(0) for adapter in (0, 1)]
    assert min(float(shift.norm()) for shift in shifts) > 0.1
    expected = torch.cat([first + shifts[0], second + shifts[1], current])
    torch.testing.assert_close(method.prototypes, expected)
    torch.testing.assert_close(method.sources, torch.cat([first, second, current]))


def test_a_centroid_averages_classes_and_not_images(tiny_run):
    ready = prepared(tiny_run, "acmap", sizes="2,4", long_tail=0.2)
    method = learn_all(ready)
    task = ready.task(1)
    counts = task.labels.bincount()[2:]
    assert counts.min() < counts.max()
    shift = class_means(method, ready, 1, 1).mean(0) - class_means(method, ready, 1, 0).mean(0)
    torch.testing.assert_close(method.prototypes[:2] - method.sources[:2], shift.expand(2, -1), rtol=1e-3, atol=1e-6)


def test_one_task_equals_an_adapter_with_prototypes(tiny_run):
    ready = acmap(tiny_run, "6")
    method = learn_all(ready)
    features = method.features(shown_images(ready), method.merged[0])
    expected = F.cosine_similarity(features[:, None], class_means(method, ready, 0, 0)[None], dim=2)
    torch.testing.assert_close(method.scores(shown_images(ready)), expected)


def test_a_single_class_first_task_does_not_change_the_features(tiny_run):
    ready = acmap(tiny_run, "1,5")
    learn_all(ready, [0])
    images = shown_images(ready)
    assert torch.equal(ready.method.features(images, ready.method.merged[0]), ready.method.features(images))


def test_tasks_after_the_limit_only_add_prototypes(tiny_run):
    ready = acmap(tiny_run, "2,2,1,1", limit=2)
    method = ready.method
    reports = [method.learn(ready.task(index)) for index in (0, 1)]
    before = {name: value.clone() for name, value in method.state_dict().items()}
    reports += [method.learn(ready.task(index)) for index in (2, 3)]
    assert [report["trained"] for report in reports] == [True, True, False, False]
    after = method.state_dict()
    assert before.keys() == after.keys(), "no more adapters are stored"
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("merged."))
    assert torch.equal(before["prototypes"], after["prototypes"][:4])
    torch.testing.assert_close(after["prototypes"][4:5], class_means(method, ready, 2, 1))
    assert method.forward_passes(method.options, 1) == method.forward_passes(method.options, 40) == 1


def test_mapping_at_the_limit_is_optional(tiny_run):
    mapped, official = (learn_all(acmap(tiny_run, limit=2, acmap_map_at_limit=switch)) for switch in (True, False))
    assert torch.equal(mapped.sources, official.sources)
    assert torch.equal(official.prototypes, official.sources)
    assert not torch.equal(mapped.prototypes[:3], mapped.sources[:3])
    assert torch.equal(mapped.prototypes[3:], mapped.sources[3:])
    below = learn_all(acmap(tiny_run, limit=4, acmap_map_at_limit=False))
    assert not torch.equal(below.prototypes, below.sources), "below the limit, prototypes are mapped in both cases"


def test_dropout_at_inference_is_optional_and_reproducible(tiny_run):
    plain, dropping = (acmap(tiny_run, acmap_test_dropout=switch, dropout=0.5) for switch in (False, True))
    learn_all(plain, [0])
    learn_all(dropping, [0])
    assert torch.equal(plain.method.merged[0].blocks[0].up.weight, dropping.method.merged[0].blocks[0].up.weight)
    assert not torch.equal(plain.method.prototypes, dropping.method.prototypes)
    images = shown_images(plain)
    state = torch.get_rng_state()
    first, second = dropping.method.scores(images), dropping.method.scores(images)
    assert torch.equal(first, second), "dropout is seeded"
    assert torch.equal(state, torch.get_rng_state())
    assert not dropping.method.merged[0].training
    dropping.method.prototypes = plain.method.prototypes
    assert not torch.equal(dropping.method.scores(images), plain.method.scores(images))


def test_one_image_per_class(tiny_run, tmp_path):
    write_tiny_images(tmp_path, train=1)
    ready = acmap(tiny_run | {"data": f"folder:{tmp_path}"}, "1,3,2")
    assert torch.isfinite(learn_all(ready).scores(shown_images(ready))).all()


def test_published_adapter_has_the_published_size():
    rank = ACMapOptions().rank
    assert 12 * (2 * 768 * rank + rank + 768) == 1_189_632
    assert {options["limit"] for options in ACMap.paper_presets.values()} == {10}
    with pytest.raises(OneaError, match="limit"):
        ACMapOptions(limit=0)
