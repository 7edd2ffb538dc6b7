# SPDX-License-Identifier: Apache-2.0
"""Small copies of photos: square pixels as WebP, within a number of bytes that depends on the size."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import numpy as np
from PIL import Image

from onea.data.dataset import Pixels

_QUALITIES = (75, 60, 45, 30, 15, 5, 0)  # 75: five kilobytes for a photo of 160 pixels, seven for 192, nine for 256
_EFFORT = 2  # of 6; more makes files 4 % smaller and takes twice as long
# Mean number of bytes of a copy at 160 pixels; it grows more slowly than the area, as larger images compress better.
_BYTES, _SIDE, _GROWTH = 6_000, 160, 1.29


def max_bytes(side: int) -> int:
    """The largest mean number of bytes of copies with this side.

    >>> max_bytes(160), max_bytes(256)
    (6000, 11001)
    """
    return int(_BYTES * (side / _SIDE) ** _GROWTH)


def encode(pixels: Pixels) -> list[bytes]:
    """Copies of square images ``uint8 [N, 3, S, S]``, on average of at most ``max_bytes(S)``.

    If they are larger with the best quality, all are encoded with a lower one.
    """
    images = [Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))) for image in pixels]
    copies: list[bytes] = []
    for quality in _QUALITIES:
        copies = [_webp(image, quality) for image in images]
        if sum(map(len, copies)) <= len(copies) * max_bytes(pixels.shape[-1]):
            break
    return copies


def decode(copies: Sequence[bytes], side: int) -> Pixels:
    """The pixels of copies, ``uint8 [N, 3, side, side]``.

    Raises:
        ValueError: a copy is damaged, or not an image of this side.
    """
    pixels = np.empty((len(copies), 3, side, side), np.uint8)
    for row, copy in enumerate(copies):
        try:
            with Image.open(BytesIO(copy), formats=("WEBP",)) as image:
                if image.size != (side, side):
                    raise ValueError(f"an image of {image.width} x {image.height} pixels")
                pixels[row] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        except (OSError, SyntaxError) as error:  # Pillow raises both for damaged files
            raise ValueError(f"not a WebP image: {error}") from error
    return pixels


def _webp(image: Image.Image, quality: int) -> bytes:
    content = BytesIO()
    image.save(content, "WEBP", quality=quality, method=_EFFORT)
    return content.getvalue()
