# SPDX-License-Identifier: Apache-2.0
"""Presets: the default depends only on the size of the dataset and is the same for every method."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import get_args

import pytest
from support.methods import prepared
from support.pages import script

from onea.errors import OneaError
from onea.learner.options import TrainingOptions
from onea.learner.tasks import StreamPlan
from onea.options import make_options
from onea.research.methods import METHODS, method_class
from onea.research.methods.presets import Preset, preset_options
from onea.research.runs.config import RunConfig, make_config
from onea.research.runs.runner import run
from onea.research.runs.setup import method_options, recorded_dataset_size
from onea.schedules import DatasetSize, training_defaults

TRAINED = [name for name in METHODS.names if issubclass(method_class(name).Options, TrainingOptions)]
CIFAR, CUB = DatasetSize(50_000, 100, 10), DatasetSize(5_994, 200, 20)
SHARED = ("batch_size", "epochs", "min_epochs", "max_epochs", "epoch_growth")


@pytest.mark.parametrize("method", METHODS.names)
def test_every_preset_fits_every_method(method: str) -> None:
    method_type = method_class(method)
    for preset in get_args(Preset):
        make_options(method_type.Options, preset_options(method, preset, CIFAR))
    assert (method in TRAINED) == (method_type.base_learning_rate is not None), (
        "every trained method has a tuned learning rate"
    )
    assert (method in TRAINED) == ("learning_rate" in preset_options(method, "auto", CUB))


@pytest.mark.parametrize("method", TRAINED)
def test_all_methods_get_the_same_epochs_and_batches(method: str) -> None:
    for size in (CIFAR, CUB, DatasetSize(36, 6, 3)):
        options = preset_options(method, "auto", size)
        assert {name: options[name] for name in SHARED} == training_defaults(size)
        options_object = make_options(method_class(method).Options, options)
        plan = StreamPlan(size.classes, size.tasks)
        one_a_options = make_options(method_class("one-a").Options, preset_options("one-a", "auto", size))
        assert [options_object.epochs_for(classes, plan) for classes in range(1, 40)] == [
            one_a_options.epochs_for(classes, plan) for classes in range(1, 40)
        ]


@pytest.mark.parametrize("method", TRAINED)
def test_every_task_is_trained_for_the_epochs_of_its_size(method: str, tiny_run) -> None:
    """The number is the same for every method that trains on the task."""
    options = {"rank": 4, "batch_size": 8, "epochs": 2, "epoch_growth": 0.5}
    names = {field.name for field in dataclasses.fields(method_class(method).Options)}
    ready = prepared(tiny_run | {"options": {n: v for n, v in options.items() if n in names}}, method, sizes="4,1,1")
    seen, plan = 0, StreamPlan(6, 3)
    for index, size in enumerate(ready.stream.sizes):
        report, seen = ready.method.learn(ready.task(index)), seen + size
        if report.get("trained") is not False:
            classes = seen if method_class(method).trains_on_all_classes else size
            assert report["epochs"] == ready.method.options.epochs_for(classes, plan)
            assert report["epochs"] == (3 if classes >= 4 else 1), "two for a task of average size"


def test_the_name_of_the_folder_does_not_affect_the_options(tiny_run, tiny_images: Path, tmp_path: Path) -> None:
    options = []
    for name in ("cifar100", "cub200", "holiday"):
        shutil.copytree(tiny_images, tmp_path / name)
        config = make_config(tiny_run | {"data": f"folder:{tmp_path / name}", "method": "ease", "options": {"rank": 4}})
        options.append(run(config, tmp_path / f"{name}-run")["options"])
    assert options[0] == options[1] == options[2]
    assert options[0]["learning_rate"] == method_class("ease").base_learning_rate


def test_training_defaults_are_monotone() -> None:
    sizes = [DatasetSize(10 * images, 10, 2) for images in (1, 2, 5, 10, 20, 30, 50, 100, 250, 500, 1300, 5000)]
    rules = [training_defaults(size) for size in sizes]
    epochs, batches = ([rule[name] for rule in rules] for name in ("epochs", "batch_size"))
    assert epochs == sorted(epochs, reverse=True), "more images per class get fewer epochs"
    assert batches == sorted(batches)
    work = [rule["epochs"] * size.images for rule, size in zip(rules, sizes, strict=True)]
    assert work == sorted(work), "but more images never mean less training"
    assert all(1 <= rule["min_epochs"] <= rule["epochs"] <= rule["max_epochs"] for rule in rules)


def test_given_options_override_the_preset() -> None:
    config = make_config({"method": "ease", "epochs": 2, "learning_rate": 0.5})
    options = method_options(config, CUB)
    assert (options.epochs, options.min_epochs, options.max_epochs) == (2, 1, 3)
    assert (options.learning_rate, options.batch_size) == (0.5, 64)
    bound = method_options(make_config({"method": "ease", "max_epochs": 9}), CUB)
    assert (bound.epochs, bound.max_epochs) == (20, 9)


def test_paper_presets_have_the_published_values() -> None:
    assert preset_options("one-a", "paper/cub200")["learning_rate"] == 0.07
    with pytest.raises(OneaError, match="preset is 'flowers'; choose one of: auto, paper, paper/cifar100"):
        make_config({"preset": "flowers"})
    assert RunConfig.preset == "auto"


def test_the_record_holds_the_size_from_which_the_preset_was_computed(tiny_run, tmp_path: Path) -> None:
    config = make_config(tiny_run | {"method": "acmap", "options": {"rank": 4}, "long_tail": 0.5})
    record = run(config, tmp_path / "r")
    images = sum(task["images"] for task in record["tasks"])
    assert record["data"]["task_images"] == images < record["data"]["train_images"]
    assert dataclasses.asdict(method_options(config, recorded_dataset_size(record))) == record["options"]
    del record["data"]["task_images"]  # an older record
    assert recorded_dataset_size(record).images == record["data"]["train_images"]


# Methods whose best rate was the largest that was tried: a still larger one was not tried, and may be better.
AT_AN_EDGE = {"cl-lora"}
# Methods whose rate has not been tuned yet; it is a guess.
UNTRIED = {"gdumb", "icarl", "loranpac", "lr-rgda", "macil", "moal", "replay", "sldc", "ssiat", "tuna"}


def test_base_learning_rates_are_the_best_of_the_recorded_trials() -> None:
    preset_choice = script("preset_choice", "benchmarks/presets")
    rows = preset_choice.read_rows(preset_choice.TRIALS)
    assert {name for name in TRAINED if not preset_choice.mean_scores(rows, name)} == UNTRIED
    at_an_edge = set()
    for name in sorted({*TRAINED} - UNTRIED):
        scores = preset_choice.mean_scores(rows, name)
        assert len(scores) >= preset_choice.number_of_rates(name), name
        assert preset_choice.choose(scores) == method_class(name).base_learning_rate, name
        if preset_choice.best_index(scores) in (0, len(scores) - 1):
            at_an_edge.add(name)
    assert at_an_edge == AT_AN_EDGE
