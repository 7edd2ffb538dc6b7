# SPDX-License-Identifier: Apache-2.0
"""What the tensors of a model folder may be: as large as its ``state.json`` says, and numbers that teaching can give.

The header of a file is judged before anything else of it is read, and all numbers before they are used.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from onea.classifiers.familiarity import SIGNALS
from onea.files import DamagedFile
from onea.model.background import MOST_FEATURES
from onea.model.calibrating import MOST_MARGINS
from onea.model.fingerprints import WORDS
from onea.model.json_types import MOST
from onea.model.recipe import options_of
from onea.model.rolling import MOST_OF_CLASS
from onea.model.state import background_images, became_classes, statistics_for
from onea.tensors import Tensors

_MOST_HEADER = 16 * 2**20  # bytes
_WIDEST = 16_384  # features of a network
_BLOCK = re.compile(r"adapter\.blocks\.([0-9]{1,4})\.")
_TYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64}

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def read_tensors(file: BinaryIO, size: int, state: Mapping[str, Any]) -> Tensors:
    """The tensors of a state: read only if they are as large as the values in its ``state.json`` say."""
    wanted = check_shapes(file, size, state)
    file.seek(0)
    content = file.read(size)
    if hashlib.sha256(content).hexdigest() != state["sha256"]:
        raise DamagedFile("the tensors changed")
    try:
        tensors: Tensors = load(content)
    except (SafetensorError, ValueError) as error:
        raise DamagedFile("the tensors are not safetensors") from error
    declared = {name: (_TYPES[kind], shape) for name, (kind, shape) in wanted.items()}
    if {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} != declared:
        raise DamagedFile("the tensors are declared twice")
    check_numbers(tensors)
    return tensors


def check_shapes(file: BinaryIO, size: int, state: Mapping[str, Any]) -> Shapes:
    """Compare the header of a safetensors file with what the state says; nothing else of the file is read."""
    found, data = _header(file, size)
    try:
        width, rows = found["prototypes"][1][1], found["margins"][1][0]
        hidden = found["hidden"][1][0]
    except (KeyError, IndexError):
        raise DamagedFile("tensors are missing") from None
    classes, options = len(state["classes"]), options_of(state["options"])
    rank = options.rank
    if not 1 <= width <= _WIDEST or max(rows, hidden) > MOST_MARGINS * classes:
        raise DamagedFile(f"tensors of width {width} with {max(rows, hidden)} margins are impossible")
    wanted: Shapes = {
        "prototypes": ("F32", (classes, width)),
        "counts": ("I64", (classes,)),
        "scatter": ("F64", (width, width)),
        "margins": ("F32", (rows, SIGNALS)),
        "margin_rows": ("I64", (rows,)),
        "hidden": ("F32", (hidden, SIGNALS)),
        "hidden_rows": ("I64", (hidden,)),
    }
    if photos := _background(found, state["updates"]):
        wanted |= {"background": ("BF16", (photos, width))}
    if prints := _fingerprints(found, state["updates"]):
        wanted |= {"fingerprints": ("I64", (prints, WORDS)), "fingerprint_rows": ("I64", (prints,))}
    if rolling := found.get("held", ("", (0,)))[1][:1]:
        if rolling[0] > MOST_OF_CLASS * classes:
            raise DamagedFile(f"{rolling[0]} features held out are more than are kept")
        if rolling[0]:
            wanted |= {"held": ("BF16", (*rolling, options.views, width)), "held_rows": ("I64", rolling)}
            wanted |= {"held_prints": ("I64", (*rolling, WORDS))}
    if (factors := statistics_for(state["readout"], width).factors) is not None:
        wanted |= {"factors": ("BF16", (classes, *factors.shape[1:])), "cut": ("F64", (classes,))}
    for block in _adapter_blocks(found, (len(found) - len(wanted)) // 4, options.adapted_blocks):
        wanted |= {
            f"adapter.blocks.{block}.down.weight": ("F32", (rank, width)),
            f"adapter.blocks.{block}.down.bias": ("F32", (rank,)),
            f"adapter.blocks.{block}.up.weight": ("F32", (width, rank)),
            f"adapter.blocks.{block}.up.bias": ("F32", (width,)),
        }
    if odd := sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)):
        raise DamagedFile(f"tensor {odd[0]!r:.80} is not what it should be")
    if data != sum(_TYPES[kind].itemsize * math.prod(shape) for kind, shape in wanted.values()):
        raise DamagedFile("the tensors are cut short, or more follows")
    return wanted


def _background(found: Shapes, updates: Sequence[Mapping[str, Any]]) -> int:
    """The number of background images whose features a file must hold; where some became a class, as it declares."""
    gone = became_classes(updates)
    most = min(background_images(updates) + gone, MOST_FEATURES)
    count = found["background"][1][0] if "background" in found and found["background"][1] else 0
    return min(max(count, most - gone), most)


def _fingerprints(found: Shapes, updates: Sequence[Mapping[str, Any]]) -> int:
    """The number of fingerprints that a file declares; forgotten classes have none."""
    count = found["fingerprints"][1][0] if "fingerprints" in found and found["fingerprints"][1] else 0
    if count > sum(update["images"] for update in updates if update["kind"] == "learn"):
        raise DamagedFile(f"{count} fingerprints are more than there were images")
    return count


def _adapter_blocks(found: Shapes, count: int, asked: int) -> range:
    """The blocks of the network that an adapter for so many has tensors for: all of them or, where asked, the last."""
    if not asked:
        return range(count)
    blocks = {int(match[1]) for name in found if (match := _BLOCK.match(name))}
    if len(blocks) != asked:
        raise DamagedFile(f"its adapter is for {len(blocks)} blocks instead of {asked}")
    return range(min(blocks), min(blocks) + asked)


def check_numbers(tensors: Mapping[str, Tensor]) -> None:
    """Refuse numbers that no teaching could have given."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise DamagedFile(f"{name} holds NaN or infinity")
    counts = tensors["counts"]
    if bool(((counts < 1) | (counts >= MOST)).any()):
        raise DamagedFile("its counts of images are impossible")
    for name in ("margin_rows", "hidden_rows", "fingerprint_rows", "held_rows"):
        rows = tensors.get(name, counts[:0])
        if bool(((rows < 0) | (rows >= len(counts))).any()):
            raise DamagedFile(f"{name} are of no class")
    # Of sums of squares none is larger than the largest on the diagonal, which is not negative but for rounding.
    scatter = tensors["scatter"]
    widest = float(scatter.diagonal().max())
    possible = (scatter.abs() <= 1.001 * widest).all() & (scatter.diagonal() >= -1e-6 * widest).all()
    if not 0 <= widest < 1e100 or not bool(possible):
        raise DamagedFile("its scatter is impossible")
    if "cut" in tensors and bool((tensors["cut"] < 0).any()):
        raise DamagedFile("what was cut off its classes is negative")


def _header(file: BinaryIO, size: int) -> tuple[Shapes, int]:
    """Types and shapes that a safetensors file declares, and the bytes that follow."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(_MOST_HEADER, size - 8):
        raise DamagedFile("the tensors are not safetensors")
    try:
        found = json.loads(file.read(length))
        found.pop("__metadata__", None)
        shapes = {name: (each["dtype"], tuple(each["shape"])) for name, each in found.items()}
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        raise DamagedFile("the tensors are not safetensors") from None
    if not all(type(side) is int and side >= 0 for _, shape in shapes.values() for side in shape):
        raise DamagedFile("the tensors are not safetensors")
    return shapes, size - 8 - length
