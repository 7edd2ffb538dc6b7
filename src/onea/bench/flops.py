# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of the network, counted while it runs."""

from __future__ import annotations

import torch

from onea.methods.local_head import new_adapters
from onea.methods.one_a import OneAMethod
from onea.runs.cost import count_flops

_IMAGES = 2


def inference_flops(method: OneAMethod) -> float:
    """Operations per image of one pass with the adapter."""
    images = _images(method)
    return count_flops(lambda: method.features(images, method.kept)) / _IMAGES


def training_flops(method: OneAMethod) -> float:
    """Operations per image of one pass with the adapter and back to the adapter's gradients."""
    images = _images(method)
    adapters = new_adapters(method.vit, method.options, torch.Generator()).to(images.device)

    def step() -> None:
        with method.runtime.autocast():
            loss = method.vit(images, adapters).sum()
        loss.backward()

    return count_flops(step) / _IMAGES


def _images(method: OneAMethod) -> torch.Tensor:
    return torch.zeros(_IMAGES, 3, method.vit.size, method.vit.size, device=method.runtime.device)
