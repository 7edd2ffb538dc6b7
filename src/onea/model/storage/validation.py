# SPDX-License-Identifier: Apache-2.0
"""Validation of a model folder: checksums, versions, parameters, history, and the shapes and numbers of tensors.

Files may be damaged or malicious; the reason for refusing one becomes part of an error message. The same checks apply
before a version is written. The header of a tensor file is checked before its data is read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, BinaryIO, Literal, NotRequired, TypedDict, get_type_hints

import torch
from torch import Tensor

from onea import __version__
from onea.classifiers.familiarity import NUM_SIGNALS
from onea.data.transforms import Preprocess
from onea.errors import OneaError
from onea.files import DamagedFile, dump_with_checksum, parse_json_object, verify_checksum
from onea.model.calibration import MAX_SIGNALS_PER_CLASS
from onea.model.exemplars import MAX_FILE_BYTES
from onea.model.held_out import MAX_PER_CLASS
from onea.model.learning.background import MAX_FEATURES
from onea.model.learning.fingerprints import WORDS
from onea.model.names import UNKNOWN
from onea.model.parameters import MACHINE, Parameters, check_params, merging_options
from onea.model.state import background_images, classifier_for, empty_statistics, relabelled_images
from onea.model.storage.layout import FORMAT, LAST_VERSION
from onea.schema import MAX_NUMBER, Count, Range, ZeroToOne, matches, mismatch
from onea.tensors import Tensors

MAX_JSON_BYTES = 64 * 2**20  # of model.json or state.json: names of a million classes
_MAX_BLOCKS = 1000
_MAX_PATH = 4_096
_MAX_HEADER_BYTES = 16 * 2**20
_MAX_WIDTH = 16_384  # of the features of a network
_MAX_SIGNAL = 1e12  # the variance of larger signals overflows float32
_SIDES = range(1, 8193)  # of images, in pixels
_TEMPERATURES = Range(ge=1e-6, le=1e3)  # fitted temperatures lie between 0.001 and 1
_BLOCK = re.compile(r"adapter\.blocks\.([0-9]{1,4})\.")
_CHECKED_ROWS = 256  # of a tensor at a time
_TYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64}

Shapes = dict[str, tuple[str, tuple[int, ...]]]
_Number = Annotated[int, Range(ge=0)]
_Interval = tuple[float, float] | None


class _Manifest(TypedDict):
    versions: list[int]
    counter: int
    params: dict[str, Any]


class _Backbone(TypedDict):
    name: str
    sha256: str
    depth: NotRequired[int]
    licence: NotRequired[str]
    config: NotRequired[Any]


class _ExemplarFile(TypedDict):
    sha256: str
    images: Count
    size: Count


class _State(TypedDict):
    version: _Number
    id: str
    backbone: _Backbone
    preprocess: dict[str, Any]
    options: dict[str, Any]
    readout: str
    classes: list[str]
    adapter_images: dict[str, int]
    temperature: float
    calibration_images: _Number
    updates: list[dict[str, Any]]
    exemplars: dict[str, list[_ExemplarFile]]
    integer_labels: bool
    freedom: _Number
    sha256: str


class _Update(TypedDict):
    version: _Number
    kind: Literal["learn", "refresh", "forget", "rename", "background"]
    date: str
    classes: list[str]
    known: _Number


class _Training(_Update):
    name: str
    images: _Number
    held_out: _Number
    held_out_accuracy: ZeroToOne | None
    held_out_interval: _Interval
    overall_accuracy: ZeroToOne | None
    overall_interval: _Interval
    overall_images: _Number
    overall_classes: _Number
    overall_before: ZeroToOne | None
    cross_validated_accuracy: ZeroToOne | None
    cross_validated_interval: _Interval
    cross_validated_images: _Number
    cross_validated_before: ZeroToOne | None
    trained: bool
    replayed: _Number
    seconds: float


class _Learn(_Training):
    new_classes: _Number
    repeated: _Number
    skipped: _Number
    conflicts: _Number
    ignored_files: _Number
    group_folders: _Number
    few_photos: _Number
    fewest: dict[str, int]
    distinguished: bool
    relabelled_background: _Number


class _Background(_Update):
    name: str
    images: _Number
    resembling_known: _Number
    skipped: _Number
    seconds: float


class _Forget(_Update):
    everywhere: NotRequired[_Number]


class _Rename(_Update):
    merged: NotRequired[bool]


_UPDATES = {"learn": _Learn, "refresh": _Training, "background": _Background, "forget": _Forget, "rename": _Rename}


class UnsupportedFormat(DamagedFile):
    """The file has a format that this version of onea does not read."""


def dump(content: Mapping[str, Any]) -> bytes:
    """The content of a JSON file with these values and their checksum."""
    serialised = dump_with_checksum(content)
    if len(serialised) > MAX_JSON_BYTES:
        raise OneaError(f"The model has more than {MAX_JSON_BYTES >> 20} MB of names and history; use shorter names.")
    return serialised


def parse_manifest(content: bytes) -> tuple[tuple[int, ...], int, dict[str, Any]]:
    """Versions, counter and parameters in ``model.json``."""
    values = _load(content)
    _check(values, _Manifest)
    versions, counter = values["versions"], values["counter"]
    if not versions or versions[0] < 1 or any(old >= new for old, new in itertools.pairwise(versions)):
        raise DamagedFile("its versions do not increase")
    if not versions[-1] <= counter <= LAST_VERSION:
        raise DamagedFile(f"its counter is not between its last version and {LAST_VERSION:,}")
    return tuple(versions), counter, _params(values["params"])


def parse_state(content: bytes, version: int) -> dict[str, Any]:
    """The values in ``state.json`` of a version."""
    values = _load(content)
    if isinstance(values.get("updates"), list):
        for update in values["updates"]:
            _check_update(update)
    _check(values, _State)
    if values["version"] != version:
        raise DamagedFile(f"it has the version number {values['version']}")
    if not re.fullmatch("[0-9a-f]{32}", values["id"]):
        raise DamagedFile("it has no id")
    classes = values["classes"]
    if not _is_encodable(classes) or not _is_encodable(values["updates"]):
        raise DamagedFile("a name in it is not valid Unicode")
    if len(set(classes)) < len(classes) or UNKNOWN in classes or "" in classes:
        raise DamagedFile("the names of its classes are not unique")
    _check_exemplars(values["exemplars"], classes)
    if not all(0 < images < MAX_NUMBER for images in values["adapter_images"].values()):
        raise DamagedFile("its image counts of the adapter are invalid")
    if values["temperature"] not in _TEMPERATURES:
        raise DamagedFile("its temperature is invalid")
    values["backbone"] = _checked_backbone(values["backbone"])
    _check_preprocess(values["preprocess"])
    try:
        merging_options(values["options"])
        classifier_for(values["readout"])
    except OneaError as error:
        raise DamagedFile(f"{str(error).rstrip('.'):.300}") from error
    return values


def _check_exemplars(exemplars: Mapping[str, Sequence[Mapping[str, Any]]], classes: Sequence[str]) -> None:
    """Refuse stored copies of other classes, and names of files that are not hashes."""
    files = [file for files in exemplars.values() for file in files]
    if not exemplars.keys() <= set(classes) or not all(exemplars.values()):
        raise DamagedFile("its stored copies are of classes that do not exist")
    if any(set(file) != {"sha256", "images", "size"} for file in files):
        raise DamagedFile("its stored copies have unknown fields")
    if any(not re.fullmatch("[0-9a-f]{64}", file["sha256"]) or file["size"] > MAX_FILE_BYTES for file in files):
        raise DamagedFile("its stored copies are invalid")


def _load(content: bytes) -> dict[str, Any]:
    """The values of a JSON file of this format, if its checksum is correct."""
    values = parse_json_object(content)
    number = values.get("format")
    if not matches(number, Count):
        raise DamagedFile("it has no format")
    if number > FORMAT:  # type: ignore[operator]
        raise UnsupportedFormat(f"has format {number}, but onea {__version__} reads format {FORMAT}; update onea")
    if number < FORMAT:  # type: ignore[operator]
        raise UnsupportedFormat(f"was made before the first release of onea (format {number}); teach a new model")
    verify_checksum(values)
    return values


def _is_encodable(value: Any) -> bool:
    """Whether all text in a JSON value can be encoded; lone surrogates cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _params(values: dict[str, Any]) -> dict[str, Any]:
    """The parameters that are stored with a model, completed by defaults."""
    hints = get_type_hints(Parameters, include_extras=True)
    params = {name: default for name, default in Parameters.defaults().items() if name not in MACHINE}
    for name, value in values.items():
        if name not in params:
            raise UnsupportedFormat(
                f"has a parameter {name!r:.80}, which onea {__version__} does not have; update onea"
            )
        # In Python, 2.0 equals 2 and 1 equals True, so users may have set either.
        equivalents = [kind(value) for kind in (int, bool) if isinstance(value, int | float) and kind(value) == value]
        valid = [candidate for candidate in (value, *equivalents) if matches(candidate, hints[name])]
        if not valid:
            raise DamagedFile(f"its parameter '{name}' is {value!r:.80}")
        params[name] = valid[0]
    try:
        check_params(params)
    except OneaError as error:
        raise DamagedFile(f"{str(error).rstrip('.'):.300}") from error
    return params


