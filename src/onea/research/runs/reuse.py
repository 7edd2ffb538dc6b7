# SPDX-License-Identifier: Apache-2.0
"""Checks of configuration, options, images and weights before a run is reused or resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from onea.data.dataset import Dataset, MissingData
from onea.errors import OneaError, truncate
from onea.options import with_defaults
from onea.research.methods import method_class
from onea.research.record import Record
from onea.research.runs.config import RunConfig
from onea.research.runs.setup import load_run_dataset, method_options, recorded_dataset_size, sha256_of_images
from onea.runtime import resolve_device
from onea.vit.backbones import load_backbone, weights_file_stamp


class InputChecker:
    """Compares the inputs of finished runs with the current ones; each dataset and each backbone is read at most once.

    If the sizes and times of all files are unchanged, nothing is read. Otherwise hashes of the packed pixels and of the
    weights are compared.
    """

    def __init__(self) -> None:
        self._loaded: dict[tuple[object, ...], Any] = {}

    def check(self, record: Record, config: RunConfig, folder: Path) -> list[str]:
        """Refuse a finished run if its inputs have changed.

        Returns:
            Remarks for the user, such as about inputs that could not be compared.

        Raises:
            OneaError: options, images or weights differ.
        """
        remarks: list[str] = []
        changes = [
            self._changed_options(record, config),
            self._changed_images(record, config, remarks),
            self._changed_weights(record, config, remarks),
        ]
        if changes := [change for change in changes if change]:
            raise OneaError(
                f"{folder} contains a finished run with {' and '.join(changes)}; choose another --out, or delete that "
                "folder to run it again."
            )
        return remarks + _precision_remarks(record, config)

    def _changed_options(self, record: Record, config: RunConfig) -> str:
        """Options whose value differs; options that only one of the two has cannot be compared."""
        options = method_options(config, recorded_dataset_size(record))
        recorded, current = record["options"], dataclasses.asdict(options)
        return ", ".join(
            f"{name} {recorded[name]} instead of {current[name]}"
            for name in sorted(recorded.keys() & current.keys())
            if recorded[name] != current[name]
        )

    def _changed_images(self, record: Record, config: RunConfig, remarks: list[str]) -> str:
        recorded, source = record["data"], (config.data, config.root)
        dataset = self._load_once(("dataset", *source), lambda: _load_dataset(config))
        if isinstance(dataset, MissingData):
            remarks.append(f"its images ({config.data}) were not found and could not be compared")
            return ""
        if isinstance(dataset, OneaError):
            return f"other images ({_reason(dataset)})"
        if dataset.fingerprint != recorded["fingerprint"]:
            return "other images (names, sizes or classes have changed)"
        if not isinstance(recorded.get("sha256"), dict) or dataset.stamp == _stamp(record, "data"):
            return ""
        size = record["preprocess"]["size"]
        key = ("pixels", *source, size, config.on_bad, config.store == "exact")
        hashes = self._load_once(key, lambda: sha256_of_images(config, dataset, size))
        if isinstance(hashes, OneaError):
            raise hashes
        changed = differing_names(recorded["sha256"], hashes)
        return f"other images (the pixels of {' and '.join(changed)} have changed)" if changed else ""

    def _changed_weights(self, record: Record, config: RunConfig, remarks: list[str]) -> str:
        name, stamp = config.backbone, weights_file_stamp(config.backbone)
        if not stamp:
            remarks.append(f"its weights ({name}) were not found and could not be compared")
        if not stamp or stamp == _stamp(record, "backbone"):
            return ""
        digest = self._load_once(("weights", name), lambda: load_backbone(name).digest)
        if isinstance(digest, OneaError):
            return f"other weights ({_reason(digest)})"
        return "" if digest == record["backbone"]["sha256"] else f"other weights (of {name})"

    def _load_once(self, key: tuple[object, ...], load: Callable[[], Any]) -> Any:
        """The result of loading, or the error that it raised."""
        if key not in self._loaded:
            try:
                self._loaded[key] = load()
            except OneaError as error:
                self._loaded[key] = error
        return self._loaded[key]


def _load_dataset(config: RunConfig) -> Dataset:
    try:
        return load_run_dataset(config, download=False)
    except MissingData:
        raise
    except OneaError:  # perhaps only the cache is not writable; an error of the data is raised again below
        return load_run_dataset(config, download=False, cached=False)


def _stamp(record: Record, name: str) -> str | None:
    """The stamp of an input; without one, hashes are compared."""
    stamps = record.get("stamps")
    return stamps.get(name) if isinstance(stamps, dict) else None


def _reason(error: OneaError) -> str:
    return str(error).rstrip(".")


def _precision_remarks(record: Record, config: RunConfig) -> list[str]:
    """A remark if ``auto`` selects another precision on this machine; a resumed run keeps its precision."""
    with suppress(OneaError):  # the device is not available
        recorded, current = record["runtime"]["precision"], resolve_device(config.device, config.precision)[1]
        if recorded != current:
            change = f"--precision {current} makes another run"
            return [f"it was computed in {recorded}, but auto selects {current} here; {change}"]
    return []


def check_same_run(record: Record, config: RunConfig, folder: Path) -> None:
    """Refuse a folder that holds the run of another configuration."""
    expected, recorded = config.identity(), record["config"]
    if names := differing_names(expected, recorded):
        changes = ", ".join(
            f"{name} {truncate(recorded.get(name))} instead of {truncate(expected.get(name))}" for name in names
        )
        raise OneaError(f"{folder} contains another run ({changes}); choose another --out or delete that folder.")


def check_same_inputs(record: Record, description: Record, folder: Path) -> None:
    """Refuse to resume a run on images, weights or options that have changed since it began.

    An option that the record lacks because it was added later has its default.
    """
    options_class = method_class(record["config"]["method"]).Options
    record = record | {"options": with_defaults(options_class, record["options"])}
    for what in ("data", "backbone", "preprocess", "stream", "options"):
        if record[what] != description[what]:
            names = ", ".join(differing_names(record[what], description[what]))
            raise OneaError(
                f"The {what} of the run in {folder} changed since it began ({names}); choose another --out."
            )


def differing_names(record: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The sorted names whose values differ."""
    return sorted(name for name in record.keys() | other.keys() if record.get(name) != other.get(name))
