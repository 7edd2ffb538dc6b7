# SPDX-License-Identifier: Apache-2.0
"""The record of a run: its fields, which of them must be there, and its file with a checksum."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict, cast

from onea import __version__
from onea.errors import OneaError
from onea.files import (
    CHECKSUM,
    DamagedFile,
    dump_with_checksum,
    gunzip,
    parse_json_object,
    read_regular,
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


def find_record_files(root: Path) -> list[Path]:
    """The files of all records in a folder and anywhere below it, ordered by path."""
    return sorted({record_path(path.parent) for name in FILES for path in root.rglob(name)})


def read_record_file(path: Path) -> Record:
    """The record in a file, of this format or an older one.

    Raises:
        OneaError: it is not what was written, or no record that can be read here.
    """
    content = read_regular(path, follow=True)
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
        return gunzip(content)
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


_NUMBER = int | float
_MOST = 2**53  # of any number: beyond, not every whole number can be told from the next
_STEPS = {"A": [_NUMBER], "balanced_A": [_NUMBER], "matrix": [[_NUMBER | None]]}

# What tables, curves and pages read; a name with a question mark may be missing.
_SHOWN: dict[str, Any] = {
    "status": str,
    "config": {"method": str, "seed": int, "options?": dict},
    "data": {"name": str, "classes?": [str], "train_images?": int, "test_images?": int, "skipped?": list},
    "backbone": {"name": str, "input?": int, "width?": int, "licence?": str},
    "stream": {"class_order": [int], "sizes": [int], "names?": [str], "samples?": [int]},
    "options?": dict,
    "runtime?": dict,
    "environment?": dict,
    "total": [int],
    "tasks": [{"name": str, "classes": int, "images": int}],
    "metrics": _STEPS
    | {"A_T": _NUMBER, "mean_A": _NUMBER, "weighted_mean_A": _NUMBER, "F": _NUMBER | None, "balanced_A_T?": _NUMBER},
    "open_set?": [_NUMBER | None],
    "cost?": [{"flops_per_image": _NUMBER, "passes_per_image": _NUMBER, "state_bytes": _NUMBER}],
    "timings": {"learn_s": [_NUMBER], "evaluate_s": [_NUMBER]},
    "dates?": {"resumed?": [str]},
}
# What is read besides when a run is continued.
_CONTINUED: dict[str, Any] = {
    "data": {"fingerprint": str, "task_images?": int},
    "backbone": {"sha256": str, "width": int},
    "preprocess": {"size": int},
    "options": dict,
    "runtime": {"precision": str, "threads": int},
    "correct": [[int]],
    "cost": list,
    "memory": {"peak_bytes": list},
    "dates": {"resumed": list, "finished": str | None},
    "checkpoint": {"file": str, "sha256": str},
}


def is_reportable(record: Any) -> bool:
    """Whether a report can be made of it: every finished task has left its part, and the stream fits the classes."""
    if not _fits(record, _SHOWN) or record["status"] not in ("running", "finished"):
        return False
    sizes, metrics = record["stream"]["sizes"], record["metrics"]
    steps = len(record["tasks"])
    parts = (*(metrics[name] for name in _STEPS), *record["timings"].values(), *metrics["matrix"])
    if any(not isinstance(part, list) or len(part) != steps for part in parts) or not 1 <= steps <= len(sizes):
        return False
    if record.get("open_set") and not _open_set(record["open_set"], steps):
        return False
    classes = {len(record["total"]), len(record["stream"]["class_order"]), sum(sizes)}
    return min(sizes) >= 1 and len(classes) == 1 and _compared(record, list(accumulate(sizes))[:steps])


def _open_set(areas: list[float | None], steps: int) -> bool:
    """Whether there is an area in percent after each task."""
    return len(areas) == steps and all(area is None or 0 <= area <= 100 for area in areas)


def _compared(record: Any, seen: list[int]) -> bool:
    """Whether the counts of further classifiers, where there are any, are of the classes seen after each task."""
    counts = record.get("classifiers") or {}
    if not isinstance(counts, dict) or not all(_fits(steps, [[int]]) for steps in counts.values()):
        return False
    return all([len(step) for step in steps] == seen and _possible(steps, record["total"]) for steps in counts.values())


def _possible(steps: list[list[int]], total: list[int]) -> bool:
    """Whether no class has more right answers than images."""
    return all(0 <= right <= total[row] for step in steps for row, right in enumerate(step))


def is_resumable(record: Any) -> bool:
    """Whether a run can go on from it; the name of its checkpoint leads nowhere else."""
    if not is_reportable(record) or not _fits(record, _CONTINUED):
        return False
    steps, file = len(record["tasks"]), record["checkpoint"]["file"]
    return {len(record["correct"]), len(record["memory"]["peak_bytes"])} == {steps} and Path(file).name == file


def _fits(value: Any, shape: Any) -> bool:
    """Whether a value from JSON has a shape: a type, a list of one shape, or a dictionary with these keys and more.

    >>> _fits({"a": [1, 2.5]}, {"a": [_NUMBER], "b?": str}), _fits({"a": None}, {"a?": int}), _fits(True, int)
    (True, True, False)
    """
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(_has(value, name, inner) for name, inner in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(item, shape[0]) for item in value)
    if isinstance(value, bool) or not isinstance(value, shape):
        return False
    return not isinstance(value, int | float) or abs(value) < _MOST  # which NaN is not


def _has(value: dict[str, Any], name: str, shape: type | UnionType | list[Any] | dict[str, Any]) -> bool:
    """Whether there is such a part; nothing is as good as none where it may be missing."""
    plain = name.removesuffix("?")
    return (plain != name and value.get(plain) is None) or (plain in value and _fits(value[plain], shape))
