# SPDX-License-Identifier: Apache-2.0
"""One-A+: number of epochs, drift compensation of the statistics, and the guard against harmful adapters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import write_tiny_images

from onea.errors import OneaError
from onea.learner.held_out import held_out_mask
from onea.learner.one_a import OneAPlusOptions
from onea.merging import make_operator
from onea.research.record import read_record
from onea.research.runs.config import make_config
from onea.research.runs.runner import run
from onea.research.runs.setup import prepare
from onea.runtime import make_runtime


def prepared(values: dict, **options):
    config = make_config(values | {"method": "one-a-plus", "options": values["options"] | options})
    return prepare(config, make_runtime("cpu", "fp32", 1))


@pytest.mark.parametrize(("images_per_class", "epochs"), [(2, 20), (30, 20), (100, 15), (500, 10), (5000, 10)])
def test_epochs_depend_on_the_images_per_class(images_per_class, epochs):
    chosen = OneAPlusOptions().training_options(10, 10 * images_per_class)
    assert (chosen.epochs, chosen.min_epochs, chosen.max_epochs) == (epochs, round(epochs / 2), round(epochs * 1.5))


@given(classes=st.integers(1, 500), images=st.integers(1, 10**6))
def test_given_options_are_kept(classes, images):
    given_options = {"epochs": 7, "min_epochs": 2, "max_epochs": 9, "batch_size": 5, "rank": 3}
    actual = OneAPlusOptions(**given_options).training_options(classes, images)
    assert {name: getattr(actual, name) for name in given_options} == given_options
    assert OneAPlusOptions().training_options(classes, images).batch_size == (64 if images < 2500 else 128)
    only_epochs = OneAPlusOptions(epochs=4).training_options(classes, images)
    assert (only_epochs.epochs, only_epochs.min_epochs, only_epochs.max_epochs) == (4, 2, 6)


@pytest.mark.parametrize("merge", ["one-a", "ties", "newest"])
def test_other_operators_have_their_default_options(merge):
    assert OneAPlusOptions(merge=merge).operator() == make_operator(merge)
    assert OneAPlusOptions().operator() == make_operator("weighted-mean", boost=2.0)


def test_statistics_change_only_with_the_adapter(tiny_run):
    ready = prepared(tiny_run | {"sizes": "3,1,2"}, learning_rate=0.5, guard=0.0)
    outcomes = []
    for index in range(3):
        before = ready.method.prototypes.clone()
        report = ready.method.learn(ready.task(index))
        same = torch.equal(ready.method.prototypes[: len(before)], before)
        outcomes.append((report["trained"], not same))
    assert outcomes == [(True, False), (False, False), (True, True)]


def test_a_harmful_adapter_is_not_merged(tiny_run, tmp_path):
    """With a learning rate that destroys the features, the previous adapter is kept and still predicts."""
    write_tiny_images(tmp_path, classes=6, train=30, test=2)
    values = tiny_run | {"sizes": "6", "data": f"folder:{tmp_path}"}
    ready = prepared(values, learning_rate=50.0, guard=0.5, weight_decay=0.0)
    before = {name: value.clone() for name, value in ready.method.adapter.state_dict().items()}
    report = ready.method.learn(ready.task(0))
    assert not report["trained"]
    assert report["guard"]["after"] < report["guard"]["before"]
    after = ready.method.adapter.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (ready.method.merged.classes, ready.method.num_classes) == (0, 6)


def test_the_guard_holds_out_the_same_share_of_every_class(tiny_run):
    ready = prepared(tiny_run | {"sizes": "6"}, guard=0.25)
    task = ready.task(0)
    held_out = held_out_mask(task, 0.25)
    assert task.labels[held_out].bincount().tolist() == [round(0.25 * n) for n in task.labels.bincount().tolist()]
    report = ready.method.learn(task)
    assert report["guard"]["images"] == held_out.sum()


@pytest.mark.parametrize(
    ("images", "share", "at_least", "at_most"), [(5, 0.1, 1, 3), (4, 0.9, 1, 12), (60, 0.9, 190, 210)]
)
def test_the_guard_leaves_two_images_of_each_class(tiny_run, tmp_path, images, share, at_least, at_most):
    write_tiny_images(tmp_path, classes=6, train=images, test=1)
    ready = prepared(tiny_run | {"sizes": "6", "data": f"folder:{tmp_path}"}, guard=share)
    task = ready.task(0)
    held_out = held_out_mask(task, share)
    assert at_least <= held_out.sum() <= at_most
    assert task.labels[~held_out].bincount().min() >= 2


def test_given_epoch_bounds_are_kept():
    assert OneAPlusOptions(min_epochs=25).training_options(1, 500).max_epochs == 25
    assert OneAPlusOptions(max_epochs=4).training_options(1, 500).min_epochs == 4


def test_a_compared_classifier_equals_a_run_with_it(tiny_run, tmp_path):
    values = tiny_run | {"method": "one-a-plus"}
    options = tiny_run["options"] | {"compare_classifiers": "slda,whitened", "guard": 0.0}
    record = run(make_config(values | {"options": options}), tmp_path / "all")
    assert sorted(record["classifiers"]) == ["slda", "whitened"]
    slda_options = tiny_run["options"] | {"classifier": "slda", "guard": 0.0}
    assert (
        run(make_config(values | {"options": slda_options}), tmp_path / "slda")["correct"]
        == record["classifiers"]["slda"]
    )


def test_results_do_not_depend_on_the_name_of_the_folder(tiny_run, tiny_images, tmp_path):
    records = []
    for name in ("cifar100", "holiday"):
        (tmp_path / name).symlink_to(tiny_images)
        values = tiny_run | {"method": "one-a-plus", "data": f"folder:{tmp_path / name}", "options": {"rank": 4}}
        run(make_config(values), tmp_path / f"run-{name}")
        records.append(read_record(tmp_path / f"run-{name}"))
    first, second = records
    assert first["correct"] == second["correct"]
    assert first["options"] == second["options"]
    assert [task["losses"] for task in first["tasks"] if task["trained"]] == [
        task["losses"] for task in second["tasks"] if task["trained"]
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classifier": "lda"}, "Unknown classifier 'lda'"),
        ({"classifier_options": "directions"}, "classifier_options has 'directions'"),
        ({"compare_classifiers": "slda,nothing"}, "Unknown classifier 'nothing'"),
        ({"guard": 1.0}, "guard is 1.0"),
        ({"min_epochs": 9, "max_epochs": 3, "epochs": 5}, "min_epochs is 9"),
    ],
)
def test_invalid_options_are_refused_before_training(tiny_run, options, message):
    with pytest.raises(OneaError, match=message):
        prepared(tiny_run, **options)
