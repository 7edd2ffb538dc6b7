"""The file of a record: sealed by a checksum, so that no figure in it can change unnoticed."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from onea import sealed
from onea.errors import OneaError
from onea.files import read_plain, write_atomically
from onea.version import __version__

NAME = "record.json"
FORMAT = 2  # 1 had no checksum

Record = dict[str, Any]

_STATE = r"state-\d{3,}\.safetensors"
_LEFT = re.compile(rf"{_STATE}|\.({_STATE}|record\.json|failure\.json)\.\d+\.partial")


def read_record(folder: Path) -> Record | None:
    """The record in a run's folder, or None where no task has been finished yet."""
    path = folder / NAME
    return read_record_file(path) if path.exists() else None


def read_record_file(path: Path) -> Record:
    """The record in a file, of this format or an older one.

    Raises:
        OneaError: it is not what was written, or no record that can be read here.
    """
    content = read_plain(path, follow=True)
    try:
        record = sealed.parsed(content)
        if record.get("format") == FORMAT or sealed.SEAL in record:
            sealed.check_seal(record)
    except sealed.Damage as reason:
        raise OneaError(
            f"{path} is damaged ({reason}); restore it from a copy, or delete that folder to run it again."
        ) from reason
    if record.get("format") not in range(1, FORMAT + 1):
        raise OneaError(f"{path} is not a record that this onea ({__version__}) reads; move it out of the way.")
    return record


def write_record(folder: Path, record: Record) -> None:
    """Replace the record in a run's folder."""
    write_atomically(folder / NAME, sealed.seal(record | {"format": FORMAT}))


def leftovers(folder: Path, record: Record | None = None) -> list[Path]:
    """What runs have left in their folder and the record, if there is one, does not need: states and parts of files."""
    needed = record["checkpoint"]["file"] if record else None
    return [place for place in folder.iterdir() if _LEFT.fullmatch(place.name) and place.name != needed]


def tidy(folder: Path, record: Record) -> None:
    """Remove what the record does not need. Needs the lock."""
    for place in leftovers(folder, record):
        with suppress(OSError):  # somebody has put a folder there
            place.unlink(missing_ok=True)
