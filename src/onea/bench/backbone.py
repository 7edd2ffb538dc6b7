# SPDX-License-Identifier: Apache-2.0
"""A network to time: its own weights where they are at hand, else random ones, which take just as long."""

from __future__ import annotations

from typing import Any

import torch

from onea.errors import OneaError, nearest
from onea.vit.backbones import EMBEDDED, load_backbone
from onea.vit.frozen import FrozenViT

_RANDOM = "random:"


def bench_backbone(name: str) -> FrozenViT:
    """The embedded backbone, a ``.safetensors`` file, timm's ``architecture.tag``, or random weights.

    ``random:ARCHITECTURE``, or just timm's ``ARCHITECTURE`` without a tag, needs no download.
    """
    if name.startswith(_RANDOM):
        return random_backbone(name.removeprefix(_RANDOM))
    if name == EMBEDDED or name.endswith(".safetensors") or "." in name:
        return load_backbone(name)
    return random_backbone(name)


def random_backbone(architecture: str) -> FrozenViT:
    """A timm ViT with fixed random weights."""
    import timm

    known = timm.list_models(["vit_*", "deit*"])
    if architecture not in known:
        raise OneaError(f"Unknown architecture '{architecture}'; {nearest(architecture, [EMBEDDED, *known])}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vit: Any = timm.create_model(architecture, pretrained=False, num_classes=0)
    config = vit.pretrained_cfg
    return FrozenViT(vit, _RANDOM + architecture, "random", tuple(config["mean"]), tuple(config["std"]))
