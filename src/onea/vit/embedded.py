# SPDX-License-Identifier: Apache-2.0
"""The networks that come with onea, which need no download: their names, and which weights they stand for."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

DEFAULT = "vit_small_patch14_112"
"""Of models: 12 blocks, 65 tokens an image."""
FAST = "vit_small_d6_patch14_84"
"""Of the demo, research runs and the bench: 6 blocks, 37 tokens, a quarter of the work; also called ``fast``."""
_ALIASES = {"fast": FAST}
_DEPTHS = {FAST: 5}

EMBEDDED = {
    DEFAULT: "758cec6a96afb9837534087ea8d9d70098af7172cc8b6b835cdf21f105427e11",
    FAST: "d7893e186c460833dc2199ff9521e7e56f8b231c0b424b25fbacf5ce356a033e",
}
"""SHA-256 of the tensors of each, as they are in the file."""


def full_name(backbone: str) -> str:
    """The name of a backbone without aliases, as records and models note it.

    >>> full_name("fast")
    'vit_small_d6_patch14_84'
    """
    return _ALIASES.get(backbone, backbone)


def depth_for_models(backbone: str) -> int:
    """The number of blocks that models use of a network; 0 is all.

    The last block of the smaller embedded network was trained to tell 200 classes apart, and tells others apart less
    well than the one before it, by six points even after training (research/README.md).

    >>> depth_for_models("fast"), depth_for_models("vit_base_patch16_224.augreg_in21k")
    (5, 0)
    """
    return _DEPTHS.get(full_name(backbone), 0)


def file_of(name: str) -> Path:
    """The file of an embedded network."""
    with resources.as_file(resources.files("onea") / "assets" / f"{name}.safetensors") as path:
        return path
