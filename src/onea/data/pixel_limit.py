# SPDX-License-Identifier: Apache-2.0
"""How many pixels an image may have: a small file can claim gigabytes of them, so the claim is checked first."""

from __future__ import annotations

import os

from onea.errors import OneaError, truncate

MEGAPIXEL = 1_000_000
MAX_PIXELS = 110 * MEGAPIXEL
"""Of one's own images; large cameras have 102 and 108 megapixels, panoramas of phones about 60."""
MOST_PIXELS = 300 * MEGAPIXEL
"""No limit can be set above this."""
_VARIABLE = "ONEA_MAX_MEGAPIXELS"  # so that processes which are started here have the same limit


def max_pixels() -> int:
    """The number of pixels that one's own image may have: ``MAX_PIXELS``, unless another limit is set."""
    given = os.environ.get(_VARIABLE, "").strip()
    return _checked(given) * MEGAPIXEL if given else MAX_PIXELS


def allow_megapixels(number: int | None) -> None:
    """Set another limit, unless None is given."""
    if number is not None:
        os.environ[_VARIABLE] = str(_checked(str(number)))


def _checked(given: str) -> int:
    most = MOST_PIXELS // MEGAPIXEL
    if not (given.isascii() and given.isdigit() and len(given) <= len(str(most)) and 1 <= int(given) <= most):
        raise OneaError(
            f"--max-megapixels (or {_VARIABLE}) is {truncate(given)}; choose a whole number from 1 to {most}."
        )
    return int(given)


def too_many_pixels(pixels: int, limit: int | None) -> str:
    """Why an image of so many is refused; ``limit`` is what the caller has set, if not ``max_pixels()``.

    >>> too_many_pixels(168_000_000, None)
    'it has 168.0 megapixels, and 110 are allowed; --max-megapixels (or ONEA_MAX_MEGAPIXELS) allows more'
    """
    if limit is not None or pixels > MOST_PIXELS:
        return f"it has more than {min(limit or MOST_PIXELS, MOST_PIXELS) // MEGAPIXEL} megapixels"
    claimed, most = pixels / MEGAPIXEL, max_pixels() // MEGAPIXEL
    return f"it has {claimed:.1f} megapixels, and {most} are allowed; --max-megapixels (or {_VARIABLE}) allows more"
