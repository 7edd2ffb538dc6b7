# SPDX-License-Identifier: Apache-2.0
"""SSIAT: one adapter for all tasks, and shifted means of old classes."""

from __future__ import annotations

import pytest
import torch
from support.methods import learn_all, passes, prepared, shown_images

from onea.learner.local_head import train_with_local_head
from onea.options import make_options
from onea.research.methods.cosface import mean_shifts
from onea.research.methods.presets import preset_options
from onea.research.methods.ssiat import SSIAT
from onea.seeds import generator
from onea.vit.heads import GrowingCosineHead


def ssiat(tiny_run, sizes="3,1,2", **options):
    return prepared(tiny_run, "ssiat", sizes=sizes, options=tiny_run["options"] | options)


def adapter_of(method):
    return {name: value.clone() for name, value in method.adapter.state_dict().items()}


def test_one_task_is_an_adapter_with_a_cosine_head(tiny_run):
    ready = ssiat(tiny_run, "6")
    method, task = ready.method, ready.task(0)
    report = method.learn(task)
    assert "alignment_losses" not in report
    adapter, head = method.new_adapters(task.seed), GrowingCosineHead(64, 20.0)
    head.grow(6, generator(task.seed, 0, "head"))
    losses = train_with_local_head(method.vit, adapter, head, task, method.recipe(task), method.runtime)
    assert losses == report["losses"]
    assert torch.equal(head.weight, method.head.weight)
    assert all(torch.equal(value, adapter.state_dict()[name]) for name, value in method.adapter.state_dict().items())
    images = shown_images(ready)
    assert torch.equal(method.scores(images), head(method.features(images, method.adapter)))
    assert passes(method, images) == 1


def test_each_task_continues_from_the_previous_adapter(tiny_run):
    ready = ssiat(tiny_run, learning_rate=0.0)
    learn_all(ready, [0])
    first = adapter_of(ready.method)
    learn_all(ready, [1, 2])
    assert all(torch.equal(value, ready.method.adapter.state_dict()[name]) for name, value in first.items())


def test_without_drift_the_statistics_are_bit_identical(tiny_run):
    ready = ssiat(tiny_run, learning_rate=0.0)
    learn_all(ready, [0])
    means, factors = ready.method.gaussians.means.clone(), ready.method.gaussians.factors.clone()
    report = ready.method.learn(ready.task(2))
    assert report["shift"] == 0
    assert torch.equal(ready.method.gaussians.means[:3], means)
    assert torch.equal(ready.method.gaussians.factors[:3], factors)


def test_official_rows_shift_means_even_without_drift(tiny_run):
    ready = ssiat(tiny_run, learning_rate=0.0, paired_rows=False)
    learn_all(ready, [0])
    means = ready.method.gaussians.means.clone()
    assert ready.method.learn(ready.task(2))["shift"] > 0
    assert not torch.equal(ready.method.gaussians.means[:3], means)


@pytest.mark.parametrize("sigma", [4.0, 0.5])
def test_means_follow_the_new_images_and_covariances_do_not_change(sigma, tiny_run):
    ready = ssiat(tiny_run, "3,3", learning_rate=0.2, scale=1.0, sigma=sigma)
    method, task = ready.method, ready.task(1)
    learn_all(ready, [0])
    means, factors = method.gaussians.means.clone(), method.gaussians.factors.clone()
    images = task.images.test_views(task.rows)
    before = method.features(images, method.adapter)
    report = method.learn(task)
    after = method.features(images, method.adapter)
    shifts = mean_shifts(means, before, after, sigma)
    assert report["shift"] == pytest.approx(float(shifts.norm(dim=1).mean()), rel=1e-4)
    assert report["shift"] > 0.1
    torch.testing.assert_close(method.gaussians.means[:3], means + shifts, rtol=1e-4, atol=1e-4)
    assert torch.equal(method.gaussians.factors[:3], factors)
    for position in task.classes:
        torch.testing.assert_close(method.gaussians.means[position], after[task.labels == position].mean(0))


def test_the_state_is_constant_but_for_the_classes(tiny_run):
    few, many = (learn_all(ssiat(tiny_run, sizes)).state_dict() for sizes in ("3,3", "1,1,1,1,1,1"))
    sizes = [{name: value.shape for name, value in state.items() if name != "sizes"} for state in (few, many)]
    assert sizes[0] == sizes[1]
    assert (SSIAT.forward_passes(SSIAT.Options(), 40), SSIAT.adapters_used(SSIAT.Options(), 40)) == (1, 1)


@pytest.mark.parametrize("switch", [{"sigma": 0.5}, {"paired_rows": False}, {"scale": 0.5}, {"dropout": 0.0}])
def test_every_option_changes_the_result(switch, tiny_run):
    values = {"learning_rate": 0.2, "scale": 1.0}
    plain, switched = (learn_all(ssiat(tiny_run, "3,3", **values | change)) for change in ({}, switch))
    assert not torch.equal(plain.gaussians.means[:3], switched.gaussians.means[:3])


def test_published_values(tiny_run):
    assert 12 * (2 * 768 * SSIAT.Options().rank + SSIAT.Options().rank + 768) == 1_189_632
    for data, margin in (("cifar100", 0.0), ("imagenet-a", 0.3), ("imagenet-r", 0.0), ("cub200", 0.0)):
        options = make_options(SSIAT.Options, preset_options("ssiat", f"paper/{data}"))
        assert (options.epochs, options.learning_rate, options.batch_size, options.rank) == (20, 0.01, 48, 64)
        assert (options.margin, options.sigma, options.logit_scale, options.weight_decay) == (margin, 4.0, 20.0, 5e-4)
        assert (options.alignment_epochs, options.alignment_learning_rate, options.alignment_samples) == (5, 0.01, 256)
