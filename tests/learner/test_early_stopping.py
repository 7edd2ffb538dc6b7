# SPDX-License-Identifier: Apache-2.0
"""Early stopping of the training by the accuracy on held-out images."""

from __future__ import annotations

import pytest
import torch
from support.methods import learn_all, prepared
from support.models import tiny_model

from onea.learner import local_head


def prepare_run(values: dict, **options):
    bounds = {"epochs": 6, "min_epochs": 6, "max_epochs": 6, "guard": 0.3}
    return prepared(values, "one-a-plus", options=values["options"] | bounds | options)


@pytest.fixture
def accuracies(monkeypatch):
    """Accuracies that replace the measured ones, one after the other."""
    remaining: list[float] = []
    monkeypatch.setattr("onea.learner.adapter_training.local_accuracy", lambda *_: remaining.pop(0))
    return remaining


@pytest.mark.parametrize("options", [{}, {"adapter_blocks": 1}])
def test_training_stops_after_patience_epochs_without_improvement(tiny_run, accuracies, options):
    accuracies += [0.2, 0.4, 0.4, 0.3, 0.9]
    ready = prepare_run(tiny_run, patience=2, **options)
    report = ready.method.learn(ready.task(0))
    assert report["epochs"] == len(report["losses"]) == 4
    assert accuracies == [0.9]
    assert not ready.method.adapter.training


def test_training_with_improvements_does_not_stop(tiny_run, accuracies):
    accuracies += [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    ready = prepare_run(tiny_run, patience=1)
    assert ready.method.learn(ready.task(0))["epochs"] == 6
    assert not accuracies


@pytest.mark.parametrize("options", [{}, {"patience": 1, "guard": 0.0}])
def test_accuracy_is_not_measured_by_default_or_without_held_out_images(tiny_run, accuracies, options):
    ready = prepare_run(tiny_run, **options)
    assert ready.method.learn(ready.task(0))["epochs"] == 6


@pytest.mark.parametrize("options", [{}, {"adapter_blocks": 1}])
def test_measuring_the_accuracy_does_not_change_the_training(tiny_run, options):
    plain, watched = (learn_all(prepare_run(tiny_run, patience=patience, **options)) for patience in (0, 6))
    assert all(torch.equal(value, watched.state_dict()[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"adapter_blocks": 1, "cached_views": 2}])
def test_the_accuracy_is_that_of_the_head_on_whole_images(tiny_run, monkeypatch, options):
    found, original = [], local_head.local_accuracy

    def measure(network, adapters, head, held_out, inputs, runtime):
        found.append(original(network, adapters, head, held_out, inputs, runtime))
        assert adapters.training, "still in training mode"
        with torch.no_grad():
            adapters.eval()
            answers = head(ready.method.vit(held_out.images.test_views(held_out.rows), adapters)).argmax(1)
            adapters.train()
        expected = (answers == held_out.labels - held_out.classes.start).double().mean()
        assert found[-1] == pytest.approx(float(expected), abs=1.01 / len(held_out))  # a tie may be rounded either way
        return found[-1]

    monkeypatch.setattr("onea.learner.adapter_training.local_accuracy", measure)
    ready = prepare_run(tiny_run, patience=6, **options)
    ready.method.learn(ready.task(0))
    assert len(found) == 6


def test_early_stopping_of_models(tiny_vit, tiny_images, accuracies):
    accuracies += [0.5, 0.5, 0.9]
    bounds = {"min_epochs": 4, "max_epochs": 4, "patience": 1}
    model = tiny_model(tiny_vit, epochs=4, options=bounds, held_out=0.3).learn(tiny_images / "train")
    assert model.history[-1]["epochs"] == 2
