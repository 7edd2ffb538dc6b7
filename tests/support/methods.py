# SPDX-License-Identifier: Apache-2.0
"""Methods prepared for the tiny stream, and helpers to train them and count their passes."""

from __future__ import annotations

import dataclasses

import torch

from onea.learner.merged_adapter import AdapterCache
from onea.research.methods import method_class
from onea.research.methods.adapter_merging import AdapterMerging
from onea.research.runs.config import make_config
from onea.research.runs.setup import prepare
from onea.runtime import make_runtime

# Small values for options that only some methods have, so that every method learns the tiny stream in a second.
QUICK = {"alignment_epochs": 2, "descriptor_epochs": 2, "components": 12, "pool": 6, "random_features": 64}
QUICK |= {"map_epochs": 3}
QUICK_METHODS = {"sldc": {"classifier_options": "samples=64"}}


def prepared(values: dict, method: str = "one-a", adapter_cache: AdapterCache | None = None, **changes):
    """A prepared run. Its tasks train for the same number of epochs, unless adapters are merged or options differ."""
    values, kind = values | {"method": method} | changes, method_class(method)
    known = {field.name for field in dataclasses.fields(kind.Options)}
    same_epochs = {} if issubclass(kind, AdapterMerging) else {"epoch_growth": 0.0}
    quick = {
        name: value
        for name, value in (QUICK | QUICK_METHODS.get(method, {}) | same_epochs | values["options"]).items()
        if name in known
    }
    config = make_config(values | {"options": quick})
    return prepare(config, make_runtime("cpu", config.precision, 1), adapter_cache)


def learn_all(ready, tasks=None):
    for index in tasks if tasks is not None else range(ready.stream.tasks):
        ready.method.learn(ready.task(index))
    return ready.method


def shown_images(ready):
    return ready.test.images.test_views(torch.arange(len(ready.test.labels)))


def passes(method, images: torch.Tensor) -> float:
    passed = 0

    def count(_, inputs):
        nonlocal passed
        passed += len(inputs[0])

    handle = method.vit.vit.blocks[0].attn.qkv.register_forward_pre_hook(count)
    method.scores(images)
    handle.remove()
    return passed / len(images)