def _checked_backbone(values: dict[str, Any]) -> dict[str, Any]:
    if not all(1 <= len(values[name]) <= _MAX_PATH for name in ("name", "sha256")):
        raise DamagedFile("its backbone has no name")
    if re.search(r"[/\\]", values["name"]):
        raise DamagedFile("the name of its backbone is a path")
    if not 1 <= values.get("depth", 1) <= _MAX_BLOCKS:
        raise DamagedFile(f"its backbone has {values['depth']} blocks")
    return {name: value for name, value in values.items() if name in get_type_hints(_Backbone)}


def _check_preprocess(values: dict[str, Any]) -> None:
    hints = get_type_hints(Preprocess) | {"side": int}
    if unknown := sorted(values.keys() - hints.keys()):
        raise DamagedFile(f"{unknown[0]!r:.80} is not a parameter of the preprocessing")
    for name in values.keys() | {"size", "mean", "std", "side"}:
        if name not in values:
            raise DamagedFile(f"'{name}' is missing")
        if problem := mismatch(values[name], hints[name], name):
            raise DamagedFile(problem)
    size, resize = values["size"], values.get("resize", 0)
    min_resize = 0 if values.get("geometry", "direct") == "direct" else size
    sizes_fit = size in _SIDES and values["side"] in _SIDES and min_resize <= resize <= _SIDES[-1]
    if not sizes_fit or min(values["std"]) <= 0:
        raise DamagedFile("its preprocessing of images is invalid")


