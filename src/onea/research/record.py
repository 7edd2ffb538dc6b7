# SPDX-License-Identifier: Apache-2.0
"""The record of a run: what is in it, and its file, sealed by a checksum so that no figure can change unnoticed."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict, cast

from onea import __version__
from onea.errors import OneaError
from onea.files import (
    CHECKSUM,
    DamagedFile,
    decompressed,
    dump_with_checksum,
    parse_json_object,
    read_plain,
    verify_checksum,
    write_atomically,
)

NAME = "record.json"
_COMPRESSED = f"{NAME}.gz"
FILES = (NAME, _COMPRESSED)
"""Where a record may be: as it was written, or compressed by ``gzip`` to be kept in a third of the space."""
FORMAT = 2  # 1 had no checksum


class Record(TypedDict, total=False):
    """Everything about a run, as its JSON file has it; the older formats lack what came later.

    >>> record: Record = {"status": "finished", "metrics": {"A_T": 81.2}}
    >>> record["metrics"]["A_T"]
    81.2

    Attributes:
        format: version of this schema.
        status: ``running`` until the last task is learned, then ``finished``.
        config: the configuration as it was asked for.
        options: of the method, as preset and configuration resolve them.
        data: name, classes, counts, fingerprint and digests of the images.
        backbone: name, source, hash and licence of the weights.
        preprocess: sizes, interpolation and normalisation of images.
        stream: class order, task sizes and names, images per class.
        runtime: device, precision, threads, compilation.
        total: test images of each class, by position in the stream.
        correct: after each task, the right test images of each class seen.
        classifiers: the same for each further classifier that was compared, by name.
        open_set: with ``--open-set``, after each task the AUROC in percent of test images of classes seen against those
            of classes yet to come; None where there are none.
        tasks: a report of each task: its classes and images, training, merge.
        metrics: what ``onea.metrics.summarise`` makes of the counts.
        cost: after each task, operations and passes of an answer, bytes of state.
        timings: seconds of each task, learning and evaluating.
        memory: peaks of host and device.
        dates: when it was started, resumed and finished.
        environment: versions, commit and machine.
        stamps: times and sizes of the files that it used, to see cheaply whether they are the same.
        checkpoint: file and hash of the state after the last task.
        content_sha256: the checksum.
        title: name in a report, given by whoever makes it.
        group: heading in a report, likewise.
        paper: link to the method's paper, likewise.
        note: a sentence for the reader, likewise.
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
_LEFT = re.compile(rf"{_STATE}|\.({_STATE}|record\.json|failure\.json)\.\d+\.partial")


def read_record(folder: Path) -> Record | None:
    """The record in a run's folder, or None where no task has been finished yet."""
    path = record_path(folder)
    return read_record_file(path) if path.exists() else None


def record_path(folder: Path) -> Path:
    """The file of the record in a run's folder, compressed if there is no other."""
    plain, compressed = (folder / name for name in FILES)
    return compressed if compressed.exists() and not plain.exists() else plain


def records_below(root: Path) -> list[Path]:
    """The files of all records in a folder and anywhere below it, ordered by path."""
    return sorted({record_path(path.parent) for name in FILES for path in root.rglob(name)})


def read_record_file(path: Path) -> Record:
    """The record in a file, of this format or an older one.

    Raises:
        OneaError: it is not what was written, or no record that can be read here.
    """
    content = read_plain(path, follow=True)
    try:
        record = parse_json_object(_unpacked(content) if path.suffix == ".gz" else content)
        if record.get("format") == FORMAT or CHECKSUM in record:
            verify_checksum(record)
    except DamagedFile as reason:
        raise OneaError(
            f"{path} is damaged ({reason}); restore it from a copy, or delete that folder to run it again."
        ) from reason
    if record.get("format") not in range(1, FORMAT + 1):
        raise OneaError(f"{path} is not a record that this onea ({__version__}) reads; move it out of the way.")
    return cast("Record", record)


def _unpacked(content: bytes) -> bytes:
    try:
        return decompressed(content)
    except ValueError as reason:
        raise DamagedFile(str(reason)) from None


def write_record(folder: Path, record: Record) -> None:
    """Replace the record in a run's folder."""
    write_atomically(folder / NAME, dump_with_checksum(record | {"format": FORMAT}))
    (folder / _COMPRESSED).unlink(missing_ok=True)


def leftovers(folder: Path, record: Record | None = None) -> list[Path]:
    """Files in a run's folder that its record, if there is one, does not need: states and parts of files."""
    needed = record["checkpoint"]["file"] if record else None
    return [place for place in folder.iterdir() if _LEFT.fullmatch(place.name) and place.name != needed]


def tidy(folder: Path, record: Record) -> None:
    """Remove what the record does not need. Needs the lock."""
    for place in leftovers(folder, record):
        with suppress(OSError):  # somebody has put a folder there
            place.unlink(missing_ok=True)
