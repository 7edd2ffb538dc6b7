# SPDX-License-Identifier: Apache-2.0
"""MACIL: losses against loops, updates that are folded, and the normalised logits of the alignment."""

from __future__ import annotations

import math

import pytest
import torch
from support.methods import learn_all, passes, prepared, shown_images
from torch.nn import functional as F

from onea.errors import OneaError
from onea.options import make_options
from onea.research.methods import macil as module
from onea.research.methods.lora import SummedUpdates
from onea.research.methods.macil import (
    MACIL,
    TaskNormalisedHead,
    TokenRecorder,
    class_metrics,
    covariance_loss,
    patch_loss,
)
from onea.research.methods.presets import preset_options
from onea.vit.heads import GrowingCosineHead


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def macil(tiny_run, sizes="3,1,2", **options):
    return prepared(tiny_run, "macil", sizes=sizes, options=tiny_run["options"] | options)


def copied(state):
    return {name: value.clone() for name, value in state.items()}


def random_updates(method, task):
    updates = method.new_updates(task)
    for up in updates.ups():
        up.data = 0.1 * torch.randn(up.shape, generator=generator(up.numel()))
    return updates


def shrunk(features):
    """The shrunk covariance of a class, entry by entry."""
    covariance = torch.cov(features.double().T)
    width = len(covariance)
    variance = sum(float(covariance[i, i]) for i in range(width)) / width
    others = [float(covariance[i, j]) for i in range(width) for j in range(width) if i != j]
    result = covariance.clone()
    for i in range(width):
        for j in range(width):
            result[i, j] += 10 * variance + 1e-3 if i == j else 10 * sum(others) / len(others)
    return result


def test_metrics_equal_the_formula():
    features = torch.randn(20, 5, generator=generator(1)) @ torch.randn(5, 5, generator=generator(2))
    labels = torch.tensor([7] * 12 + [8] * 8)
    factors = class_metrics(features, labels, range(7, 9))
    for factor, label in zip(factors.double(), (7, 8), strict=True):
        expected = torch.linalg.pinv(shrunk(features[labels == label])) + 1e-6 * torch.eye(5)
        torch.testing.assert_close(factor @ factor.T, expected, rtol=1e-4, atol=1e-6)


def test_metrics_are_finite_for_any_images():
    opposite = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])  # the mean covariance is the negative of the variance
    assert torch.isfinite(class_metrics(opposite, torch.zeros(2, dtype=torch.int64), range(1))).all()
    single = class_metrics(torch.randn(1, 4), torch.zeros(1, dtype=torch.int64), range(1))[0]
    torch.testing.assert_close(single @ single.T, 1e3 * torch.eye(4))


def test_the_covariance_loss_equals_loops_over_pairs():
    features, before = (torch.randn(9, 5, generator=generator(seed)) for seed in (1, 2))
    labels = torch.tensor([0, 1, 1, 0, 2, 1, 0, 3, 3])
    images = torch.randn(40, 5, generator=generator(3)) @ torch.randn(5, 5, generator=generator(4))
    factors = class_metrics(images, torch.arange(4).repeat(10), range(4))
    total = 0.0
    for label in range(4):
        metric = (factors[label] @ factors[label].T).double()
        rows = [i for i in range(9) if labels[i] == label]
        for i in rows:
            for j in (j for j in rows if j > i):
                distances = []
                for network in (features, before):
                    difference = (F.normalize(network[i], dim=0) - F.normalize(network[j], dim=0)).double()
                    distances.append(math.sqrt(float(difference @ metric @ difference) + 1e-8))
                total += abs(distances[0] - distances[1])
    assert float(covariance_loss(features, before, labels, factors)) == pytest.approx(total / 9, rel=1e-4)