def _check_update(update: Any) -> None:
    _check(update, _Update)
    _check(update, _UPDATES[update["kind"]])
    if update["kind"] == "learn" and update["held_out"] > update["images"]:
        raise DamagedFile("its history has more held-out images than taught ones")
    if update["kind"] == "rename" and len(update["classes"]) != 2:
        raise DamagedFile("its history has a renaming without exactly two names")


def _check(values: Any, fields: Any) -> None:
    if problem := mismatch(values, fields, "updates"):
        raise DamagedFile(problem)


def read_tensors(file: BinaryIO, size: int, state: Mapping[str, Any]) -> Tensors:
    """The tensors of a state; they are read only if their shapes match ``state.json``."""
    expected = check_shapes(file, size, state)
    file.seek(0)
    length = int.from_bytes(header := file.read(8), "little")
    header += file.read(length)
    digest, position, tensors = hashlib.sha256(header), 0, {}
    # Each tensor is read into its own memory, so that the content is never in memory twice.
    for name, (start, end) in sorted(_offsets(header[8:]).items(), key=lambda item: item[1]):
        kind, shape = expected[name]
        if (start, end) != (position, position + _TYPES[kind].itemsize * math.prod(shape)):
            raise DamagedFile("the tensors are not safetensors")
        data, position = bytearray(end - start), end
        if file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise DamagedFile("the tensor file has the wrong size")
        digest.update(data)
        tensors[name] = (
            torch.frombuffer(data, dtype=_TYPES[kind]).view(shape) if data else torch.empty(shape, dtype=_TYPES[kind])
        )
    if digest.hexdigest() != state["sha256"]:
        raise DamagedFile("the tensors changed")
    check_numbers(tensors)
    return tensors


