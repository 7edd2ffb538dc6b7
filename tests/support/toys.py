# SPDX-License-Identifier: Apache-2.0
"""timm's architectures with a few blocks and channels, and with weights that do not hide errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
import torch

from onea.vit.backbones import save_backbone
from onea.vit.frozen import FrozenViT, freeze
from onea.vit.network_config import NetworkConfig

_SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3}

# Common architectures by family: rotary positions, registers, gates, pooling and norms of all kinds.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "DINOv3": ("vit_small_patch16_dinov3", {}),
    "PE": ("vit_pe_core_tiny_patch16_384", {"attn_pool_num_heads": 3}),
    "EVA-02": ("eva02_tiny_patch14_224", {}),
    "SigLIP": ("vit_base_patch16_siglip_224", {}),
    "CLIP": ("vit_base_patch16_clip_quickgelu_224", {}),
    "DINOv2": ("vit_small_patch14_reg4_dinov2", {}),
}


def toy_config(architecture: str, **changes: Any) -> NetworkConfig:
    """The arguments of a toy architecture; its images have four by four or two by two patches."""
    known = timm.get_pretrained_cfg(architecture)
    size = 56 if "patch14" in architecture else 64
    args = {**_SMALL, **changes}
    expected = {"mean": known.mean, "std": known.std, "input_size": (3, size, size), "license": known.license}
    return NetworkConfig.from_json({"architecture": architecture, "model_args": args, "pretrained_cfg": expected})


def toy(name: str) -> FrozenViT:
    """A toy of a common family, with random weights."""
    architecture, changes = SHAPES[name]
    config = toy_config(architecture, **changes)
    network = timm.create_model(architecture, **config.build_args())
    return freeze(randomised(network), name, "", config)


def write_toy(name: str, folder: Path) -> Path:
    """The file of such a toy."""
    path = folder / f"{name}.safetensors"
    save_backbone(toy(name), path)
    return path


def randomised(network: Any) -> Any:
    """Random weights from a fixed seed, instead of the initial zeros and ones."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            scale = 0.2 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise + (1 if "norm" in name and name.endswith("weight") else 0))
            if "gamma" in name:
                parameter.add_(0.5)
    return network.eval()


def images_for(vit: FrozenViT, count: int = 3) -> torch.Tensor:
    """Random inputs of a network."""
    return torch.randn(count, 3, vit.size, vit.size, generator=torch.Generator().manual_seed(5))
