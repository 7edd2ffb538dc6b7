# SPDX-License-Identifier: Apache-2.0
"""From stored pixels to network input: resampling, augmentation and normalisation, batched on the device.

A separable resize is linear in the pixels, so it is one small matrix per axis. With matrices built from the crop box of
each image, a whole batch is cropped and resized on the device without a Python loop. The results equal those of
torchvision's ``resized_crop(antialias=True)`` for single images in float32, up to rounding. ``grid_sample`` is not a
substitute, because it has no antialiasing filter."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Geometry = Literal["direct", "resize-crop"]
VIEW_AREA = 0.3  # smallest share of an image's area in a random crop for statistics
_ATTEMPTS = 10  # as in torchvision's RandomResizedCrop


@dataclass(frozen=True)
class Preprocess:
    """The transforms from a stored uint8 image to the input of the network.

    Attributes:
        size: side of the network's input in pixels.
        mean: mean of each channel, for pixels in [0, 1].
        std: standard deviation of each channel, for pixels in [0, 1].
        geometry: ``direct`` resizes to the input size; ``resize-crop`` resizes the short side to ``resize`` and crops
            the centre, the published protocol.
        resize: short side before the centre crop.
        filter: interpolation of the test geometry (training crops are bilinear, as published).
        mirror: whether training images are flipped horizontally with probability 0.5.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    geometry: Geometry = "direct"
    resize: int = 0
    filter: Filter = "bilinear"
    mirror: bool = True

    def test_views(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Deterministic test-time views of a uint8 batch ``[B, 3, H, W]``, resampled in ``dtype``."""
        if self.geometry == "direct":
            return self.normalise(resize(images, (self.size, self.size), self.filter, dtype))
        short = min(images.shape[2:])
        height, width = (int(side * self.resize / short) for side in images.shape[2:])
        resized = resize(images, (height, width), self.filter, dtype)
        top, left = round((height - self.size) / 2), round((width - self.size) / 2)
        return self.normalise(resized[:, :, top : top + self.size, left : left + self.size])

    def sample_crops(self, count: int, shape: tuple[int, int], crop_scale: float, generator: torch.Generator) -> Tensor:
        """Sample random crops of at least ``crop_scale`` of the area and, with ``mirror``, flips.

        Returns:
            ``[count, 5]``: top, left, height, width, and 1 to flip. Sampled on the CPU, many at once, so that a run
            does not depend on its device and training steps do not wait for the host.
        """
        boxes = random_crop_boxes(count, *shape, crop_scale, generator)
        flips = torch.rand(count, generator=generator) < (0.5 if self.mirror else 0.0)
        return torch.cat([boxes, flips[:, None].long()], dim=1)

    def train_views(self, images: Tensor, crops: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Training views of a uint8 batch with sampled crops, resampled in ``dtype``."""
        size, flips = (self.size, self.size), crops[:, 4] == 1
        return self.normalise(crop_resize(images, crops[:, :4], size, mirrored=flips, dtype=dtype))

    def normalise(self, pixels: Tensor) -> Tensor:
        """Normalise pixels from 0-255, in float32."""
        if self.filter == "bicubic":
            # Negative lobes overshoot, which an 8-bit image would clip.
            pixels = pixels.clamp(0, 255)
        factor, offset = _affine(self.mean, self.std, pixels.device)
        return torch.addcmul(offset, pixels, factor)


@functools.lru_cache(maxsize=64)
def _affine(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Factor and offset per channel, cached on the device, because an upload in every step would synchronise."""
    means, stds = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
    return (1 / (255 * stds)).float().to(device), (-means / stds).float().to(device)


def random_crop_boxes(count: int, height: int, width: int, min_scale: float, generator: torch.Generator) -> Tensor:
    """Random crop boxes ``[count, 4]`` with the distribution of torchvision's ``RandomResizedCrop``.

    Ten candidates per image are sampled at once; the first that fits is used, or the centre crop if none fits.
    """
    shape = (count, _ATTEMPTS)
    scale = min_scale + (1 - min_scale) * torch.rand(shape, generator=generator, dtype=torch.float64)
    area = height * width * scale
    low, high = math.log(3 / 4), math.log(4 / 3)
    ratio = torch.exp(low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64))
    widths, heights = (area * ratio).sqrt().round().long(), (area / ratio).sqrt().round().long()
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first = fits.int().argmax(1, keepdim=True)  # the first that fits; 0 if none fits, which is replaced below
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


Filter = Literal["bilinear", "bicubic"]


def _kernel(distance: Tensor, kind: Filter) -> Tensor:
    x = distance.abs()
    if kind == "bilinear":
        return (1 - x).clamp_min(0)
    a = -0.5  # Keys' cubic, as Pillow and torchvision use it when antialiasing
    inner = ((a + 2) * x - (a + 3)) * x * x + 1
    outer = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, inner, torch.where(x < 2, outer, torch.zeros_like(x)))


def axis_weights(start: Tensor, length: Tensor, pixels: int, size: int, kind: Filter = "bilinear") -> Tensor:
    """Weights that resample one axis of each image from its crop.

    Args:
        start: first pixel of each crop, ``[B]``.
        length: pixels in each crop, ``[B]``.
        pixels: length of the stored axis.
        size: length of the resampled axis.
        kind: interpolation filter; it is widened for downsampling, so the result is antialiased.

    Returns:
        ``[B, size, pixels]``; each row sums to one and is zero outside its crop.
    """
    start, length = start.to(torch.float32), length.to(torch.float32)
    scale = length / size
    filter_scale = scale.clamp_min(1)  # at least one pixel: upsampling interpolates, downsampling averages
    out = torch.arange(size, device=start.device, dtype=torch.float32) + 0.5
    centre = out[None, :] * scale[:, None]
    inside = torch.arange(pixels, device=start.device, dtype=torch.float32)[None, :] - start[:, None]
    distance = (inside[:, None, :] + 0.5 - centre[:, :, None]) / filter_scale[:, None, None]
    weights = _kernel(distance, kind)
    in_crop = (inside >= 0) & (inside < length[:, None])
    weights = weights * in_crop[:, None, :]
    return weights / weights.sum(dim=2, keepdim=True)


def crop_resize(
    images: Tensor,
    boxes: Tensor,
    size: tuple[int, int],
    kind: Filter = "bilinear",
    *,
    mirrored: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Crop a box from every image and resize it.

    Args:
        images: ``[B, channels, H, W]``, any real dtype.
        boxes: ``[B, 4]`` integer (top, left, height, width), each inside its image.
        size: (height, width) of the result.
        kind: interpolation filter.
        mirrored: which results to flip horizontally, ``[B]``.
        dtype: dtype of the products and the result.

    Returns:
        ``[B, channels, *size]`` in the units of the input.
    """
    top, left, height, width = boxes.unbind(1)
    rows = axis_weights(top, height, images.shape[2], size[0], kind).to(dtype)
    columns = axis_weights(left, width, images.shape[3], size[1], kind).to(dtype)
    if mirrored is not None:  # flipping the weights is cheaper than flipping the images
        columns = torch.where(mirrored[:, None, None], columns.flip(1), columns)
    # All channels as one tall matrix, so that weights are not copied per channel.
    narrow = images.to(dtype).flatten(1, 2) @ columns.mT
    resized: Tensor = rows[:, None] @ narrow.unflatten(1, images.shape[1:3])
    return resized


def resize(
    images: Tensor, size: tuple[int, int], kind: Filter = "bilinear", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Resize whole images, like ``crop_resize`` with the same box for all, and with cached weights."""
    rows, columns = (
        _whole_axis_weights(pixels, side, kind, images.device, dtype)
        for pixels, side in zip(images.shape[2:], size, strict=True)
    )
    return rows @ (images.to(dtype) @ columns.mT)


@functools.lru_cache(maxsize=64)
def _whole_axis_weights(pixels: int, size: int, kind: Filter, device: torch.device, dtype: torch.dtype) -> Tensor:
    start, length = torch.tensor([0]), torch.tensor([pixels])
    return axis_weights(start, length, pixels, size, kind)[0].to(device, dtype)