def check_shapes(file: BinaryIO, size: int, state: Mapping[str, Any]) -> Shapes:
    """Compare the header of a safetensors file with the state; nothing else of the file is read."""
    declared, data_bytes = _read_header(file, size)

    def rows_of(name: str) -> int:
        """The declared number of rows of an optional tensor."""
        return declared[name][1][0] if name in declared and declared[name][1] else 0

    try:
        width = declared["prototypes"][1][1]
        signals = {name: declared[name][1][0] for name in ("held_out_signals", "left_out_signals")}
    except (KeyError, IndexError):
        raise DamagedFile("tensors are missing") from None
    classes, options, updates = len(state["classes"]), merging_options(state["options"]), state["updates"]
    if not 1 <= width <= _MAX_WIDTH or max(signals.values()) > MAX_SIGNALS_PER_CLASS * classes:
        raise DamagedFile(f"tensors of width {width} with {max(signals.values())} signals are invalid")
    expected: Shapes = {
        "prototypes": ("F32", (classes, width)),
        "counts": ("I64", (classes,)),
        "scatter": ("F64", (width, width)),
    }
    for name, rows in signals.items():
        expected |= {name: ("F32", (rows, NUM_SIGNALS)), f"{name[:-1]}_rows": ("I64", (rows,))}
    if background := _background_rows(rows_of("background"), updates):
        expected |= {"background": ("BF16", (background, width))}
    if taught := rows_of("fingerprints"):
        if taught > sum(update["images"] for update in updates if update["kind"] == "learn"):
            raise DamagedFile(f"it has more fingerprints ({taught}) than images")
        expected |= {"fingerprints": ("I64", (taught, WORDS)), "fingerprint_rows": ("I64", (taught,))}
    if held_out := rows_of("held_out_features"):
        if held_out > MAX_PER_CLASS * classes:
            raise DamagedFile(f"it has more held-out images ({held_out}) than can be stored")
        expected |= {"held_out_features": ("BF16", (held_out, options.views, width))}
        expected |= {"held_out_rows": ("I64", (held_out,)), "held_out_fingerprints": ("I64", (held_out, WORDS))}
    if (factors := empty_statistics(state["readout"], width).factors) is not None:
        shape = declared.get("factors", ("", ()))[1]
        directions = min(shape[1], factors.shape[1]) if len(shape) == 3 else 0
        expected |= {"factors": ("BF16", (classes, directions, width)), "cut": ("F64", (classes,))}
    count = (len(declared) - len(expected)) // 4
    for block in _adapter_blocks(declared, count, options.adapted_blocks) if options.train else ():
        expected |= {
            f"adapter.blocks.{block}.down.weight": ("F32", (options.rank, width)),
            f"adapter.blocks.{block}.down.bias": ("F32", (options.rank,)),
            f"adapter.blocks.{block}.up.weight": ("F32", (width, options.rank)),
            f"adapter.blocks.{block}.up.bias": ("F32", (width,)),
        }
    if unexpected := sorted(
        name for name in declared.keys() | expected.keys() if declared.get(name) != expected.get(name)
    ):
        raise DamagedFile(f"tensor {unexpected[0]!r:.80} does not have the expected type and shape")
    if data_bytes != sum(_TYPES[kind].itemsize * math.prod(shape) for kind, shape in expected.values()):
        raise DamagedFile("the tensor file has the wrong size")
    return expected


