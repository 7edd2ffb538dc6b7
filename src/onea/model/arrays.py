# SPDX-License-Identifier: Apache-2.0
"""Arrays and tensors as images: which axis is the channel, which numbers are pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from onea.data.decode import BadImage
from onea.errors import OneaError

_CHANNELS = (1, 3, 4)


def is_array(value: Any) -> bool:
    """Whether this is an array or a tensor."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__array__")


def is_list(array: Any) -> bool:
    """Whether this array holds things one by one, such as paths, instead of pixels.

    >>> is_list(np.array(["a.jpg", "b.jpg"])), is_list(np.zeros((2, 8, 8, 3)))
    (True, False)
    """
    kind = getattr(array.dtype, "kind", None)
    if kind is None and not hasattr(array, "detach"):  # a column of a table whose types are not numpy's
        kind = np.asarray(array).dtype.kind
    return kind in tuple("OTU")  # objects and texts, as numpy and pandas hold them


def images_in(array: Any) -> Iterator[Any]:
    """The images of an array: itself, or those along the first of four axes.

    >>> [image.shape for image in images_in(np.zeros((2, 3, 8, 9), np.uint8))]
    [(3, 8, 9), (3, 8, 9)]
    """
    values = _numpy(array)
    if values.ndim == 4:
        yield from values
    elif values.ndim == 3 and not {values.shape[0], values.shape[2]} & {*_CHANNELS}:
        raise OneaError(
            f"An array of shape {tuple(values.shape)} has no axis of colours; give grey images as [N, H, W, 1], "
            "such as images[..., None], and one image as [H, W] or [H, W, 3]."
        )
    elif values.ndim in (2, 3):
        yield values
    else:
        shape = tuple(values.shape)
        raise OneaError(f"An array of shape {shape} holds no images; give [H, W, 3], [N, H, W, 3] or [N, 3, H, W].")


def to_image(array: Any, name: str) -> Image.Image:
    """An array ``[H, W]``, ``[H, W, channels]`` or ``[channels, H, W]`` as an RGB image.

    Whole numbers are pixels in 0..255; fractions are pixels in 0..1, or in 0..255 when some exceed 1.

    Raises:
        BadImage: the shape or the numbers are not those of an image.
    """
    values = _numpy(array)
    if values.ndim == 3 and values.shape[2] not in _CHANNELS and values.shape[0] in _CHANNELS:
        values = values.transpose(1, 2, 0)
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in _CHANNELS) or 0 in values.shape:
        raise BadImage(name, f"an array of shape {tuple(values.shape)} is not [H, W, 3] or [3, H, W]")
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    return Image.fromarray(_bytes(values, name)).convert("RGB")


def _bytes(values: Any, name: str) -> Any:
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    if values.dtype == np.bool_:
        return np.where(values, np.uint8(255), np.uint8(0))
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        raise BadImage(name, "the array holds NaN, infinity or something else than finite real numbers")
    if values.min() < 0 or values.max() > 255:
        raise BadImage(name, "pixels must lie in 0..1 or 0..255: give images before they are normalised")
    scale = 255.0 if np.issubdtype(values.dtype, np.floating) and values.max() <= 1 else 1.0
    return np.rint(values.astype(np.float64) * scale).astype(np.uint8)


def _numpy(array: Any) -> Any:
    if hasattr(array, "detach"):  # a tensor, perhaps on a device, perhaps of a type that numpy does not know
        array = array.detach().cpu()
        array = array.float() if array.is_floating_point() else array
    return np.asarray(array)
