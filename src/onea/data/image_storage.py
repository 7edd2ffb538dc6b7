# SPDX-License-Identifier: Apache-2.0
"""Images by row: packed as uint8 in the fastest memory with enough space, or read from the original files."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from onea.data.dataset import Pixels
from onea.data.decode import read_image
from onea.data.transforms import Preprocess

StorageTier = Literal["device", "host", "disk"]
Shard = Callable[[Tensor], Tensor]


def all_rows(batch: Tensor) -> Tensor:
    """The whole batch: no sharding."""
    return batch


class Images(ABC):
    """Images by row, as float input for the network on its device."""

    device: torch.device

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def test_views(self, rows: Tensor) -> Tensor:
        """Deterministic test-time views of these rows."""

    @abstractmethod
    def sample_crops(self, count: int, crop_scale: float, generator: torch.Generator) -> Tensor:
        """Sample the parameters of random crops of at least ``crop_scale`` of the area, one row per image."""

    @abstractmethod
    def train_views(self, rows: Tensor, crops: Tensor, crop_scale: float) -> Tensor:
        """Training views of these rows with crops sampled for the same scale."""

    def train_batches(
        self, rows: Tensor, size: int, crop_scale: float, generator: torch.Generator, shard: Shard = all_rows
    ) -> Iterator[Tensor]:
        """Training views of these rows in batches, with new crops.

        ``shard`` selects this process's part of each batch; the crop of an image does not depend on it.
        """
        crops = self.sample_crops(len(rows), crop_scale, generator)
        rows, crops = self._upload(rows, crops)
        for batch, batch_crops in zip(rows.split(size), crops.split(size), strict=True):
            yield self.train_views(shard(batch), shard(batch_crops), crop_scale)

    def _upload(self, rows: Tensor, crops: Tensor) -> tuple[Tensor, Tensor]:
        """Move the rows and crops of all batches to the devices where they are used."""
        return rows, crops


class PackedImages(Images):
    """All images as one uint8 array ``[N, 3, H, W]``; batches are cropped and resized in ``dtype`` on the device."""

    def __init__(
        self,
        pixels: Pixels,
        preprocess: Preprocess,
        device: torch.device,
        tier: StorageTier,
        dtype: torch.dtype = torch.float32,
    ):
        self.preprocess, self.device, self.tier, self.dtype = preprocess, device, tier, dtype
        self.pixels: Tensor | Pixels = pixels
        if tier != "disk":
            stored = torch.from_numpy(np.array(pixels))
            if tier == "device":
                stored = stored.to(device)
            elif device.type == "cuda":
                stored = stored.pin_memory()
            self.pixels = stored

    def __len__(self) -> int:
        return len(self.pixels)

    def test_views(self, rows: Tensor) -> Tensor:
        """Test-time views of these rows."""
        return self.preprocess.test_views(self._batch(rows), self.dtype)

    def sample_crops(self, count: int, crop_scale: float, generator: torch.Generator) -> Tensor:
        """Boxes and flips of ``Preprocess.sample_crops``."""
        shape = (int(self.pixels.shape[2]), int(self.pixels.shape[3]))
        return self.preprocess.sample_crops(count, shape, crop_scale, generator)

    def train_views(self, rows: Tensor, crops: Tensor, crop_scale: float) -> Tensor:
        """Training views of these rows."""
        return self.preprocess.train_views(self._batch(rows), crops.to(self.device), self.dtype)

    def _upload(self, rows: Tensor, crops: Tensor) -> tuple[Tensor, Tensor]:
        # All at once: a copy inside a training step would make the device wait for the host.
        return rows.to(self.device) if self.tier == "device" else rows, crops.to(self.device)

    def _batch(self, rows: Tensor) -> Tensor:
        if isinstance(self.pixels, Tensor):
            # Asynchronously on CUDA only: elsewhere the memory may be freed before the copy.
            non_blocking = self.device.type == "cuda"
            chosen = self.pixels[rows.to(self.pixels.device, non_blocking=non_blocking)]
            return chosen.to(self.device, non_blocking=non_blocking)
        return torch.from_numpy(self.pixels[rows.numpy()]).to(self.device)


class ExactImages(Images):
    """Original files, decoded for every batch and transformed one by one with torchvision."""

    def __init__(self, files: Sequence[Path], preprocess: Preprocess, device: torch.device):
        self.files, self.preprocess, self.device = files, preprocess, device
        self._readers = ThreadPoolExecutor(os.cpu_count())

    def __len__(self) -> int:
        return len(self.files)

    def test_views(self, rows: Tensor) -> Tensor:
        """Test-time views of these rows."""
        return self._stack(self._readers.map(self._test_view, rows.tolist()))

    def sample_crops(self, count: int, crop_scale: float, generator: torch.Generator) -> Tensor:
        """A seed for each image: its crop depends on the image size, and must not depend on the order of threads."""
        return torch.randint(2**62, (count,), generator=generator)

    def train_views(self, rows: Tensor, crops: Tensor, crop_scale: float) -> Tensor:
        """Training views of these rows."""
        return self._stack(self._readers.map(self._train_view, rows.tolist(), crops.tolist(), repeat(crop_scale)))

    def _test_view(self, row: int) -> Tensor:
        from torchvision.transforms.v2 import functional

        side, mode = self.preprocess.size, functional.InterpolationMode(self.preprocess.filter)
        image = self._read(row)
        if self.preprocess.geometry == "direct":
            return functional.resize(image, [side, side], mode, antialias=True)  # type: ignore[no-any-return]
        resized = functional.resize(image, [self.preprocess.resize], mode, antialias=True)
        return functional.center_crop(resized, [side, side])  # type: ignore[no-any-return]

    def _train_view(self, row: int, seed: int, crop_scale: float) -> Tensor:
        from torchvision.transforms.v2 import functional

        image = self._read(row)
        shape = (image.shape[1], image.shape[2])
        *box, flip = self.preprocess.sample_crops(1, shape, crop_scale, torch.Generator().manual_seed(seed))[0].tolist()
        side = self.preprocess.size
        mode = functional.InterpolationMode("bilinear")
        crop: Tensor = functional.resized_crop(image, *box, [side, side], mode, antialias=True)
        return crop.flip(2) if flip else crop

    def _read(self, row: int) -> Tensor:
        return torch.from_numpy(np.array(read_image(self.files[row]))).permute(2, 0, 1)

    def _stack(self, images: Any) -> Tensor:
        return self.preprocess.normalise(torch.stack(list(images)).to(self.device).float())


def choose_storage_tier(size: int, budget: int | None, device: torch.device) -> StorageTier:
    """The fastest tier for ``size`` bytes: the device, else the host, else the disk.

    ``budget`` limits the memory for images, by default half of the free memory.
    """
    if size <= (budget if budget is not None else _free_bytes(device) // 2):
        return "device"
    if device.type != "cpu" and size <= (budget if budget is not None else _free_bytes(torch.device("cpu")) // 2):
        return "host"
    return "disk"


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**32
