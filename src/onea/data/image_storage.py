# SPDX-License-Identifier: Apache-2.0
"""Images by index, ready for the network: packed uint8 in the fastest tier that holds them, or the originals."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from onea.data.dataset import Pixels
from onea.data.transforms import Preprocess

StorageTier = Literal["device", "host", "disk"]
Shard = Callable[[Tensor], Tensor]


def all_rows(batch: Tensor) -> Tensor:
    """All of a batch."""
    return batch


class Images(Protocol):
    """Images that can be asked for by row, as float input for the network on its device."""

    device: torch.device

    def __len__(self) -> int: ...

    def test_views(self, rows: Tensor) -> Tensor:
        """Test-time view of these rows, deterministic."""

    def sample_crops(self, count: int, crop_scale: float, generator: torch.Generator) -> Tensor:
        """What decides random crops of so many images, a row for each: of ``crop_scale`` of the area or more."""

    def train_views(self, rows: Tensor, drawn: Tensor, crop_scale: float) -> Tensor:
        """Training views of these rows, as drawn with the same scale."""

    def train_batches(
        self, rows: Tensor, size: int, crop_scale: float, generator: torch.Generator, shard: Shard = all_rows
    ) -> Iterator[Tensor]:
        """Training views of these rows in batches, drawn anew.

        ``shard`` picks this process's part of each batch; what is drawn for an image does not depend on it.
        """


class PackedImages:
    """All images as one uint8 array ``[N, 3, H, W]``; cropping and resizing happen in batches on the device.

    Args:
        pixels: the array.
        preprocess: what is done to them.
        device: of the network.
        tier: memory that keeps them.
        dtype: in which they are resampled.
    """

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
            held = torch.from_numpy(np.array(pixels))
            if tier == "device":
                held = held.to(device)
            elif device.type == "cuda":
                held = held.pin_memory()
            self.pixels = held

    def __len__(self) -> int:
        return len(self.pixels)

    def test_views(self, rows: Tensor) -> Tensor:
        """Test-time view of these rows."""
        return self.preprocess.test_views(self._batch(rows), self.dtype)

    def sample_crops(self, count: int, crop_scale: float, generator: torch.Generator) -> Tensor:
        """Boxes and flips, as ``Preprocess.draw`` gives them."""
        shape = (int(self.pixels.shape[2]), int(self.pixels.shape[3]))
        return self.preprocess.sample_crops(count, shape, crop_scale, generator)

    def train_views(self, rows: Tensor, drawn: Tensor, crop_scale: float) -> Tensor:
        """Training views of these rows, as drawn."""
        return self.preprocess.train_views(self._batch(rows), drawn.to(self.device), self.dtype)

    def train_batches(
        self, rows: Tensor, size: int, crop_scale: float, generator: torch.Generator, shard: Shard = all_rows
    ) -> Iterator[Tensor]:
        """Training views of these rows in batches."""
        # One upload for all batches: a copy inside the training step would make the device wait for the host.
        drawn = self.sample_crops(len(rows), crop_scale, generator).to(self.device)
        rows = rows.to(self.device) if self.tier == "device" else rows
        for chosen, how in zip(rows.split(size), drawn.split(size), strict=True):
            yield self.train_views(shard(chosen), shard(how), crop_scale)

    def _batch(self, rows: Tensor) -> Tensor:
        if isinstance(self.pixels, Tensor):
            # On CUDA without waiting for all it still has to do; elsewhere a copy may read memory that is gone by then.
            free = self.device.type == "cuda"
            chosen = self.pixels[rows.to(self.pixels.device, non_blocking=free)]
            return chosen.to(self.device, non_blocking=free)
        return torch.from_numpy(self.pixels[rows.numpy()]).to(self.device)


class ExactImages:
    """Original files, decoded anew for every batch and transformed one by one with torchvision."""

    def __init__(self, files: Sequence[Path], preprocess: Preprocess, device: torch.device):
        self.files, self.preprocess, self.device = files, preprocess, device
        self._readers = ThreadPoolExecutor(os.cpu_count())

    def __len__(self) -> int:
        return len(self.files)

    def test_views(self, rows: Tensor) -> Tensor:
        """Test-time view of these rows."""
        return self._stack(self._readers.map(self._plain, rows.tolist()))

    def sample_crops(self, count: int, crop_scale: float, generator: torch.Generator) -> Tensor:
        """A seed for each image, in order, so that the threads' timing cannot matter; the box depends on its shape."""
        return torch.randint(2**62, (count,), generator=generator)

    def train_views(self, rows: Tensor, drawn: Tensor, crop_scale: float) -> Tensor:
        """Training views of these rows, as the seeds decide."""
        return self._stack(self._readers.map(self._augmented, rows.tolist(), drawn.tolist(), repeat(crop_scale)))

    def train_batches(
        self, rows: Tensor, size: int, crop_scale: float, generator: torch.Generator, shard: Shard = all_rows
    ) -> Iterator[Tensor]:
        """Training views of these rows in batches."""
        drawn = self.sample_crops(len(rows), crop_scale, generator)
        for chosen, own in zip(rows.split(size), drawn.split(size), strict=True):
            yield self.train_views(shard(chosen), shard(own), crop_scale)

    def _plain(self, row: int) -> Tensor:
        from torchvision.transforms.v2 import functional

        side, mode = self.preprocess.size, _interpolation(self.preprocess.filter)
        image = self._read(row)
        if self.preprocess.geometry == "direct":
            return functional.resize(image, [side, side], mode, antialias=True)  # type: ignore[no-any-return]
        resized = functional.resize(image, [self.preprocess.resize], mode, antialias=True)
        return functional.center_crop(resized, [side, side])  # type: ignore[no-any-return]

    def _augmented(self, row: int, seed: int, crop_scale: float) -> Tensor:
        from torchvision.transforms.v2 import functional

        image = self._read(row)
        shape = (image.shape[1], image.shape[2])
        *box, flip = self.preprocess.sample_crops(1, shape, crop_scale, torch.Generator().manual_seed(seed))[0].tolist()
        side = self.preprocess.size
        crop: Tensor = functional.resized_crop(image, *box, [side, side], _interpolation("bilinear"), antialias=True)
        return crop.flip(2) if flip else crop

    def _read(self, row: int) -> Tensor:
        from onea.data.decode import read_image

        return torch.from_numpy(np.array(read_image(self.files[row]))).permute(2, 0, 1)

    def _stack(self, images: Any) -> Tensor:
        return self.preprocess.normalise(torch.stack(list(images)).to(self.device).float())


def _interpolation(kind: str) -> Any:
    from torchvision.transforms.v2 import InterpolationMode

    return InterpolationMode(kind)


def choose_storage_tier(size: int, budget: int | None, device: torch.device) -> StorageTier:
    """The fastest tier that may hold ``size`` bytes: the device, else the host, else the disk.

    ``budget`` caps what the images may take of either memory; without one, half of what is free.
    """
    if size <= (budget if budget is not None else _free(device) // 2):
        return "device"
    if device.type != "cpu" and size <= (budget if budget is not None else _free(torch.device("cpu")) // 2):
        return "host"
    return "disk"


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**32
