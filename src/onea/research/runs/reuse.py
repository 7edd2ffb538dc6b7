# SPDX-License-Identifier: Apache-2.0
"""Whether a record may be reused or continued: its configuration, options, images and weights against those of now."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from onea.data.dataset import Dataset, MissingData
from onea.errors import OneaError, truncate
from onea.files import CHECKSUM
from onea.options import upgraded, with_defaults
from onea.research.methods import method_class
from onea.research.record import Record
from onea.research.runs.config import RunConfig
from onea.research.runs.setup import dataset_of, options_of, sha256_of_images, shape_of_record
from onea.runtime import resolve_device
from onea.vit.backbones import load_backbone, stamp_of_weights
from onea.vit.embedded import in_float16

T = TypeVar("T")
_VOLATILE = ("timings", "memory", "dates", "environment", "stamps", CHECKSUM)  # differ between two equal runs


class Inputs:
    """Compares finished runs with what they were made of; each dataset and each backbone is looked at once.

    Nothing is read where size and times of all files are what they were. Otherwise digests are compared: of the packed
    pixels, which are taken from the cache or packed again, and of the weights.
    """

    def __init__(self) -> None:
        self._datasets: dict[tuple[str, str | None], Dataset | OneaError] = {}
        self._images: dict[tuple[object, ...], dict[str, str]] = {}
        self._weights: dict[str, str | OneaError] = {}

    def check(self, record: Record, config: RunConfig, folder: Path) -> list[str]:
        """Refuse a finished run that was made of something else; returns what should be said about it all the same.

        Raises:
            OneaError: says what differs.
        """
        remarks: list[str] = []
        changes = [
            self._options(record, config),
            self._data(record, config, remarks),
            self._backbone(record, config, remarks),
        ]
        if found := [change for change in changes if change]:
            raise OneaError(
                f"{folder} holds a finished run with {' and '.join(found)}; choose another --out, or delete that "
                "folder to run it again."
            )
        return remarks + _precision(record, config)

    def _options(self, record: Record, config: RunConfig) -> str:
        """Presets change between versions; an option that only one of them has cannot be compared."""
        options = options_of(config, shape_of_record(record))
        then, now = upgraded(type(options), record["options"]), dataclasses.asdict(options)
        both = then.keys() & now.keys()
        names = different({name: then[name] for name in both}, {name: now[name] for name in both})
        return ", ".join(f"{name} {then[name]} instead of {now[name]}" for name in names)

    def _data(self, record: Record, config: RunConfig, remarks: list[str]) -> str:
        then, key = record["data"], (config.data, config.root)
        if key not in self._datasets:
            self._datasets[key] = _unless_wrong(lambda: _dataset(config))
        dataset = self._datasets[key]
        if isinstance(dataset, MissingData):
            remarks.append(f"its images ({config.data}) are not here and were not compared")
            return ""
        if isinstance(dataset, OneaError):
            return f"other images ({_reason(dataset)})"
        if dataset.fingerprint != then["fingerprint"]:
            return "other images (names, sizes or classes have changed)"
        if not isinstance(then.get("sha256"), dict) or dataset.stamp == _stamp(record, "data"):
            return ""
        size = record["preprocess"]["size"]
        which = (*key, size, config.on_bad, config.store == "exact")
        if which not in self._images:
            self._images[which] = sha256_of_images(config, dataset, size)
        sides = different(then["sha256"], self._images[which])
        return f"other images (the pixels of {' and '.join(sides)} have changed)" if sides else ""

    def _backbone(self, record: Record, config: RunConfig, remarks: list[str]) -> str:
        name, stamp = config.backbone, stamp_of_weights(config.backbone)
        if not stamp:
            remarks.append(f"its weights ({name}) are not here and were not compared")
        if not stamp or stamp == _stamp(record, "backbone"):
            return ""
        if name not in self._weights:
            self._weights[name] = _unless_wrong(lambda: load_backbone(name).digest)
        digest = self._weights[name]
        if isinstance(digest, OneaError):
            return f"other weights ({_reason(digest)})"
        if digest == (then := record["backbone"]["sha256"]):
            return ""
        return f"other weights (of {name}{', in float16 by then' if in_float16(name, then) else ''})"


def _dataset(config: RunConfig) -> Dataset:
    try:
        return dataset_of(config, fetch=False)
    except MissingData:
        raise
    except OneaError:  # perhaps only the cache cannot be written; if it is the data, that is said again
        return dataset_of(config, fetch=False, cached=False)


def _stamp(record: Record, name: str) -> str | None:
    """None for an older record, or one whose stamps are spoilt: then digests are compared."""
    stamps = record.get("stamps")
    return stamps.get(name) if isinstance(stamps, dict) else None


def _unless_wrong(look: Callable[[], T]) -> T | OneaError:
    try:
        return look()
    except OneaError as error:
        return error


def _reason(error: OneaError) -> str:
    return str(error).rstrip(".")


def _precision(record: Record, config: RunConfig) -> list[str]:
    """A run keeps the precision it began with wherever it is continued; who asks for ``auto`` elsewhere is told."""
    with suppress(OneaError):  # a device that is not here
        then, now = record["runtime"]["precision"], resolve_device(config.device, config.precision)[1]
        if then != now:
            return [f"it was computed in {then}, and auto is {now} here: --precision {now} makes a run of its own"]
    return []


def comparable_fields(record: Record) -> dict[str, Any]:
    """The fields of a record in which two runs with the same configuration agree, bit for bit."""
    return {key: copy.deepcopy(value) for key, value in record.items() if key not in _VOLATILE}


def check_same_run(record: Record, config: RunConfig, folder: Path) -> None:
    """Refuse to continue somebody else's run."""
    mine, theirs = config.identity(), record["config"]
    if names := different(mine, theirs):
        changes = ", ".join(
            f"{name} {truncate(theirs.get(name))} instead of {truncate(mine.get(name))}" for name in names
        )
        raise OneaError(f"{folder} holds another run ({changes}); choose another --out or delete that folder.")


def check_same_inputs(record: Record, description: Record, folder: Path) -> None:
    """Refuse to continue on images, weights or options that have changed since.

    An older record may not hold every digest or licence, nor the options that came later: it ran with their defaults.
    """
    kind = method_class(record["config"]["method"]).Options
    record = record | {"options": with_defaults(kind, record["options"])}
    data, backbone = ({name: description[what].get(name) for name in record[what]} for what in ("data", "backbone"))
    description = description | {"data": data, "backbone": backbone}
    for what in ("data", "backbone", "preprocess", "stream", "options"):
        if record[what] != description[what]:
            names = ", ".join(different(record[what], description[what]))
            raise OneaError(
                f"The {what} of the run in {folder} changed since it began ({names}); choose another --out."
            )


def different(record: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names under which two parts of records differ."""
    return sorted(name for name in record.keys() | other.keys() if record.get(name) != other.get(name))
