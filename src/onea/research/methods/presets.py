# SPDX-License-Identifier: Apache-2.0
"""Hyper-parameters by name.

The preset ``auto`` is computed from the number of images, classes and tasks. ``paper/NAME`` has the values that the
authors of a method published for one of their datasets, ``paper`` those for any other dataset. The name of a run's
dataset never selects a preset.
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
    method: str, preset: str, size: DatasetSize | None = None, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Options of a preset for a method.

    Args:
        method: name of the method.
        preset: one of ``Preset``. A method without published values for the dataset uses those for any other dataset.
        size: images, classes and tasks of the run; required by ``auto``.
        overrides: options that the user has set. Only their ``epochs`` are used: ``auto`` derives its bounds from them.
    """
    method_type: type[Method] = METHODS.load(method)
    if preset == "auto":
        if size is None:
            raise ValueError("the preset auto requires the size of the dataset")
        rule = training_defaults(size, epochs=int((overrides or {}).get("epochs") or 0) or None)
        rate = {} if method_type.base_learning_rate is None else {"learning_rate": method_type.base_learning_rate}
        values: Mapping[str, Any] = {**_AUTO, **method_type.auto_preset, **rule, **rate}
    else:
        dataset = preset.partition("/")[2]
        values = method_type.paper_presets.get(dataset, method_type.paper_presets.get("", {}))
    names = {field.name for field in dataclasses.fields(method_type.Options)}
    return {name: value for name, value in values.items() if name in names}
