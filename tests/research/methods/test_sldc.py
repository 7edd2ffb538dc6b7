# SPDX-License-Identifier: Apache-2.0
"""SLDC and LR-RGDA: the LoRA, its loss, and Gaussians that follow it."""

from __future__ import annotations

import pytest
import torch
from support.methods import learn_all, prepared, shown_images
from support.tiny import write_tiny_images
from support.toys import SHAPES, images_for, toy
from torch.nn import functional as F

from onea.classifiers.statistics import ClassStatistics
from onea.options import make_options
from onea.research.methods import method_class
from onea.research.methods.lora import LowRankWeights
from onea.vit.heads import symmetric_cross_entropy


def ready_for(tiny_run, method="sldc", sizes="3,1,2", **options):
    return prepared(tiny_run, method, sizes=sizes, options=tiny_run["options"] | options)


@pytest.fixture(params=["sldc", "lr-rgda"])
def method(request) -> str:
    return request.param


def randomise(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)


def test_the_lora_starts_at_the_leading_directions_of_the_weights_and_changes_nothing(tiny_run):
    ready = ready_for(tiny_run)
    vit, images = ready.method.vit, shown_images(ready)
    lora = LowRankWeights(vit, 4, 0.8)
    assert torch.equal(ready.method.features(images, lora), ready.method.features(images))
    assert len(lora.weights(vit)) == 3 * vit.depth, "projections and both layers of the MLP"
    for name, updated in lora.weights(vit).items():
        frozen = vit.get_parameter(name)
        assert torch.equal(updated, frozen)
        position = list(lora.weights(vit)).index(name)
        directions = torch.linalg.svd(frozen, full_matrices=False)[2][:4]
        found = lora.updates[position].down.detach()
        torch.testing.assert_close(found.T @ found, directions.T @ directions, rtol=0, atol=1e-4)
    trained = sum(parameter.numel() for parameter in lora.parameters())
    width, rank, hidden = vit.width, 4, 4 * vit.width
    assert trained == vit.depth * rank * (width + 3 * width + 2 * (width + hidden))


def test_the_lora_equals_a_network_with_these_weights(tiny_run):
    ready = ready_for(tiny_run)
    method, images = ready.method, shown_images(ready)
    randomise(method.module)
    adapted = method.features(images, method.module)
    frozen = {name: value.clone() for name, value in method.vit.state_dict().items()}
    method.vit.load_state_dict(method.module.weights(method.vit), strict=False)
    torch.testing.assert_close(method.features(images), adapted, rtol=1e-4, atol=1e-5)
    method.vit.load_state_dict(frozen)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_the_lora_fits_networks_of_all_families(name):
    vit = toy(name)
    lora, images = LowRankWeights(vit, 3, 0.8), images_for(vit)
    expected = vit(images)
    torch.testing.assert_close(vit(images, lora), expected, rtol=1e-4, atol=1e-5)
    layers = {key.partition(".blocks.")[2].partition(".")[2] for key in lora.weights(vit)}
    assert layers >= {"mlp.fc2.weight"}
    assert layers & {"attn.qkv.weight", "attn.q_proj.weight"}
    assert not any("proj.weight" in layer and "_proj" not in layer for layer in layers), "not the output projection"
    randomise(lora)
    changed = vit(images, lora)
    assert not torch.allclose(changed, expected, atol=1e-3)
    vit.load_state_dict(lora.weights(vit), strict=False)
    torch.testing.assert_close(vit(images), changed, rtol=1e-4, atol=1e-4)


def test_the_published_lora_has_the_published_size():
    rank, width, depth = 4, 768, 12
    assert depth * rank * (width + 3 * width + 2 * (width + 4 * width)) == 516_096


def test_symmetric_cross_entropy_equals_its_formula():
    logits, labels = torch.randn(7, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    probabilities, targets = logits.softmax(1), F.one_hot(labels, 4).float()
    reverse = -(probabilities * targets.clamp_min(1e-4).log()).sum(1).mean()
    expected = 0.5 * F.cross_entropy(logits, labels) + 0.5 * reverse
    torch.testing.assert_close(symmetric_cross_entropy(logits, labels), expected)
    assert symmetric_cross_entropy(logits[:, :1], torch.zeros(7, dtype=torch.int64)) == 0


def test_the_first_task_is_not_affected_by_the_map(method, tiny_run):
    maps = ("none", "ridge", "dpcr", "sldc", "hopdc")
    after_one, after_two = [], []
    for carry in maps:
        ready = ready_for(tiny_run, method, "3,3", carry=carry)
        learn_all(ready, [0])
        after_one.append(ready.method.prototypes.clone())
        learn_all(ready, [1])
        after_two.append(ready.method.prototypes[:3].clone())
        assert torch.equal(ready.method.prototypes[:3], after_one[-1]) == (carry == "none")
    assert all(torch.equal(means, after_one[0]) for means in after_one)
    assert not any(torch.allclose(after_two[i], after_two[j]) for i in range(5) for j in range(i))


def test_a_task_of_one_class_changes_neither_the_lora_nor_old_statistics(method, tiny_run):
    ready = ready_for(tiny_run, method, "3,1,2")
    learn_all(ready, [0])
    before = {name: value.clone() for name, value in ready.method.state_dict().items()}
    report = ready.method.learn(ready.task(1))
    after = ready.method.state_dict()
    assert report == {"trained": False}
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("module."))
    assert torch.equal(after["prototypes"][:3], before["prototypes"])
    assert torch.equal(after["factors"][:3], before["factors"])


