# SPDX-License-Identifier: Apache-2.0
"""From stored pixels to network input: geometry, augmentation and normalisation, batched on the device."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onea.data.resample import Filter, crop_resize, resize

Geometry = Literal["direct", "resize-crop"]
VIEW_AREA = 0.3  # the least share of an image that a further view of it shows
_TRIES = 10  # as torchvision's RandomResizedCrop


@dataclass(frozen=True)
class Preprocess:
    """Everything between a stored uint8 image and the network.

    Attributes:
        size: side of the network's input in pixels.
        mean: subtracted from pixels in [0, 1], per channel.
        std: divided by, per channel.
        geometry: ``direct`` resizes straight to the input size; ``resize-crop`` resizes the short side to
            ``resize`` and cuts the centre, the published protocol.
        resize: short side before the centre crop.
        filter: interpolation of the test geometry (training crops are bilinear, as published).
        mirror: whether training images are flipped left to right half of the time.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    geometry: Geometry = "direct"
    resize: int = 0
    filter: Filter = "bilinear"
    mirror: bool = True

    def plain(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Test-time view of a uint8 batch ``[B, 3, H, W]``, deterministic; resampled in ``dtype``."""
        if self.geometry == "direct":
            return self.normalise(resize(images, (self.size, self.size), self.filter, dtype))
        short = min(images.shape[2:])
        height, width = (int(side * self.resize / short) for side in images.shape[2:])
        resized = resize(images, (height, width), self.filter, dtype)
        top, left = round((height - self.size) / 2), round((width - self.size) / 2)
        return self.normalise(resized[:, :, top : top + self.size, left : left + self.size])

    def draw(self, count: int, shape: tuple[int, int], crop_scale: float, generator: torch.Generator) -> Tensor:
        """Random crops of at least ``crop_scale`` of the area and, where they keep the class, flips.

        Returns:
            ``[count, 5]``: top, left, height, width, and 1 to flip. Drawn on the CPU, many at once, so that a run does
            not depend on its device and a training step needs nothing from the host.
        """
        boxes = random_boxes(count, *shape, crop_scale, generator)
        flips = torch.rand(count, generator=generator) < (0.5 if self.mirror else 0.0)
        return torch.cat([boxes, flips[:, None].long()], dim=1)

    def augmented(self, images: Tensor, drawn: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Training view of a uint8 batch, as drawn; resampled in ``dtype``."""
        size, flips = (self.size, self.size), drawn[:, 4] == 1
        return self.normalise(crop_resize(images, drawn[:, :4], size, mirrored=flips, dtype=dtype))

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels in 0-255 to what the network expects, in full precision."""
        if self.filter == "bicubic":
            # Its negative lobes overshoot; an 8-bit image could not, so neither do we.
            pixels = pixels.clamp(0, 255)
        factor, offset = _affine(self.mean, self.std, pixels.device)
        return torch.addcmul(offset, pixels, factor)


@functools.lru_cache(maxsize=64)
def _affine(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Factor and offset per channel, uploaded once: an upload in every step would make the host wait for the device."""
    middle, spread = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
    return (1 / (255 * spread)).float().to(device), (-middle / spread).float().to(device)


def random_boxes(count: int, height: int, width: int, smallest: float, generator: torch.Generator) -> Tensor:
    """Random crop boxes ``[count, 4]`` with the law of torchvision's ``RandomResizedCrop``.

    Ten candidates per image are drawn at once and the first that fits is taken; when none fits, the centre crop.
    """
    shape = (count, _TRIES)
    area = height * width * (smallest + (1 - smallest) * torch.rand(shape, generator=generator, dtype=torch.float64))
    low, high = math.log(3 / 4), math.log(4 / 3)
    ratio = torch.exp(low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64))
    widths, heights = (area * ratio).sqrt().round().long(), (area / ratio).sqrt().round().long()
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first = fits.int().argmax(1, keepdim=True)  # the first True; 0 when there is none, replaced below
    h, w = heights.gather(1, first)[:, 0], widths.gather(1, first)[:, 0]
    none = ~fits.any(1)
    fallback_h, fallback_w = _centre_box(height, width)
    h, w = torch.where(none, fallback_h, h), torch.where(none, fallback_w, w)
    u = torch.rand((2, count), generator=generator, dtype=torch.float64)
    top = torch.where(none, (height - h) // 2, (u[0] * (height - h + 1)).long())
    left = torch.where(none, (width - w) // 2, (u[1] * (width - w + 1)).long())
    return torch.stack([top, left, h, w], dim=1)


def _centre_box(height: int, width: int) -> tuple[int, int]:
    ratio = width / height
    if ratio < 3 / 4:
        return round(width / (3 / 4)), width
    if ratio > 4 / 3:
        return height, round(height * (4 / 3))
    return height, width
