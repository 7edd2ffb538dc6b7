# SPDX-License-Identifier: Apache-2.0
"""Configurations of LAMDA-PILOT: the same streams, and what becomes of each setting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onea.data.dataset import Dataset, Split
from onea.errors import OneaError
from onea.research.data.sources import load_dataset
from onea.research.record import read_record
from onea.research.runs.config import make_config
from onea.research.runs.pilot import pilot_runs, pilot_sizes
from onea.research.runs.setup import stream_of_run
from onea.research.streams import class_order

# The class order of CIFAR-100 in class-incremental learning, as logged by many toolboxes with the seed 1993.
SEED_1993 = [68, 56, 78, 8, 23, 84, 90, 65, 74, 76, 40, 89, 3, 92, 55, 9, 26, 80, 43, 38, 58, 70, 77, 1, 85, 19, 17, 50]
EASE: dict[str, Any] = {
    "prefix": " ",
    "dataset": "cifar224",
    "memory_size": 0,
    "memory_per_class": 0,
    "fixed_memory": False,
    "shuffle": True,
    "init_cls": 5,
    "increment": 5,
    "model_name": "ease",
    "backbone_type": "vit_base_patch16_224_in21k_ease",
    "seed": [1993],
    "init_epochs": 20,
    "init_lr": 0.025,
    "later_epochs": 10,
    "later_lr": 0.025,
    "batch_size": 48,
    "ffn_num": 64,
    "alpha": 0.1,
    "use_diagonal": False,
}


def pixels(classes: int) -> Dataset:
    split = Split(np.arange(classes), pixels=np.zeros((classes, 3, 2, 2), np.uint8))
    return Dataset("pixels", tuple(f"c{index}" for index in range(classes)), split, split, "")


def files(classes: int) -> Dataset:
    """A folder in which natural order, c2 before c10, differs from alphabetical order."""
    dataset = pixels(classes)
    split = Split(np.arange(classes), files=tuple(Path(f"{name}/1.png") for name in dataset.classes))
    return replace(dataset, train=split, test=split)


def order_of(dataset: Dataset, seed: int, **changes: Any) -> list[str]:
    runs = pilot_runs(EASE | changes, {})
    config = make_config(runs.options | {"seed": seed} | runs.stream_options(dataset, seed))
    return [dataset.classes[index] for index in stream_of_run(config, dataset).class_order]


def test_the_class_order_is_that_of_numpy_without_its_global_state():
    before = np.random.get_state()[1].tolist()
    assert order_of(pixels(100), 1993)[:28] == [f"c{index}" for index in SEED_1993]
    assert np.random.get_state()[1].tolist() == before
    for seed in (0, 1, 1993):
        np.random.seed(seed)
        assert order_of(pixels(30), seed) == [f"c{index}" for index in np.random.permutation(30)]


@pytest.mark.parametrize("dataset", [pixels(12), files(12)])
def test_classes_are_shuffled_only_if_it_says_so(dataset):
    ordered = list(dataset.classes) if dataset.train.pixels is not None else sorted(dataset.classes)
    assert order_of(dataset, 3, shuffle=False) == ordered
    assert order_of(dataset, 3) == [ordered[index] for index in np.random.RandomState(3).permutation(12)]


@pytest.mark.parametrize(
    ("classes", "init_cls", "increment", "sizes"),
    [
        (100, 5, 5, (5,) * 20),
        (100, 50, 10, (50, 10, 10, 10, 10, 10)),
        (100, 0, 30, (30, 30, 30, 10)),
        (10, 10, 5, (10,)),
        (10, 4, 100, (4, 6)),
    ],
)
def test_the_last_task_has_the_rest(classes, init_cls, increment, sizes):
    assert pilot_sizes(classes, init_cls, increment) == sizes


def test_the_run_is_that_of_the_same_options():
    runs = pilot_runs(EASE, {})
    config = make_config(runs.options | {"seed": 1993} | runs.stream_options(pixels(20), 1993))
    assert config == make_config(
        {
            "method": "ease",
            "data": "cifar100",
            "backbone": "vit_base_patch16_224.augreg_in21k",
            "protocol": "pilot",
            "preset": "paper/cifar100",
            "stream": "sizes",
            "sizes": "5,5,5,5",
            "seed": 1993,
            "options": {"epochs": 10, "learning_rate": 0.025, "batch_size": 48, "rank": 64, "alpha": 0.1},
        }
    )
    assert runs.ignored == (
        "'prefix' (\" \") has no equivalent for ease and was ignored.",
        "'init_epochs' (20) has no equivalent for ease and was ignored.",
        "'use_diagonal' (false) has no equivalent for ease and was ignored.",
    )


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"model_name": "simplecil", "backbone_type": "pretrained_vit_b16_224"}, {"method": "simplecil"}),
        ({"model_name": "aper_adapter"}, {"method": "aper-adapter", "rank": 64}),
        ({"model_name": "adam_ssf"}, {"method": "aper-ssf"}),
        ({"model_name": "aper_vpt", "vpt_type": "Shallow", "prompt_token_num": 3}, {"method": "aper-vpt-shallow"}),
        (
            {"model_name": "ranpac", "M": 2000, "backbone_type": "pretrained_vit_b16_224_adapter"},
            {"method": "ranpac-first", "random_features": 2000},
        ),
        ({"model_name": "ranpac", "backbone_type": "pretrained_vit_b16_224"}, {"method": "ranpac"}),
        ({"model_name": "dual_prompt", "length": 7, "g_prompt_length": 4}, {"e_length": 7, "g_length": 4}),
        ({"model_name": "l2p", "size": 9, "length": 7, "top_k": 3}, {"pool": 9, "prompt_length": 7, "top_k": 3}),
        ({"model_name": "coda_prompt", "prompt_param": [50, 8.0, 0.1]}, {"components": 50, "orthogonality": 0.1}),
        ({"model_name": "mos", "reg": 0.2, "crct_epochs": 3}, {"regulariser": 0.2, "alignment_epochs": 3}),
        ({"model_name": "icarl", "fixed_memory": True, "memory_per_class": 20}, {"method": "icarl", "memory": 20}),
        ({"dataset": "imagenetr"}, {"data": "imagenet-r", "preset": "paper/imagenet-r"}),
        ({"dataset": "CUB"}, {"data": "cub200"}),
        ({"backbone_type": "pretrained_vit_b16_224"}, {"backbone": "vit_base_patch16_224.augreg_in21k_ft_in1k"}),
    ],
)
def test_settings_with_an_equivalent(settings, options):
    runs = pilot_runs(EASE | settings, {})
    assert options.items() <= runs.options.items()
    make_config(runs.options)


def test_every_mapped_method_accepts_its_options():
    for name in ("ease", "mos", "l2p", "dualprompt", "coda_prompt", "aper_finetune", "aper_ssf", "tuna", "icarl"):
        make_config(pilot_runs(EASE | {"model_name": name}, {}).options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_name": "foster"}, "PILOT's method 'foster' does not exist here"),
        ({"model_name": "ranpac", "backbone_type": "pretrained_vit_b16_224_ssf"}, "method 'ranpac' does not exist"),
        ({"dataset": "vtab"}, "PILOT's dataset 'vtab' does not exist here; give its images by --data"),
        ({"backbone_type": "resnet32"}, "PILOT's backbone 'resnet32' does not exist here"),
        ({"increment": 0}, "'increment' is missing or wrong"),
        ({"seed": []}, "has no seed"),
        ({"seed": "1993"}, "'seed' is missing or wrong"),
        ({"shuffle": "yes"}, "'shuffle' is missing or wrong"),
        ({"model_name": 3}, "'model_name' is missing or wrong"),
    ],
)
def test_what_does_not_exist_here_is_refused(settings, message):
    with pytest.raises(OneaError, match=message):
        pilot_runs(EASE | settings, {})


def test_a_first_task_that_is_too_large_is_refused():
    with pytest.raises(OneaError, match="The first task has 50 classes but there are 20"):
        pilot_runs(EASE | {"init_cls": 50}, {}).stream_options(pixels(20), 1)


def test_another_method_has_the_stream_but_not_the_hyper_parameters():
    runs = pilot_runs(EASE | {"model_name": "foster"}, {"method": "one-a", "sizes": "3,3"})
    assert runs.options.keys() == {"method", "data", "backbone", "preset", "protocol"}
    assert "'batch_size' (48) is a setting of another method and was ignored." in runs.ignored
    assert "other options set the stream" in runs.ignored[-1]
    assert runs.stream_options(pixels(6), 1) == {}


def test_the_command_makes_one_run_for_each_seed(onea, tiny_run):
    config = EASE | {"model_name": "simplecil", "init_cls": 2, "increment": 3, "seed": [3, 4]}
    Path("pilot.json").write_text(json.dumps(config, indent="\t"))
    words = ["run", "--config", "pilot.json"]
    words += [f"--{name}={tiny_run[name]}" for name in ("data", "backbone", "precision", "threads")]
    code, _, err = onea(*words, "--out", "one")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "has 2 seeds; choose one by --seed" in err
    code, _, err = onea(*words)
    assert code == 0, err
    assert "'batch_size' (48) has no equivalent for simplecil and was ignored." in err
    records = [read_record(folder) for folder in sorted(Path("runs").iterdir())]
    dataset = load_dataset(tiny_run["data"])
    for record in records:
        assert record is not None
        assert record["stream"]["sizes"] == [2, 3, 1]
        order = class_order(6, record["config"]["seed"])
        assert record["data"]["classes"] == [dataset.classes[index] for index in order]
    assert {record["config"]["seed"] for record in records if record} == {3, 4}
    assert onea(*words, "--seed", "4", "--out", "one")[0] == 0


def test_other_json_files_are_options(onea, tiny_run):
    Path("run.json").write_text(json.dumps({"method": "simplecil", "kapa": 3}))
    code, _, err = onea("run", "--config", "run.json")
    assert code == 2
    assert "Unknown option 'kapa'" in err
    Path("run.json").write_text("{")
    assert "cannot be read (not JSON)" in onea("run", "--config", "run.json")[2]
