# SPDX-License-Identifier: Apache-2.0
"""Hyper-parameters by name: ``auto``, a rule that looks at the data, and values that somebody must ask for.

``paper`` and ``paper/NAME`` are what each method's authors publish, for any dataset and for one of theirs; ``small``
and ``small/NAME`` are rates that were tuned for one dataset each, with a ViT-S. The name of a dataset never chooses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from onea.learner.data_rule import DataShape, data_rule
from onea.research.methods import METHODS

if TYPE_CHECKING:  # only the type: configurations know the names of presets without loading a network
    from onea.research.methods.contract import Method

Preset = Literal[
    "auto",
    "paper",
    "paper/cifar100",
    "paper/cub200",
    "paper/imagenet-a",
    "paper/imagenet-r",
    "small",
    "small/cifar100",
    "small/cub200",
]

# What all methods share in the small presets, by dataset; "" is for any other, with few images and small steps.
_SMALL: dict[str, dict[str, Any]] = {
    "cifar100": {"batch_size": 128, "epochs": 5, "min_epochs": 3, "max_epochs": 8},
    "cub200": {"batch_size": 64, "epochs": 15, "min_epochs": 8, "max_epochs": 25},
    "": {"batch_size": 32, "epochs": 15, "min_epochs": 8, "max_epochs": 25},
}
_EVERYWHERE = {"crop_scale": 0.3, "head": "cosine", "head_scale": 16.0, "rank": 64, "weight_decay": 5e-4}


def preset_options(
    method: str, preset: str, shape: DataShape | None = None, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Options of a preset for a method.

    Args:
        method: its name.
        preset: one of ``Preset``. A method without values for the dataset that it names has those for any other.
        shape: the numbers that ``auto`` looks at; the others need none.
        given: options that somebody has chosen; only their epochs count here, as bounds follow them.
    """
    kind: type[Method] = METHODS.load(method)
    if preset == "auto":
        if shape is None:
            raise ValueError("the preset auto looks at the data, so it needs its shape")
        rule = data_rule(shape, epochs=int((given or {}).get("epochs") or 0) or None)
        rate = {} if kind.base_rate is None else {"learning_rate": kind.base_rate}
        chosen: Mapping[str, Any] = {**_EVERYWHERE, **kind.small.get("", {}), **rule, **rate}
    else:
        family, _, dataset = preset.partition("/")
        of_method, of_all = (
            _named(kind.published if family == "paper" else kind.small, dataset),
            _named(_SMALL, dataset),
        )
        chosen = of_method if family == "paper" else {**_EVERYWHERE, **of_all, **of_method}
    known = {field.name for field in dataclasses.fields(kind.Options)}
    return {name: value for name, value in chosen.items() if name in known}


def _named(table: Mapping[str, Mapping[str, Any]], dataset: str) -> Mapping[str, Any]:
    return table.get(dataset, table.get("", {}))
