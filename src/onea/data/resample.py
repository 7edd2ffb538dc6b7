# SPDX-License-Identifier: Apache-2.0
"""Crop and resize a whole batch at once, each image from its own box, as two matrix products.

A separable resize is linear in the pixels, so it is one small matrix per axis. Building those matrices per image from
its crop box gives what torchvision's ``resized_crop(antialias=True)`` computes one image at a time (in float32, but for
the last digits), on the device and without a Python loop. (``grid_sample`` has no antialiasing filter and is not a
substitute.)
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

Filter = Literal["bilinear", "bicubic"]
_SUPPORT: dict[str, float] = {"bilinear": 1.0, "bicubic": 2.0}


def _kernel(distance: Tensor, kind: Filter) -> Tensor:
    x = distance.abs()
    if kind == "bilinear":
        return (1 - x).clamp_min(0)
    a = -0.5  # Keys' cubic, as Pillow and torchvision use it when antialiasing
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def axis_weights(start: Tensor, length: Tensor, pixels: int, size: int, kind: Filter = "bilinear") -> Tensor:
    """Weights that resample one axis of each image from its crop.

    Args:
        start: first pixel of each crop, ``[B]``.
        length: pixels in each crop, ``[B]``.
        pixels: length of the stored axis.
        size: length of the resampled axis.
        kind: interpolation filter; widened when shrinking, so the result is antialiased.

    Returns:
        ``[B, size, pixels]``; each row sums to one and is zero outside its crop.
    """
    start, length = start.to(torch.float32), length.to(torch.float32)
    scale = length / size
    reach = scale.clamp_min(1)  # never narrower than one pixel: enlarging interpolates, shrinking averages
    out = torch.arange(size, device=start.device, dtype=torch.float32) + 0.5
    centre = out[None, :] * scale[:, None]
    inside = torch.arange(pixels, device=start.device, dtype=torch.float32)[None, :] - start[:, None]
    distance = (inside[:, None, :] + 0.5 - centre[:, :, None]) / reach[:, None, None]
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
    """Cut a box out of every image and resize it.

    Args:
        images: ``[B, channels, H, W]``, any real dtype.
        boxes: ``[B, 4]`` integer (top, left, height, width), each inside its image.
        size: (height, width) of the result.
        kind: interpolation filter.
        mirrored: which results to flip left to right, ``[B]``.
        dtype: of the products and the result.

    Returns:
        ``[B, channels, *size]`` in the units of the input.
    """
    top, left, height, width = boxes.unbind(1)
    rows = axis_weights(top, height, images.shape[2], size[0], kind).to(dtype)
    columns = axis_weights(left, width, images.shape[3], size[1], kind).to(dtype)
    if mirrored is not None:  # flipping the weights is cheaper than flipping the images, and the same
        columns = torch.where(mirrored[:, None, None], columns.flip(1), columns)
    # All channels as one tall matrix, whose product needs no copy of the weights for each.
    narrow = images.to(dtype).flatten(1, 2) @ columns.mT
    resized: Tensor = rows[:, None] @ narrow.unflatten(1, images.shape[1:3])
    return resized


def resize(
    images: Tensor, size: tuple[int, int], kind: Filter = "bilinear", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Resize every image whole: ``crop_resize`` with the same box for all, whose weights are made only once."""
    rows, columns = (
        _whole_axis(pixels, wanted, kind, images.device, dtype)
        for pixels, wanted in zip(images.shape[2:], size, strict=True)
    )
    return rows @ (images.to(dtype) @ columns.mT)


@functools.lru_cache(maxsize=64)
def _whole_axis(pixels: int, size: int, kind: Filter, device: torch.device, dtype: torch.dtype) -> Tensor:
    start, length = torch.tensor([0]), torch.tensor([pixels])
    return axis_weights(start, length, pixels, size, kind)[0].to(device, dtype)