def test_a_task_of_one_class_that_is_trained_as_published_changes_weights_by_decay_alone(tiny_run):
    ready = ready_for(tiny_run, sizes="3,1,2", single_class="train", weight_decay=0.0)
    learn_all(ready, [0])
    before = {name: value.clone() for name, value in ready.method.module.state_dict().items()}
    old = ready.method.prototypes.clone()
    report = ready.method.learn(ready.task(1))
    assert report["losses"] == [0.0, 0.0]
    assert all(torch.equal(value, before[name]) for name, value in ready.method.module.state_dict().items())
    assert torch.equal(ready.method.prototypes[:3], old), (
        "the map is not applied, although it would not be the identity"
    )
    decayed = ready_for(tiny_run, sizes="3,1,2", single_class="train", weight_decay=0.1)
    learn_all(decayed, [0, 1])
    assert not torch.equal(decayed.method.prototypes[:3], old)


def test_distillation_keeps_features_near_those_before(tiny_run):
    moved = []
    for weight in (0.0, 1000.0):
        ready = ready_for(tiny_run, sizes="3,3", distillation=weight, norm_distillation=0.0, learning_rate=0.01)
        learn_all(ready, [0])
        task = ready.task(1)
        before = ready.method.task_features(task, ready.method.hooks())
        ready.method.learn(task)
        moved.append((ready.method.task_features(task, ready.method.hooks()) - before).norm())
    assert moved[1] < 0.7 * moved[0]


def test_all_covariances_are_kept_in_full(method, tiny_run):
    ready = ready_for(tiny_run, method)
    learned = learn_all(ready)
    (statistics,) = learned.statistics.values()
    assert isinstance(statistics, ClassStatistics)
    assert statistics.factors.shape == (6, learned.vit.width, learned.vit.width)
    task = ready.task(2)
    features = learned.task_features(task, learned.hooks())
    own = torch.cov(features[task.labels == 5].double().T)
    factor = statistics.factors[5].double()
    torch.testing.assert_close(factor.T @ factor / (statistics.counts[5] - 1), own, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("carry_options", ["", "kind=nonlinear,steps=20,samples=64", "ridge=0.01"])
def test_uneven_streams_keep_finite_statistics(carry_options, method, tiny_run, tmp_path):
    """Tasks of 36, 1, 2 and 9 classes, some classes with a single image."""
    write_tiny_images(tmp_path, classes=48, train=2, test=1)
    (tmp_path / "train/class40/1.png").unlink()
    data = tiny_run | {"data": f"folder:{tmp_path}"}
    options = {"carry": "sldc", "carry_options": carry_options} if carry_options else {}
    ready = ready_for(data, method, "36,1,2,9", **options)
    learned = learn_all(ready)
    assert all(value.isfinite().all() for value in learned.state_dict().values() if value.is_floating_point())
    assert learned.scores(shown_images(ready)).isfinite().all()
    assert learned.num_classes == 48


@pytest.mark.parametrize(
    "switch",
    [
        {"carry_options": "alpha=5"},
        {"carry_options": "ridge=0.01"},
        {"carry_options": "kind=nonlinear,steps=20"},
        {"distillation": 0.0},
        {"norm_distillation": 10.0},
        {"scale": 0.1},
        {"rank": 2},
        {"single_class": "train"},
    ],
)
def test_every_option_changes_the_result(switch, tiny_run):
    plain, switched = (learn_all(ready_for(tiny_run, **values)).state_dict() for values in ({}, switch))
    assert any(
        a.shape != b.shape or not torch.equal(a, b) for a, b in zip(plain.values(), switched.values(), strict=True)
    )


def test_published_options_are_those_of_the_official_configurations():
    for method, epochs in (("sldc", {"cifar100": 5, "cub200": 15, "imagenet-r": 10}), ("lr-rgda", {"cifar100": 3})):
        for data, count in epochs.items():
            kind = method_class(method)
            options = make_options(kind.Options, kind.paper_presets[data])
            assert (options.epochs, options.learning_rate, options.batch_size) == (count, 1e-4, 16)
            assert (options.rank, options.scale, options.weight_decay) == (4, 0.8, 3e-5)
