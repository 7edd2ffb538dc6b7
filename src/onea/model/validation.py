# SPDX-License-Identifier: Apache-2.0
"""What the JSON files of a model folder may say: checksums, versions, parameters and history.

With ``onea.model.tensor_validation`` the one place that judges it. A file may be damaged, or made by somebody who means
harm; either way it ends here, with a reason that becomes one sentence. The same checks are made before a version is
written, so that none is ever written that could not be read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any, Literal, get_type_hints

from onea import __version__
from onea.data.transforms import Preprocess
from onea.errors import OneaError
from onea.files import DamagedFile, dump_with_checksum, parse_json_object, verify_checksum
from onea.model.json_types import MOST, fits, is_text
from onea.model.layout import FORMAT, LAST_VERSION
from onea.model.names import UNKNOWN
from onea.model.params import MACHINE, Parameters, check_params
from onea.model.recipe import options_of
from onea.model.state import classifier_for

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
