# SPDX-License-Identifier: Apache-2.0
"""What to know about the network that a model was taught with, and that it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onea.vit.embedded import DEFAULT, FAST, in_float16

_STANDS_IN = "Its network comes in eight bits instead of sixteen by now; its answers are practically the same."
_BETTER = f"A new model, taught the same photos, would answer better: its network would be {DEFAULT}."


def remarks(backbone: Mapping[str, Any]) -> list[str]:
    """Sentences about the network of a model, as its folder notes it.

    >>> remarks({"source": "vit_small_patch14_112", "sha256": "31562e"})
    []
    """
    told = [_STANDS_IN] if taught_before(backbone) else []
    return [*told, _BETTER] if backbone["source"] == FAST else told


def taught_before(backbone: Mapping[str, Any]) -> bool:
    """Whether a model was taught when an embedded network had 16 bits, and nobody could choose among two of them."""
    return in_float16(backbone["source"], backbone["sha256"])
