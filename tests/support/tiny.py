# SPDX-License-Identifier: Apache-2.0
"""Tiny fixtures: a two-block ViT on disk, images that it can distinguish, an interrupted run; slow tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from onea.runtime import Progress
from onea.vit.network_config import NetworkConfig
from onea.vit.weight_files import METADATA

# In the locale of some machines, no file, variable or argument can contain such a character.
needs_unicode = pytest.mark.skipif(sys.getfilesystemencoding().lower() != "utf-8", reason="the locale is not UTF-8")


def but_slow(names: Iterable[str], slow: Container[str]) -> list[Any]:
    """Test parameters, some of them only with --slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


def write_tiny_vit(path: Path, width: int = 64, depth: int = 2, patch: int = 14, size: int = 28) -> None:
    """A random ViT with timm's parameter names; its weights come from a formula, so that golden numbers are stable."""
    from timm.models.vision_transformer import VisionTransformer

    vit = VisionTransformer(
        img_size=size, patch_size=patch, embed_dim=width, depth=depth, num_heads=width // 64, num_classes=0
    )
    generator = np.random.default_rng(7)
    tensors = {}
    for name, value in vit.state_dict().items():
        scale = 0.02 if value.dim() == 1 else 1 / np.sqrt(value[0].numel())
        noise = torch.from_numpy(generator.standard_normal(tuple(value.shape)) * scale).float()
        tensors[name] = 1 + noise if "norm" in name and name.endswith("weight") else noise
    save_plain(tensors, path)


def save_plain(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A file whose metadata declare a plain ViT: heads of width 64, GELU, ImageNet's statistics."""
    save_file(tensors, path, {METADATA: json.dumps(NetworkConfig().to_json())})


def write_tiny_images(root: Path, classes: int = 6, train: int = 6, test: int = 3, size: int = 32) -> None:
    """Coloured stripes: the class determines colour and direction, the rest is noise."""
    generator = np.random.default_rng(11)
    for label in range(classes):
        colour = generator.uniform(40, 215, 3)
        wave = np.sin(np.arange(size) * (0.2 + 0.15 * label))
        stripes = wave[:, None] if label % 2 else wave[None, :]
        for side, count in (("train", train), ("test", test)):
            folder = root / side / f"class{label:02d}"
            folder.mkdir(parents=True)
            for index in range(count):
                noise = generator.normal(0, 80, (size, size, 3))
                pixels = colour + 40 * stripes[..., None] + noise
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{index}.png")


class Stopped(Progress):
    """Stops a run after its second task, as Ctrl-C does."""

    def end_task(self, index: int, accuracy: float) -> None:
        if index == 1:
            raise KeyboardInterrupt