def _background_rows(declared: int, updates: Sequence[Mapping[str, Any]]) -> int:
    """The number of background images whose features are stored.

    The history determines it unless images were later taught as a class; then any possible number is accepted.
    """
    relabelled = relabelled_images(updates)
    upper = min(background_images(updates) + relabelled, MAX_FEATURES)
    return min(max(declared, upper - relabelled), upper)


def _adapter_blocks(declared: Shapes, count: int, adapted: int) -> range:
    """The blocks of the network with an adapter: all or, if ``adapted`` is not 0, this number of consecutive blocks."""
    if not adapted:
        return range(count)
    blocks = {int(match[1]) for name in declared if (match := _BLOCK.match(name))}
    if len(blocks) != adapted:
        raise DamagedFile(f"its adapter is for {len(blocks)} blocks instead of {adapted}")
    return range(min(blocks), min(blocks) + adapted)


def check_numbers(tensors: Mapping[str, Tensor]) -> None:
    """Raise an error for invalid numbers."""
    for name, tensor in tensors.items():
        # In parts, because the check needs memory as well.
        if tensor.is_floating_point() and not all(bool(part.isfinite().all()) for part in tensor.split(_CHECKED_ROWS)):
            raise DamagedFile(f"{name} contains NaN or infinity")
    counts = tensors["counts"]
    if bool(((counts < 1) | (counts >= MAX_NUMBER)).any()):
        raise DamagedFile("its numbers of images are invalid")
    for name in ("held_out_signal_rows", "left_out_signal_rows", "fingerprint_rows", "held_out_rows"):
        rows = tensors.get(name, counts[:0])
        if bool(((rows < 0) | (rows >= len(counts))).any()):
            raise DamagedFile(f"{name} refer to classes that do not exist")
    for name in ("held_out_signals", "left_out_signals"):
        if bool((tensors[name].abs() >= _MAX_SIGNAL).any()):
            raise DamagedFile(f"{name} are invalid")
    # No element of a scatter matrix exceeds the largest on the diagonal, which is not negative except for rounding.
    scatter = tensors["scatter"]
    largest = float(scatter.diagonal().max())
    possible = (scatter.abs() <= 1.001 * largest).all() & (scatter.diagonal() >= -1e-6 * largest).all()
    if not 0 <= largest < 1e100 or not bool(possible):
        raise DamagedFile("its scatter is invalid")
    if "cut" in tensors and bool((tensors["cut"] < 0).any()):
        raise DamagedFile("its truncated variances are negative")


def _offsets(header: bytes) -> dict[str, tuple[int, int]]:
    """Where the data of each tensor start and end, as a safetensors file declares."""
    declared = json.loads(header)
    declared.pop("__metadata__", None)
    try:
        offsets = {name: tuple(tensor["data_offsets"]) for name, tensor in declared.items()}
    except (KeyError, TypeError):
        raise DamagedFile("the tensors are not safetensors") from None
    if not all(len(pair) == 2 and all(type(value) is int for value in pair) for pair in offsets.values()):
        raise DamagedFile("the tensors are not safetensors")
    return offsets


def _read_header(file: BinaryIO, size: int) -> tuple[Shapes, int]:
    """Types and shapes that a safetensors file declares, and the number of bytes that follow."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(_MAX_HEADER_BYTES, size - 8):
        raise DamagedFile("the tensors are not safetensors")
    try:
        declared = json.loads(file.read(length))
        declared.pop("__metadata__", None)
        shapes = {name: (tensor["dtype"], tuple(tensor["shape"])) for name, tensor in declared.items()}
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        raise DamagedFile("the tensors are not safetensors") from None
    if not all(type(side) is int and side >= 0 for _, shape in shapes.values() for side in shape):
        raise DamagedFile("the tensors are not safetensors")
    return shapes, size - 8 - length
