# SPDX-License-Identifier: Apache-2.0
"""Trials of learning rates on held-out images of the first task."""

from __future__ import annotations

import dataclasses

import pytest

from onea.errors import OneaError
from onea.research.methods import method_class
from onea.research.runs.config import make_config
from onea.research.runs.rate_trial import LearningRateTrial, try_rates
from onea.runtime import make_runtime


def trial(values: dict, method: str, **changes) -> LearningRateTrial:
    names = {field.name for field in dataclasses.fields(method_class(method).Options)}
    quick_options = {"rank": 4, "batch_size": 8, "epochs": 4}
    options = {name: value for name, value in quick_options.items() if name in names} | changes.pop("options", {})
    config = make_config(values | {"method": method, "options": options} | changes)
    return try_rates(config, make_runtime("cpu", "fp32", 1))


@pytest.mark.parametrize("method", ["one-a", "ease", "mos", "l2p", "sequential"])
def test_rates_around_the_default_are_tried(method, tiny_run):
    result = trial(tiny_run, method, sizes="5,1", options={"learning_rate": 0.1})
    assert {0.3, 0.1, 0.03, 0.01} <= set(result.accuracy)
    assert result.best in result.accuracy
    assert result.accuracy[result.best] == max(result.accuracy.values())
    assert (len(result.accuracy) > 4) <= (max(list(result.accuracy.values())[:4]) < result.frozen_accuracy)


def test_a_diverging_learning_rate_is_not_chosen(tiny_run):
    result = trial(tiny_run, "ease", sizes="6", options={"learning_rate": 100.0})
    assert result.best < 100.0
    assert result == trial(tiny_run, "ease", sizes="6", options={"learning_rate": 100.0}), (
        "equal trials have equal results"
    )


def test_error_messages_for_runs_without_learning_rates_to_try(tiny_run):
    with pytest.raises(OneaError, match="trains nothing"):
        trial(tiny_run, "simplecil")
    with pytest.raises(OneaError, match="first task has one class"):
        trial(tiny_run, "ease", sizes="1,5")


def test_the_command_prints_the_rates_without_starting_a_run(onea, tiny_run, tmp_path):
    inputs = [f"--{name}={tiny_run[name]}" for name in ("data", "backbone", "precision", "threads", "device")]
    code, out, _ = onea("run", "ease", *inputs, "--sizes=5,1", "--try-rates", "--epochs=2", "--rank=4")
    assert code == 0
    assert "--learning-rate" in out.splitlines()[-1] or "--learning-rate" in out.splitlines()[-2]
    assert not (tmp_path / "runs").exists()


def test_of_equal_rates_the_default_is_chosen():
    assert LearningRateTrial({0.3: 80.0, 0.1: 80.0, 0.03: 80.0}, 70.0, default=0.1).best == 0.1
    assert LearningRateTrial({0.3: 80.0, 0.1: 79.0, 0.03: 80.0}, 70.0, default=0.1).best == 0.3
    assert LearningRateTrial({0.3: 10.0, 0.1: 20.0, 0.03: 60.0}, 70.0, default=0.1).best == 0.03
