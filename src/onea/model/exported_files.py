# SPDX-License-Identifier: Apache-2.0
"""Where exported files go: their names, which files they may replace, and what a killed export left."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from onea.errors import OneaError
from onea.files import check_writable, read_json, unwritable
from onea.locks import file_lock
from onea.model.layout import named

ENDINGS: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2"}
_KIND = ("precision", "input")  # facts in which two exports of one format differ
_REMEDY = "choose another place with -o"
_FORCE = f"{_REMEDY}, or replace it with --force"


def default_place(model: Path, to: str, precision: str) -> Path:
    """The file beside a model folder that an export goes to.

    >>> str(default_place(Path("shop.onea"), "onnx", "int8")), str(default_place(Path("shop.onea"), "torch", "fp32"))
    ('shop-int8.onnx', 'shop.pt2')
    """
    folder = named(model)
    suffix = "" if precision == "fp32" else f"-{precision}"
    return folder.with_name(folder.name.removesuffix(".onea") + suffix + ENDINGS[to])


def description_of(path: Path) -> Path:
    """The JSON file beside an exported file that describes it."""
    return path.with_name(f"{path.name}.json")


def check_place(path: Path, to: str, facts: Mapping[str, Any], force: bool) -> None:
    """Refuse a place that cannot be written, or has anything but an earlier export of this kind and precision.

    Args:
        path: of the file.
        to: its format.
        facts: what its description will tell.
        force: replace whatever file is there.
    """
    ending, description = ENDINGS[to], description_of(path)
    if path.is_dir():
        raise OneaError(f"{path} is a folder; name a file in it, such as {path / 'model'}{ending}.")
    if not force and path.exists() and path.suffix != ending:
        raise OneaError(f"{path} is there already and is no {ending} file; {_FORCE}.")
    if not force and (path.exists() or description.exists()):
        earlier = _facts(description)
        if earlier is None:
            there = path if path.exists() else description
            raise OneaError(f"{there} is there already and is no file of an earlier export; {_FORCE}.")
        for name in _KIND:
            if earlier[name] != facts[name]:
                raise OneaError(f"{path} is there already, and its {name} is {earlier[name]}; {_FORCE}.")
    check_writable(path.parent)


def _facts(description: Path) -> dict[str, Any] | None:
    """What the description of an earlier export tells; None if it is none."""
    with suppress(OneaError):
        found = read_json(description)
        if isinstance(found, dict) and all(isinstance(found.get(name), str) for name in _KIND):
            return found
    return None


@contextmanager
def making(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` for files that are to be complete before they go there; it is removed afterwards.

    One export of a file at a time has it. So whatever other folder of this kind is there is of an export that was
    killed, and is removed.

    Raises:
        OneaError: another process exports to this file, or there is no room.
    """
    lock = path.with_name(f".{path.name}.lock")
    with file_lock(lock, remedy=_REMEDY):
        ours = re.compile(rf"\.{re.escape(path.name)}\.\w+\.partial")
        try:
            for left in path.parent.iterdir():
                if ours.fullmatch(left.name):
                    shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(".partial", f".{path.name}.", path.parent) as folder:
                yield Path(folder)
        except OSError as error:
            raise unwritable(path.parent, 0, error, _REMEDY) from error
        finally:
            with suppress(OSError):  # Windows does not remove what is open
                lock.unlink()


def put(file: Path, place: Path) -> None:
    """Put a complete file into its place, where the file that it replaces is whole until then."""
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
    file.replace(place)
