# SPDX-License-Identifier: Apache-2.0
"""The limit on the pixels of an image, checked before decoding: a small file can declare gigabytes of them."""

from __future__ import annotations

import os

from onea.errors import OneaError, truncate

MEGAPIXEL = 1_000_000
DEFAULT_MAX_PIXELS = 110 * MEGAPIXEL
"""The default limit: large cameras have 102 or 108 megapixels, panoramas of phones about 60."""
MAX_PIXEL_LIMIT = 300 * MEGAPIXEL
"""The highest limit that can be set."""
_VARIABLE = "ONEA_MAX_MEGAPIXELS"  # inherited by child processes


def max_pixels() -> int:
    """The limit on the pixels of the user's images, by default ``DEFAULT_MAX_PIXELS``."""
    megapixels = os.environ.get(_VARIABLE, "").strip()
    return _checked(megapixels) * MEGAPIXEL if megapixels else DEFAULT_MAX_PIXELS


def allow_megapixels(number: int | None) -> None:
    """Set the limit on the pixels of the user's images; None does not change it."""
    if number is not None:
        os.environ[_VARIABLE] = str(_checked(str(number)))


def _checked(text: str) -> int:
    largest = MAX_PIXEL_LIMIT // MEGAPIXEL
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(largest)) and 1 <= int(text) <= largest):
        raise OneaError(
            f"--max-megapixels (or {_VARIABLE}) is {truncate(text)}; choose a whole number from 1 to {largest}."
        )
    return int(text)


def pixel_limit_reason(pixels: int, limit: int | None) -> str:
    """The reason for refusing an image; ``limit`` is the limit of the caller, if not ``max_pixels()``.

    >>> pixel_limit_reason(168_000_000, None)
    'it has 168.0 megapixels; the limit is 110, see --max-megapixels (or ONEA_MAX_MEGAPIXELS)'
    """
    if limit is not None or pixels > MAX_PIXEL_LIMIT:
        return f"it has more than {min(limit or MAX_PIXEL_LIMIT, MAX_PIXEL_LIMIT) // MEGAPIXEL} megapixels"
    declared, allowed = pixels / MEGAPIXEL, max_pixels() // MEGAPIXEL
    return f"it has {declared:.1f} megapixels; the limit is {allowed}, see --max-megapixels (or {_VARIABLE})"
