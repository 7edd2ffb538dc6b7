# SPDX-License-Identifier: Apache-2.0
"""Hyper-parameters by name.

The preset ``auto`` is computed from the number of images, classes and tasks. ``paper/NAME`` has the values that the
authors of a method published for one of their datasets, ``paper`` those for any other. The name of the dataset of a run
never chooses a preset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from onea.research.methods import METHODS
from onea.schedules import DatasetSize, training_defaults

if TYPE_CHECKING:  # only the type: configurations list the names of presets without loading a network
    from onea.research.methods.contract import Method

Preset = Literal["auto", "paper", "paper/cifar100", "paper/cub200", "paper/imagenet-a", "paper/imagenet-r"]

# Shared by all methods in the preset auto.
_AUTO = {"crop_scale": 0.3, "head": "cosine", "head_scale": 16.0, "rank": 64, "weight_decay": 5e-4}


def published(
    epochs: int, learning_rate: float, batch_size: int, weight_decay: float = 5e-4, **others: Any
) -> dict[str, Any]:
    """Options that the authors of a method published."""
    recipe = {"epochs": epochs, "learning_rate": learning_rate, "batch_size": batch_size, "weight_decay": weight_decay}
    return recipe | others


def preset_options(
    method: str, preset: str, shape: DatasetSize | None = None, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Options of a preset for a method.

    Args:
        method: name of the method.
        preset: one of ``Preset``. A method without values for the dataset of the preset has those for any other.
        shape: images, classes and tasks of the run; required by ``auto``.
        overrides: options that the user has set. Only their ``epochs`` are used: ``auto`` derives its bounds from them.
    """
    kind: type[Method] = METHODS.load(method)
    if preset == "auto":
        if shape is None:
            raise ValueError("the preset auto needs the shape of the data")
        rule = training_defaults(shape, epochs=int((overrides or {}).get("epochs") or 0) or None)
        rate = {} if kind.base_learning_rate is None else {"learning_rate": kind.base_learning_rate}
        values: Mapping[str, Any] = {**_AUTO, **kind.auto_preset, **rule, **rate}
    else:
        dataset = preset.partition("/")[2]
        values = kind.paper_presets.get(dataset, kind.paper_presets.get("", {}))
    names = {field.name for field in dataclasses.fields(kind.Options)}
    return {name: value for name, value in values.items() if name in names}
