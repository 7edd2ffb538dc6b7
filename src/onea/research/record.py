# SPDX-License-Identifier: Apache-2.0
"""The record of a run: its file with a checksum, and the fields that reports and resumed runs need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, cast

from onea import __version__
from onea.errors import OneaError
from onea.files import (
    DamagedFile,
    dump_with_checksum,
    gunzip,
    parse_json_object,
    read_regular,
    verify_checksum,
    write_atomically,
)
from onea.schema import Count, Range, matches

NAME = "record.json"
_COMPRESSED = f"{NAME}.gz"
FILES = (NAME, _COMPRESSED)
"""File names of a record: uncompressed, or compressed by ``gzip``."""
FORMAT = 2  # format 1 had no checksum


class Record(TypedDict, total=False):
    """The content of a record, as in its JSON file. Older records may lack fields that were added later.

    >>> record: Record = {"status": "finished", "metrics": {"A_T": 81.2}}
    >>> record["metrics"]["A_T"]
    81.2

    Attributes:
        format: version of this schema.
        status: ``running`` until the last task is learned, then ``finished``.
        config: the configuration of the run.
        options: all options of the method, from its preset and the configuration.
        data: name, classes, counts, fingerprint and digests of the images.
        backbone: name, source, hash and licence of the weights.
        preprocess: sizes, interpolation and normalisation of images.
        stream: class order, task sizes and names, images per class.
        runtime: device, precision, threads, compilation.
        total: test images of each class, by position in the stream.
        correct: after each task, the number of correct predictions for each class seen.
        classifiers: ``correct`` of each compared classifier, by name.
        open_set: with ``--open-set``, after each task the AUROC in percent of test images of seen against unseen
            classes; None after the last task.
        tasks: for each task, its numbers of classes and images, its training and its merge.
        metrics: the metrics that ``onea.metrics.summarise`` computes from the counts.
        cost: after some tasks, FLOPs and forward passes per image, and bytes of state.
        timings: seconds of learning and evaluation of each task.
        memory: peak memory of host and device.
        dates: when the run was started, resumed and finished.
        environment: versions of packages, commit and machine.
        stamps: modification times and sizes of the files that were read, a cheap check for changes.
        checkpoint: file name and hash of the state after the last task.
        content_sha256: checksum of the record.
        title: name of the run in a report.
        group: heading of the run in a report.
        paper: link to the paper of the method, in a report.
        note: remark about the run in a report.
    """

    format: int
    status: str
    config: dict[str, Any]
    options: dict[str, Any]
    data: dict[str, Any]
    backbone: dict[str, Any]
    preprocess: dict[str, Any]
    stream: dict[str, Any]
    runtime: dict[str, Any]
    total: list[int]
    correct: list[list[int]]
    classifiers: dict[str, list[list[int]]]
    open_set: list[float | None]
    tasks: list[dict[str, Any]]
    metrics: dict[str, Any]
    cost: list[dict[str, Any]]
    timings: dict[str, list[float]]
    memory: dict[str, Any]
    dates: dict[str, Any]
    environment: dict[str, Any]
    stamps: dict[str, Any]
    checkpoint: dict[str, Any]
    content_sha256: str
    title: str
    group: str
    paper: str
    note: str


_STATE = r"state-\d{3,}\.safetensors"
_LEFTOVER = re.compile(rf"{_STATE}|\.({_STATE}|record\.json|failure\.json)\.\d+\.partial")


def read_record(folder: Path) -> Record | None:
    """The record in a run's folder, or None before the first task is finished."""
    path = record_path(folder)
    return read_record_file(path) if path.exists() else None


def record_path(folder: Path) -> Path:
    """The path of the record in a run's folder; that of the compressed file only if there is no other."""
    plain, compressed = (folder / name for name in FILES)
    return compressed if compressed.exists() and not plain.exists() else plain


def find_record_files(root: Path) -> list[Path]:
    """The paths of all records in and below a folder, sorted."""
    return sorted({record_path(path.parent) for name in FILES for path in root.rglob(name)})


def read_record_file(path: Path) -> Record:
    """The record in a file.

    Raises:
        OneaError: the file is damaged, or its format is unknown.
    """
    content = read_regular(path, follow=True)
    try:
        record = parse_json_object(gunzip(content) if path.suffix == ".gz" else content)
        if record.get("format") == FORMAT:
            verify_checksum(record)
    except (DamagedFile, ValueError) as reason:
        raise OneaError(
            f"{path} is damaged ({reason}); restore it from a backup, or delete that folder to run it again."
        ) from reason
    if record.get("format") != FORMAT:
        raise OneaError(f"{path} is not a record that onea {__version__} reads; move it elsewhere.")
    return cast("Record", record)


def write_record(folder: Path, record: Record) -> None:
    """Replace the record in a run's folder."""
    write_atomically(folder / NAME, dump_with_checksum(record | {"format": FORMAT}))
    (folder / _COMPRESSED).unlink(missing_ok=True)


