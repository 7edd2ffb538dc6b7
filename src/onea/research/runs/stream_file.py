# SPDX-License-Identifier: Apache-2.0
"""Streams as JSON files: exported for other people's code, and read back for runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from onea.errors import OneaError, truncate
from onea.files import DamagedFile, parse_json_object, read_regular
from onea.schema import Count, matches

if TYPE_CHECKING:  # a configuration is read without loading numpy
    from onea.data.dataset import Dataset, Split
    from onea.research.streams import Stream

FORMAT = "onea-stream-1"
SUFFIX = ".json"
_NAMES_OR_NUMBERS = list[str] | list[int]
_FIELDS: dict[str, Any] = {
    "class_order": _NAMES_OR_NUMBERS,
    "sizes": list[Count],
    "seed": int | None,
    "order": Literal["shuffled", "descending", "given"] | None,
    "names": list[str] | None,
    "samples": list[Count] | None,
    "train": dict[str, _NAMES_OR_NUMBERS] | None,
    "test": dict[str, _NAMES_OR_NUMBERS] | None,
}
_EXPORT = "`onea stream --json` writes one"


def export_stream(
    stream: Stream, seed: int, order: str, dataset: Dataset | None = None, train_rows: Iterable[int] = ()
) -> dict[str, Any]:
    """The content of the file of a stream.

    Args:
        stream: the stream.
        seed: seed of its class order and task order.
        order: how its tasks were ordered.
        dataset: its dataset; without one, classes are numbers and no images are listed.
        train_rows: rows of the training images that the stream has; fewer than all if it is long-tailed.

    >>> from onea.research.streams import Stream
    >>> export_stream(Stream((2, 0, 1), (2, 1)), seed=1, order="given")["class_order"]
    [2, 0, 1]
    """
    content = {"format": FORMAT, "seed": seed, "order": order, **stream.to_json()}
    if dataset is None:
        return content
    names = [dataset.classes[index] for index in stream.class_order]
    images = _images_by_class(dataset, names, train_rows)
    return content | {"class_order": names, "dataset": dataset.name, **images}


def read_stream_file(path: Path) -> dict[str, Any]:
    """The content of the file of a stream.

    Raises:
        OneaError: the file cannot be read, or is not a stream.
    """
    try:
        return parse_json_object(read_regular(path, follow=True))
    except DamagedFile as reason:
        raise OneaError(f"{path} is not the file of a stream ({reason}); {_EXPORT}.") from reason


def stream_options(content: dict[str, Any], name: str) -> dict[str, Any]:
    """The options of a run on the stream in a file.

    Args:
        content: the content of the file.
        name: the file, in an error message.

    Raises:
        OneaError: the content is not a stream.
    """
    if content.get("format") != FORMAT:
        raise OneaError(f"{name} is not the file of a stream (its 'format' is not '{FORMAT}'); {_EXPORT}.")
    if wrong := next((field for field, hint in _FIELDS.items() if not matches(content.get(field), hint)), None):
        raise OneaError(f"'{wrong}' is missing or wrong in the stream {name}; correct it, or export the stream again.")
    images = [content.get(split) for split in ("train", "test")]
    options = {
        "stream": "file",
        "order": content.get("order") or "given",
        "stream_file": {
            "class_order": content["class_order"],
            "sizes": content["sizes"],
            "names": content.get("names") or [],
            "samples": content.get("samples"),
            "images": _digest(*images) if all(images) else None,
        },
    }
    return options if content.get("seed") is None else options | {"seed": content["seed"]}


def stream_from_file(content: dict[str, Any], dataset: Dataset) -> Stream:
    """The stream of a configuration's ``stream_file`` on a dataset.

    Raises:
        OneaError: the dataset has other classes.
    """
    from onea.research.streams import Stream

    samples = content["samples"]
    return Stream(
        _class_ids(content["class_order"], dataset),
        tuple(content["sizes"]),
        tuple(content["names"]),
        None if samples is None else tuple(samples),
    )


def check_images(content: dict[str, Any], stream: Stream, dataset: Dataset, train_rows: Iterable[int]) -> None:
    """Refuse a dataset whose training or test images are not those that the file of its stream lists."""
    if content["images"] is None:
        return
    images = _images_by_class(dataset, [dataset.classes[index] for index in stream.class_order], train_rows)
    if _digest(images["train"], images["test"]) != content["images"]:
        raise OneaError(
            f"The stream lists other training or test images than '{dataset.name}' has; give the same data, or remove "
            "'train' and 'test' from the file to keep only the class order and the task sizes."
        )


def _class_ids(order: Sequence[str] | Sequence[int], dataset: Dataset) -> tuple[int, ...]:
    if len(order) != len(dataset.classes):
        raise OneaError(
            f"The stream has {len(order)} classes but '{dataset.name}' has {len(dataset.classes)}; give the dataset "
            "that the stream was made for."
        )
    known: dict[str | int, int] = {name: index for index, name in enumerate(dataset.classes)}
    known |= {index: index for index in range(len(order))}
    if unknown := [name for name in order if name not in known]:
        raise OneaError(
            f"The stream has class '{truncate(unknown[0])}', which '{dataset.name}' does not have; give the dataset "
            "that the stream was made for."
        )
    return tuple(known[name] for name in order)


def _images_by_class(dataset: Dataset, names: Sequence[str], train_rows: Iterable[int]) -> dict[str, Any]:
    """The training and test images of each class: names of files relative to their common folder, or row numbers."""
    root = ""
    if dataset.train.files is not None:
        files = [*dataset.train.files, *(dataset.test.files or ())]
        root = os.path.commonpath([file.absolute().parent for file in files])
    sides: dict[str, Any] = {}
    for side, split, rows in (
        ("train", dataset.train, train_rows),
        ("test", dataset.test, range(len(dataset.test))),
    ):
        images: dict[str, list[str | int]] = {name: [] for name in names}
        for row in rows:
            images[dataset.classes[split.labels[row]]].append(_image_name(split, row, root))
        sides[side] = images
    return sides


def _image_name(split: Split, row: int, root: str) -> str | int:
    return row if split.files is None else split.files[row].absolute().relative_to(root).as_posix()


def _digest(*sides: Any) -> str:
    return hashlib.sha256(json.dumps(sides, sort_keys=True).encode()).hexdigest()
