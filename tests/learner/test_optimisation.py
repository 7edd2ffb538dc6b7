# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from onea.errors import OneaError
from onea.learner.adapter_training import AdapterTraining
from onea.learner.local_head import contrastive_loss
from onea.learner.optimisation import ParamGroup, Recipe, train
from onea.learner.tasks import StreamPlan, Task
from onea.runtime import make_runtime


class RowImages:
    """Images whose pixels are their row number, so that a test can check the training images."""

    device = torch.device("cpu")

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def test_views(self, rows):
        return rows.float()[:, None]

    def train_batches(self, rows, size, crop_scale, generator, shard=None):
        noise = 0.01 * torch.rand(len(rows), 1, generator=generator)
        return iter((rows.float()[:, None] / self.count + noise).split(size))


def make_task(count: int = 10, classes: int = 2, seed: int = 1) -> Task:
    return Task(0, "ramp", range(classes), RowImages(count), torch.arange(count), torch.arange(count) % classes, seed)


def naive_contrastive(features: np.ndarray, labels: np.ndarray, margin: float) -> float:
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    positive, negative = [], []
    for i in range(len(labels)):
        for j in range(len(labels)):
            if i != j:
                cosine = unit[i] @ unit[j]
                if labels[i] == labels[j]:
                    positive.append(1 - cosine)
                else:
                    negative.append(max(0.0, cosine - margin))
    return sum(positive) / max(len(positive), 1) + sum(negative) / max(len(negative), 1)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 999))
def test_contrastive_loss_equals_a_double_loop(batch, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, 5, generator=generator)
    labels = torch.randint(classes, (batch,), generator=generator)
    expected = naive_contrastive(features.double().numpy(), labels.numpy(), 0.07)
    assert float(contrastive_loss(features, labels)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 2], [0]])
def test_contrastive_loss_without_pairs_is_finite(labels):
    features = torch.randn(len(labels), 4, requires_grad=True)
    value = contrastive_loss(features, torch.tensor(labels))
    value.backward()
    assert math.isfinite(value.item())
    assert torch.isfinite(features.grad).all()


def test_single_class_cross_entropy_has_no_gradient():
    logits = torch.randn(4, 1, requires_grad=True)
    F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)).backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_epochs_with_and_without_a_plan():
    options = AdapterTraining(epochs=25, min_epochs=20, max_epochs=40)
    assert options.epochs_for(36, StreamPlan(100, 10)) == 40
    assert options.epochs_for(9, StreamPlan(100, 10)) == round(25 * 0.9**0.5)
    assert options.epochs_for(1, StreamPlan(100, 10)) == 20
    assert options.epochs_for(10, None) == 25
    assert AdapterTraining(epochs=7, min_epochs=1, epoch_growth=0).epochs_for(36, None) == 7


def test_training_equals_a_plain_pytorch_loop():
    """The order of the images, the learning rates and the updates are the same."""
    task, recipe = make_task(), Recipe(0.3, 0.01, batch_size=4, epochs=3, crop_scale=1)

    def new_layer() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(1, 2)

    ours = new_layer()
    losses = train(
        [ParamGroup(ours)], lambda x, y: F.cross_entropy(ours(x), y), task, recipe, make_runtime("cpu", "fp32", 1)
    )

    from onea import seeds

    theirs = new_layer()
    optimiser = torch.optim.SGD(theirs.parameters(), 0.3, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 3)
    order, crops = seeds.generator(1, 0, "order"), seeds.generator(1, 0, "crops")
    expected = []
    for _ in range(3):
        values = []
        rows = torch.randperm(10, generator=order)
        for images, labels in zip(
            task.images.train_batches(rows, 4, 1, crops), task.labels[rows].split(4), strict=True
        ):
            value = F.cross_entropy(theirs(images), labels)
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            values.append(value.item())
        schedule.step()
        expected.append(sum(values) / len(values))
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(ours.weight, theirs.weight)
    assert losses[-1] < losses[0]


def test_training_does_not_touch_the_global_random_state():
    module = nn.Linear(1, 2)
    before = torch.random.get_rng_state()
    train(
        [ParamGroup(module)],
        lambda x, y: F.cross_entropy(F.dropout(module(x)), y),
        make_task(),
        Recipe(0.1, 0, 4, 1, 1),
        make_runtime("cpu", "fp32", 1),
    )
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_infinite_loss_is_reported_with_task_epoch_and_step():
    calls = iter([1.0, 2.0, 3.0, 4.0, float("nan"), 5.0])
    weight = nn.Linear(1, 1)
    with pytest.raises(OneaError, match=r"nan in task 1, epoch 2, step 2; lower the learning rate"):
        train(
            [ParamGroup(weight)],
            lambda x, _: weight(x).sum() * 0 + next(calls),
            make_task(),
            Recipe(0.1, 0, 4, 2, 1),
            make_runtime("cpu", "fp32", 1),
        )


@pytest.mark.parametrize(
    "wrong", [{"rank": 0}, {"epochs": 0}, {"min_epochs": 9, "max_epochs": 3}, {"dropout": 1.0}, {"crop_scale": 0.0}]
)
def test_invalid_training_options_are_refused(wrong):
    with pytest.raises(OneaError, match="must"):
        AdapterTraining(**wrong)