def test_the_patch_loss_equals_loops_over_tokens():
    patches, before = (torch.randn(3, 4, 5, generator=generator(seed)) for seed in (1, 2))
    features = torch.randn(3, 5, generator=generator(3))
    terms = []
    for image in range(3):
        for token in range(4):
            cosine = F.cosine_similarity(features[image], patches[image, token], dim=0)
            change = F.normalize(patches[image, token], dim=0) - F.normalize(before[image, token], dim=0)
            terms.append(math.acos(float(cosine)) / math.pi * float(change.norm()))
    assert float(patch_loss(patches, before, features)) == pytest.approx(sum(terms) / 12, rel=1e-4)


def test_the_angle_of_the_patch_loss_has_no_gradient():
    patches, before = (torch.randn(2, 3, 4, generator=generator(seed)) for seed in (1, 2))
    features = torch.randn(2, 4, generator=generator(3), requires_grad=True)
    patches.requires_grad_()
    patch_loss(patches, before, features).backward()
    assert features.grad is None
    assert patches.grad.abs().min() > 0


def test_identical_networks_have_no_loss_and_no_gradient():
    features = torch.randn(6, 5, generator=generator(1), requires_grad=True)
    patches = torch.randn(6, 4, 5, generator=generator(2), requires_grad=True)
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    factors = class_metrics(torch.randn(20, 5, generator=generator(3)), torch.arange(2).repeat(10), range(2))
    value = covariance_loss(features, features.detach(), labels, factors)
    value = value + patch_loss(patches, patches.detach(), features)
    value.backward()
    assert value == 0
    assert torch.equal(features.grad, torch.zeros(6, 5))
    assert torch.equal(patches.grad, torch.zeros(6, 4, 5))


def test_without_drift_means_are_bit_identical(tiny_run):
    ready = macil(tiny_run, learning_rate=0.0)
    learn_all(ready, [0])
    means = ready.method.gaussians.means.clone()
    assert ready.method.learn(ready.task(2))["shift"] == 0
    assert torch.equal(ready.method.gaussians.means[:3], means)
    assert not ready.method.folded.weight.any()


def test_the_losses_of_the_teacher_begin_at_zero_and_then_change_the_update(tiny_run, monkeypatch):
    values = {"learning_rate": 0.2, "batch_size": 6}
    seen = {"covariance": [], "patches": []}
    for key, name in (("covariance", "covariance_loss"), ("patches", "patch_loss")):
        original = getattr(module, name)

        def recorded(*arguments, original=original, key=key):
            value = original(*arguments)
            seen[key].append(float(value.detach()))
            return value

        monkeypatch.setattr(module, name, recorded)
    plain = learn_all(macil(tiny_run, "3,3", **values)).folded.weight
    for losses in seen.values():
        assert losses[0] == 0, "update and teacher are identical before the first step"
        assert min(losses[1:]) > 0
    for switch in ({"covariance_weight": 0.0}, {"patch_weight": 0.0}):
        assert not torch.equal(plain, learn_all(macil(tiny_run, "3,3", **values | switch)).folded.weight)


def test_the_teacher_takes_a_second_pass_from_the_second_task_on(tiny_run):
    for weights, per_step in (({}, 2), ({"covariance_weight": 0.0, "patch_weight": 0.0}, 1)):
        ready = macil(tiny_run, "3,3", epochs=1, batch_size=6, **weights)
        training = []
        ready.method.vit.vit.blocks[0].attn.qkv.register_forward_pre_hook(
            lambda *_, training=training: training.append(torch.is_grad_enabled())
        )
        learn_all(ready, [0])
        assert sum(training) == 3, "18 images in batches of six"
        training.clear()
        learn_all(ready, [1])
        assert sum(training) == 3 * per_step


def test_recorded_tokens_do_not_change_the_features(tiny_run):
    ready = macil(tiny_run)
    method, task, images = ready.method, ready.task(0), shown_images(ready)
    hooks = SummedUpdates(method.folded, random_updates(method, task))
    recorder = TokenRecorder(hooks)
    features = method.features(images, recorder)
    torch.testing.assert_close(features, method.features(images, hooks))
    assert recorder.recorded.shape == (len(images), 1 + 4, 64)
    torch.testing.assert_close(recorder.recorded[:, 0], features)


