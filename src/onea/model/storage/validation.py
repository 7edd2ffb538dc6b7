# SPDX-License-Identifier: Apache-2.0
"""Validation of a model folder: checksums, versions, parameters, history, and the shapes and numbers of tensors.

A file may be damaged, or made by somebody who means harm; either way it ends here, with a reason that becomes one
sentence. The same checks are made before a version is written, so that none is ever written that could not be read.
The header of a tensor file is checked before anything else of it is read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, BinaryIO, Literal, Union, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from onea import __version__
from onea.classifiers.familiarity import NUM_SIGNALS
from onea.data.transforms import Preprocess
from onea.errors import OneaError
from onea.files import DamagedFile, dump_with_checksum, parse_json_object, verify_checksum
from onea.model.calibration import MOST_MARGINS
from onea.model.held_out import MOST_OF_CLASS
from onea.model.learning.background import MOST_FEATURES
from onea.model.learning.fingerprints import WORDS
from onea.model.names import UNKNOWN
from onea.model.parameters import MACHINE, Parameters, check_params, options_of
from onea.model.state import background_images, became_classes, classifier_for, statistics_for
from onea.model.storage.layout import FORMAT, LAST_VERSION
from onea.tensors import Tensors

_MOST_BLOCKS = 1000
MOST_JSON = 64 * 2**20  # bytes of model.json or state.json: names of a million classes
_MANIFEST = {"versions": list[int], "counter": int, "params": dict}
_STATE = {
    "version": int,
    "id": str,
    "backbone": dict,
    "preprocess": dict,
    "options": dict,
    "readout": str,
    "classes": list[str],
    "merged": dict[str, int],
    "temperature": float,
    "calibrated_on": int,
    "updates": list[dict[str, Any]],
    "numbers": bool,
    "freedom": int,
    "sha256": str,
}
_BACKBONE = {"name": str, "sha256": str}
_OF_BACKBONE = {*_BACKBONE, "depth", "licence", "config"}
_UPDATE = {
    "version": int,
    "kind": Literal["learn", "forget", "rename", "background"],
    "date": str,
    "classes": list[str],
    "known": int,
}
_LEARN = {
    "name": str,
    "new_classes": int,
    "images": int,
    "held_out": int,
    "held_out_accuracy": float | None,
    "trained": bool,
    "seconds": float,
}
_LATER = {  # what earlier histories lack
    "seen": int,
    "two_names": int,
    "were_background": int,
    "left_out": int,
    "groups": int,
    "few_photos": int,
    "fewest": dict[str, int],
    "held_out_interval": tuple[float, float] | None,
    "overall_accuracy": float | None,
    "overall_interval": tuple[float, float] | None,
    "overall_images": int,
    "overall_classes": int,
    "overall_before": float | None,
    "cross_validated_accuracy": float | None,
    "cross_validated_interval": tuple[float, float] | None,
    "cross_validated_images": int,
    "cross_validated_before": float | None,
}
_BACKGROUND = {"name": str, "images": int, "like_known": int, "skipped": int, "seconds": float}
_LONGEST_PATH = 4_096
_COUNTS = (
    *("version", "calibrated_on", "freedom", "known", "new_classes", "images", "held_out", "like_known", "skipped"),
    *("everywhere", "seen", "two_names", "were_background", "left_out", "groups", "few_photos"),
    *("overall_images", "overall_classes", "cross_validated_images"),
)
_SHARES = (
    *("held_out_accuracy", "overall_accuracy", "overall_before"),
    *("cross_validated_accuracy", "cross_validated_before"),
)
_SIDES = range(1, 8193)  # of images, in pixels
_TEMPERATURES = (1e-6, 1e3)  # fitted ones lie in 0.001 .. 1


class OtherFormat(DamagedFile):
    """A file of a format that this version does not read."""


def seal(content: Mapping[str, Any]) -> bytes:
    """A JSON file with these values and their checksum."""
    written = dump_with_checksum(content)
    if len(written) > MOST_JSON:
        raise OneaError(f"The model has more than {MOST_JSON >> 20} MB of names and history; use shorter names.")
    return written


def manifest_values(content: bytes) -> tuple[tuple[int, ...], int, dict[str, Any]]:
    """Versions, counter and parameters in ``model.json``."""
    found = _opened(content)
    _check_fields(found, _MANIFEST)
    versions, counter = found["versions"], found["counter"]
    if not versions or versions[0] < 1 or any(old >= new for old, new in itertools.pairwise(versions)):
        raise DamagedFile("its versions do not increase")
    if not versions[-1] <= counter <= LAST_VERSION:
        raise DamagedFile(f"its counter is not between its last version and {LAST_VERSION:,}")
    return tuple(versions), counter, _params(found["params"])


def state_values(content: bytes, version: int) -> dict[str, Any]:
    """The values in ``state.json`` of a version."""
    found = _opened(content)
    _check_fields(found, {"updates": _STATE["updates"]})
    for update in found["updates"]:
        _check_update(update)
    _check_fields(found, _STATE)
    if found["version"] != version:
        raise DamagedFile(f"it says that it is version {found['version']}")
    if not re.fullmatch("[0-9a-f]{32}", found["id"]):
        raise DamagedFile("it has no id")
    classes = found["classes"]
    if not is_text(classes) or not is_text(found["updates"]):
        raise DamagedFile("a name in it is no text")
    if len(set(classes)) < len(classes) or UNKNOWN in classes or "" in classes:
        raise DamagedFile("its classes do not have names of their own")
    if not all(0 < images < MOST for images in found["merged"].values()):
        raise DamagedFile("its counts of merged images are impossible")
    if not _TEMPERATURES[0] <= found["temperature"] <= _TEMPERATURES[1]:
        raise DamagedFile("its temperature is impossible")
    _check_fields(found["backbone"], _BACKBONE)
    if not all(1 <= len(found["backbone"][name]) <= _LONGEST_PATH for name in _BACKBONE):
        raise DamagedFile("its backbone has no name")
    if re.search(r"[/\\]", found["backbone"]["name"]):
        raise DamagedFile("the name of its backbone is a path")
    found["backbone"] = {name: value for name, value in found["backbone"].items() if name in _OF_BACKBONE}
    _check_fields({"depth": 1} | found["backbone"], {"depth": int})
    if not 1 <= found["backbone"].get("depth", 1) <= _MOST_BLOCKS:
        raise DamagedFile(f"its backbone has {found['backbone']['depth']} blocks")
    if not isinstance(found["backbone"].get("licence", ""), str):
        raise DamagedFile("its licence is no text")
    _check_preprocess(found["preprocess"])
    try:
        options_of(found["options"])
        classifier_for(found["readout"])
    except OneaError as error:
        raise DamagedFile(f"{str(error).rstrip('.'):.300}") from error
    return found


def _opened(content: bytes) -> dict[str, Any]:
    """The values of a JSON file, whose checksum is right."""
    found = parse_json_object(content)
    number = found.get("format")
    if type(number) is not int or not 1 <= number < MOST:
        raise DamagedFile("it has no format")
    if number > FORMAT:
        raise OtherFormat(f"has format {number}, and this onea ({__version__}) reads format {FORMAT}; update onea")
    if number < FORMAT:
        raise OtherFormat(f"was made by an onea before its first release (format {number}); teach a new model")
    verify_checksum(found)
    return found


def _params(given: dict[str, Any]) -> dict[str, Any]:
    """The parameters that belong to a model: as the file has them, else their defaults."""
    hints = get_type_hints(Parameters)
    defaults = {name: default for name, default in Parameters.defaults().items() if name not in MACHINE}
    found = dict(defaults)
    for name, value in given.items():
        if name not in defaults:
            raise OtherFormat(
                f"has a parameter {name!r:.80}, which this onea ({__version__}) does not have; update onea"
            )
        # Python takes 2.0 for 2 and 1 for True, and whoever gave them was never told otherwise.
        same = [kind(value) for kind in (int, bool) if isinstance(value, int | float) and kind(value) == value]
        fitting = [each for each in (value, *same) if fits(each, hints[name])]
        if not fitting:
            raise DamagedFile(f"its parameter '{name}' is {value!r:.80}")
        found[name] = fitting[0]
    try:
        check_params(found)
    except OneaError as error:
        raise DamagedFile(f"{str(error).rstrip('.'):.300}") from error
    return found


def _check_preprocess(found: dict[str, Any]) -> None:
    hints = get_type_hints(Preprocess) | {"side": int}
    if odd := sorted(found.keys() - hints.keys()):
        raise DamagedFile(f"{odd[0]!r:.80} is nothing that images have")
    _check_fields(found, {name: hints[name] for name in found.keys() | {"size", "mean", "std", "side"}})
    size, resize = found["size"], found.get("resize", 0)
    least = 0 if found.get("geometry", "direct") == "direct" else size
    if size not in _SIDES or found["side"] not in _SIDES or not least <= resize <= _SIDES[-1] or min(found["std"]) <= 0:
        raise DamagedFile("what it says of images is impossible")


def _check_update(update: dict[str, Any]) -> None:
    _check_fields(update, _UPDATE)
    if update["kind"] == "learn":
        _check_fields(update, _LEARN)
        _check_fields(update, {name: hint for name, hint in _LATER.items() if name in update})
        shares = [update.get(name) or 0 for name in _SHARES]
        if not all(0 <= share <= 1 for share in shares) or update["held_out"] > update["images"]:
            raise DamagedFile("its history is impossible")
    if update["kind"] == "background":
        _check_fields(update, _BACKGROUND)
    if update["kind"] == "rename" and len(update["classes"]) != 2:
        raise DamagedFile("its history renames something else than one class")
    if update["kind"] == "forget":
        _check_fields({"everywhere": 1} | update, {"everywhere": int})
    if not isinstance(update.get("joined", False), bool):
        raise DamagedFile(f"'joined' is {update['joined']!r:.80}")


def _check_fields(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse what lacks one of these fields, or has it of another type."""
    for name, hint in wanted.items():
        if name not in found:
            raise DamagedFile(f"'{name}' is missing")
        if not fits(found[name], hint) or (name in _COUNTS and not 0 <= found[name] < MOST):
            raise DamagedFile(f"'{name}' is {found[name]!r:.80}")


MOST = 2**53  # of anything that is counted; larger whole numbers are no longer exact as fractions


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of a type.

    >>> fits(2, float | None), fits(True, int), fits([1, "a"], list[int]), fits([1, 2], tuple[int, int])
    (True, False, False, True)
    """
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (UnionType, Union):
        return any(fits(value, each) for each in inner)
    if kind is Literal:
        return isinstance(value, str) and value in inner
    if kind is list:
        return isinstance(value, list) and all(fits(each, inner[0]) for each in value)
    if kind is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(fits, value, inner))
    if kind in (dict, Mapping):
        return isinstance(value, dict) and all(fits(each, inner[1]) for each in value.values())
    if hint is Any:
        return True
    if hint is float:
        return type(value) is float or (type(value) is int and abs(value) < MOST)
    return type(value) is hint


def is_text(value: Any) -> bool:
    """Whether all text in a value of JSON can be written as such: half of a character cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


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
        "margins": ("F32", (rows, NUM_SIGNALS)),
        "margin_rows": ("I64", (rows,)),
        "hidden": ("F32", (hidden, NUM_SIGNALS)),
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
