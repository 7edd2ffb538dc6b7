# SPDX-License-Identifier: Apache-2.0
"""Named hyper-parameters: ``paper``, as each method's authors publish them, and ``small``, ours for small backbones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from onea.data.names import data_name
from onea.methods import METHODS
from onea.methods.contract import Method

_PAPER_WIDTH = 768  # ViT-B, the backbone of the papers

# What all methods share in the small preset, by dataset; "" is for any other, with few images and small steps.
_SHARED: dict[str, dict[str, Any]] = {
    "cifar100": {"batch_size": 128, "epochs": 5, "min_epochs": 3, "max_epochs": 8},
    "cub200": {"batch_size": 64, "epochs": 15, "min_epochs": 8, "max_epochs": 25},
    "": {"batch_size": 32, "epochs": 15, "min_epochs": 8, "max_epochs": 25},
}
_EVERYWHERE = {"crop_scale": 0.3, "head": "cosine", "head_scale": 16.0, "rank": 64, "weight_decay": 5e-4}


def choose_preset(preset: str, width: int) -> str:
    """The preset that ``auto`` means for a backbone of this width."""
    if preset != "auto":
        return preset
    return "paper" if width >= _PAPER_WIDTH else "small"


def preset_options(method: str, preset: str, data: str) -> dict[str, Any]:
    """Options of a preset for a dataset, as ``--data`` names it; a folder counts by its own name."""
    dataset = data_name(data)
    kind: type[Method] = METHODS.load(method)

    def of(table: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        return table.get(dataset, table.get("", {}))

    chosen = of(kind.published) if preset == "paper" else {**_EVERYWHERE, **of(_SHARED), **of(kind.small)}
    known = {field.name for field in dataclasses.fields(kind.Options)}
    return {name: value for name, value in chosen.items() if name in known}
