# SPDX-License-Identifier: Apache-2.0
"""What to know about the network that a model was taught with, and about the adapter in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onea.errors import OneaError
from onea.vit.backbones import noted_file, shortened
from onea.vit.embedded import DEFAULT, FAST, in_float16
from onea.vit.weight_files import split_name

_STANDS_IN = "Its network comes in eight bits instead of sixteen by now; its answers are practically the same."
_BETTER = f"A new model, taught the same photos, would answer better: its network would be {DEFAULT}."

_UNTRAINED = (
    "Its adapter has never been trained, since that takes several classes at once: teach the next ones together, or "
    "all photos again in one folder, and it will answer better."
)
_PARTLY = (
    "Its adapter was trained on {trained} of its {classes} classes: if you still have all photos, teach them again in "
    "one folder, and it will most likely answer better."
)


def advice(classes: Sequence[str], merged: Mapping[str, int]) -> list[str]:
    """What would help a model of these classes, whose adapter was trained on so many images of each.

    >>> advice(["apple", "pear"], {"apple": 5, "pear": 5}), advice(["apple"], {})
    ([], [])
    >>> len(advice(["apple", "pear"], {}))
    1
    >>> advice(["apple", "pear", "plum", "fig", "kiwi"], {"apple": 5, "pear": 5})[0].partition(":")[0]
    'Its adapter was trained on 2 of its 5 classes'
    """
    trained = sum(name in merged for name in classes)
    if len(classes) < 2 or 2 * trained >= len(classes):
        return []
    return [_PARTLY.format(trained=trained, classes=len(classes)) if trained else _UNTRAINED]


def located(backbone: Mapping[str, Any], folder: Path) -> str:
    """What to load the network of the model in a folder by: its name, or the path of its file on this machine.

    Raises:
        OneaError: the file is neither where it was last used nor beside the folder.
    """
    name: str = backbone["name"]
    if split_name(name) is None:
        return name
    beside = folder.absolute().parent / name
    path = noted_file(backbone["sha256"]) or (beside if beside.is_file() else None)
    if path is None:
        raise OneaError(
            f"The network of {folder} is the file {name} (sha256 {shortened(backbone['sha256'])}), which is not where "
            'it was last used on this machine; put it beside the model folder, or give it with backbone="...".'
        )
    return str(path)


def remarks(backbone: Mapping[str, Any]) -> list[str]:
    """Sentences about the network of a model, as its folder notes it.

    >>> remarks({"name": "vit_small_patch14_112", "sha256": "31562e"})
    []
    """
    told = [_STANDS_IN] if taught_before(backbone) else []
    return [*told, _BETTER] if backbone["name"] == FAST else told


def taught_before(backbone: Mapping[str, Any]) -> bool:
    """Whether a model was taught when an embedded network had 16 bits, and nobody could choose among two of them."""
    return in_float16(backbone["name"], backbone["sha256"])