def test_folding_keeps_the_logits(tiny_run):
    ready = macil(tiny_run)
    method, images = learn_all(ready, [0]), shown_images(ready)
    updates = random_updates(method, ready.task(1))
    summed = method.features(images, SummedUpdates(method.folded, updates))
    before = method.features(images, method.folded)
    method.folded.fold(updates)
    torch.testing.assert_close(method.features(images, method.folded), summed, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, summed, atol=1e-2)
    torch.testing.assert_close(method.scores(images), method.head(summed), rtol=1e-4, atol=1e-3)


def test_updates_change_keys_and_values_only(tiny_run):
    ready = macil(tiny_run, learning_rate=0.2)
    method = learn_all(ready, [0])
    queries, keys, values = method.folded.qkv_update(0, torch.randn(1, 3, 64, generator=generator(1))).chunk(3, dim=-1)
    assert not queries.any()
    assert keys.abs().max() > 0
    assert values.abs().max() > 0


def test_a_task_of_one_class_has_no_gradient(tiny_run):
    ready = macil(tiny_run, single_class="train", learning_rate=0.5, weight_decay=0.1)
    method = learn_all(ready, [0])
    before = method.folded.weight.clone()
    report = method.learn(ready.task(1))
    assert set(report["losses"]) == {0.0}
    assert torch.equal(method.folded.weight, before)


def test_one_pass_after_any_number_of_tasks(tiny_run):
    ready = macil(tiny_run, "1,1,1,1,1,1")
    assert passes(learn_all(ready), shown_images(ready)) == 1
    assert (MACIL.forward_passes(MACIL.Options(), 40), MACIL.adapters_used(MACIL.Options(), 40)) == (1, 1)


def test_normalised_logits_equal_loops_over_tasks():
    head = GrowingCosineHead(4, 20.0)
    head.grow(6, generator(1))
    features, sizes = torch.randn(3, 4, generator=generator(2)), [3, 1, 2]
    logits = TaskNormalisedHead(head, sizes, 0.1)(features)
    for row, feature in zip(logits, features, strict=True):
        cosines = torch.stack([F.cosine_similarity(feature, weight, dim=0) for weight in head.weight])
        norms = [part.norm() for part in cosines.split(sizes)]
        torch.testing.assert_close(row, cosines / (sum(norms) / 3) / 0.1)


@pytest.mark.parametrize("switch", [{"sigma": 1e6}, {"paired_rows": False}, {"alignment_temperature": 1.0}])
def test_every_option_changes_the_result(switch, tiny_run):
    plain, switched = (
        learn_all(macil(tiny_run, "3,3", **{"learning_rate": 0.2, "sigma": 10.0} | change)).state_dict()
        for change in ({}, switch)
    )
    assert any(not torch.equal(plain[name], switched[name]) for name in plain)


def test_published_values(tiny_run):
    assert 12 * 2 * 2 * 768 * MACIL.Options().rank == 1_179_648
    for data in ("cifar100", "imagenet-a", "imagenet-r", "cub200"):
        options = make_options(MACIL.Options, preset_options("macil", f"paper/{data}"))
        assert (options.epochs, options.learning_rate, options.batch_size, options.rank) == (20, 0.01, 48, 32)
        assert (options.weight_decay, options.sigma, options.margin) == (0.0, 1.0, 0.0)
        assert (options.alignment_epochs, options.alignment_learning_rate, options.alignment_samples) == (5, 0.01, 256)
    assert preset_options("macil", "paper")["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("option", "message"), [({"rank": 0}, "rank"), ({"sigma": 0.0}, "sigma"), ({"rank": 65}, "width 64")]
)
def test_impossible_options_are_refused(option, message, tiny_run):
    with pytest.raises(OneaError, match=message):
        macil(tiny_run, **option)