def leftovers(folder: Path, record: Record | None = None) -> list[Path]:
    """Checkpoints and partial files in a run's folder that its record does not refer to."""
    needed = record["checkpoint"]["file"] if record else None
    return [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name) and path.name != needed]


def remove_leftovers(folder: Path, record: Record) -> None:
    """Remove files that the record does not refer to. The caller must hold the folder's lock."""
    for path in leftovers(folder, record):
        with suppress(OSError):  # a folder with that name
            path.unlink(missing_ok=True)


class _Task(TypedDict):
    name: str
    classes: int
    images: int


class _Cost(TypedDict):
    flops_per_image: float
    passes_per_image: float
    state_bytes: float


_JSON = dict[str, Any]
# Fields by dotted name. A field whose type includes None may be missing.
_REPORTED_FIELDS: dict[str, Any] = {
    "status": Literal["running", "finished"],
    "config.method": str,
    "config.seed": int,
    "config.options": _JSON | None,
    "data.name": str,
    "data.classes": list[str] | None,
    "data.train_images": int | None,
    "data.test_images": int | None,
    "data.skipped": list[Any] | None,
    "backbone.name": str,
    "backbone.input": int | None,
    "backbone.width": int | None,
    "backbone.licence": str | None,
    "stream.class_order": list[int],
    "stream.sizes": list[Count],
    "stream.names": list[str] | None,
    "stream.samples": list[int] | None,
    "options": _JSON | None,
    "runtime": _JSON | None,
    "environment": _JSON | None,
    "total": list[int],
    "tasks": list[_Task],
    "metrics.A": list[float],
    "metrics.balanced_A": list[float],
    "metrics.matrix": list[list[float | None]],
    "metrics.A_T": float,
    "metrics.mean_A": float,
    "metrics.weighted_mean_A": float,
    "metrics.F": float | None,
    "metrics.balanced_A_T": float | None,
    "classifiers": dict[str, list[list[int]]] | None,
    "open_set": list[Annotated[float, Range(ge=0, le=100)] | None] | None,
    "cost": list[_Cost] | None,
    "timings.learn_s": list[float],
    "timings.evaluate_s": list[float],
    "dates": _JSON | None,
    "dates.resumed": list[str] | None,
}
_RESUMED_FIELDS: dict[str, Any] = {
    "data.fingerprint": str,
    "data.task_images": int | None,
    "backbone.sha256": str,
    "backbone.width": int,
    "preprocess.size": int,
    "options": _JSON,
    "runtime.precision": str,
    "runtime.threads": int,
    "correct": list[list[int]],
    "cost": list[_Cost],
    "memory.peak_bytes": list[Any],
    "dates.resumed": list[str],
    "dates.finished": str | None,
    "checkpoint.file": str,
    "checkpoint.sha256": str,
}


def is_reportable(record: Any) -> bool:
    """Whether a report can be made of a record: its fields are complete and their lengths agree."""
    if not _has_fields(record, _REPORTED_FIELDS):
        return False
    sizes, metrics, steps = record["stream"]["sizes"], record["metrics"], len(record["tasks"])
    per_step = [metrics["A"], metrics["balanced_A"], metrics["matrix"], *metrics["matrix"], *record["timings"].values()]
    if record.get("open_set"):
        per_step.append(record["open_set"])
    if not 1 <= steps <= len(sizes) or any(not isinstance(part, list) or len(part) != steps for part in per_step):
        return False
    if {len(record["total"]), len(record["stream"]["class_order"])} != {sum(sizes)}:
        return False
    num_classes = list(accumulate(sizes))[:steps]
    counts = (record.get("classifiers") or {}).values()
    return all(_are_possible_counts(correct, record["total"], num_classes) for correct in counts)


def is_resumable(record: Any) -> bool:
    """Whether a run can be resumed from a record; its checkpoint is a file in the same folder."""
    if not is_reportable(record) or not _has_fields(record, _RESUMED_FIELDS):
        return False
    steps, file = len(record["tasks"]), record["checkpoint"]["file"]
    return len(record["correct"]) == len(record["memory"]["peak_bytes"]) == steps and Path(file).name == file


def _are_possible_counts(correct: list[list[int]], total: list[int], num_classes: list[int]) -> bool:
    """Whether each class seen after each task has a number of correct predictions, at most its number of images."""
    return [len(counts) for counts in correct] == num_classes and all(
        0 <= count <= images for counts in correct for count, images in zip(counts, total, strict=False)
    )


def _has_fields(record: Any, fields: Mapping[str, Any]) -> bool:
    """Whether a record has fields of these types.

    >>> _has_fields({"data": {"name": "toy"}}, {"data.name": str, "data.skipped": list[Any] | None})
    True
    >>> _has_fields({"data": None}, {"data.name": str})
    False
    """
    for name, hint in fields.items():
        value = record
        for key in name.split("."):
            if value is not None and not isinstance(value, dict):
                return False
            value = (value or {}).get(key)
        if not matches(value, hint):
            return False
    return True
