# SPDX-License-Identifier: Apache-2.0
"""Where things lie in a model folder, and which of them are ours to replace or remove.

model.json                    format, valid versions (the last one is the present), parameters
states/000007/state.json      classes, updates, backbone, options, calibration
states/000007/state.safetensors
README.md, history.png        the model card
lock                          of the process that writes

A folder may come from anybody. So a name of ours that is a link, a pipe or a device is refused, and nothing is ever
removed but our own names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onea.errors import OneaError
from onea.files import MODEL_FILE, check_regular, check_writable, sync_folder, write_atomically
from onea.locks import file_lock

MANIFEST, STATES, LOCK = MODEL_FILE, "states", "lock"
CARD, PICTURE = "README.md", "history.png"
STATE, TENSORS = "state.json", "state.safetensors"
FORMAT = 5  # of model.json and state.json
LAST_VERSION = 999_999  # names of versions have six digits
_VERSION = "[0-9]" * 6
FILES = (MANIFEST, f"{STATES}/{_VERSION}/{STATE}", f"{STATES}/{_VERSION}/{TENSORS}")  # that make a model, as globs
# Says that the versions beside it belong to a first save that has not ended; without it they would belong to a model
# whose model.json was lost, and nobody may overwrite those.
_BEGUN = ".first-save.partial"
_VERSIONS = re.compile(rf"{_VERSION}|\.partial-\w+")  # whole or half written


def _partial_of(*names: str) -> re.Pattern[str]:
    """Matches what ``write_atomically`` leaves of these files when it is killed."""
    return re.compile(rf"\.({'|'.join(map(re.escape, names))})\.[0-9]+\.partial")


_FILES, _PARTIAL_FILES = (MANIFEST, CARD, PICTURE, LOCK), _partial_of(MANIFEST, CARD, PICTURE, _BEGUN)
_STATE_FILES = (STATE, TENSORS, CARD, PICTURE)  # versions used to have a card of their own
_PARTIAL_STATE_FILES = _partial_of(*_STATE_FILES)


def state_folder(path: Path, version: int) -> Path:
    """Where a version lies."""
    return path / STATES / f"{version:06d}"


def named(path: Path) -> Path:
    """The same folder as a path that ends in its name, where it was given as ``.`` or ``..``, too.

    >>> named(Path("shop.onea")).name, named(Path(".")) == Path.cwd().resolve()
    ('shop.onea', True)
    """
    return path if path.name not in ("", "..") else path.resolve()


def holds_model(path: Path) -> bool:
    """Whether a folder holds a model, of whatever format."""
    return os.path.lexists(path / MANIFEST)


def check_can_hold(path: Path) -> None:
    """Refuse a folder that a model cannot be written to: one with links of our names, or with something else in it."""
    if not path.exists():
        return
    for place in _our_files(path):
        check_regular(place)
    if holds_model(path):
        return
    names = {place.name for place in _entries(path)}
    if (versions := list(_our_versions(path))) and _BEGUN not in names:
        raise OneaError(
            f"{path} has versions of a model ({versions[0].name}) and no {MANIFEST}; restore it from a copy, or choose "
            "another folder."
        )
    if any(name not in (LOCK, STATES, _BEGUN) and not _PARTIAL_FILES.fullmatch(name) for name in names):
        raise OneaError(f"{path} is not empty and holds no model; choose another folder.")


def begin(path: Path) -> None:
    """Note that the first save begins."""
    if not holds_model(path):
        write_atomically(path / _BEGUN, b"")
        sync_folder(path)


def tidy(path: Path, versions: Collection[int]) -> None:
    """Remove what no longer counts: versions other than these, and what was left half written. Needs the lock."""
    kept = {state_folder(path, version) for version in versions}
    for version in _our_versions(path):
        if version not in kept:
            remove_version(version)
    for place in _entries(path):
        if place.name == _BEGUN or _PARTIAL_FILES.fullmatch(place.name):
            with suppress(OSError):
                place.unlink()
    with suppress(OSError):  # only an empty folder goes
        (path / STATES).rmdir()


def remove_version(folder: Path) -> None:
    """Remove the folder of a version and our files in it; with anything else in it, it stays."""
    if check_regular(folder, folder=True):
        for place in _version_files(folder):
            with suppress(OSError):
                place.unlink()
        with suppress(OSError):
            folder.rmdir()


def leftovers(path: Path, versions: Collection[int]) -> list[Path]:
    """Our files of versions other than these, which ``tidy`` could not remove."""
    kept = {state_folder(path, version) for version in versions}
    others = (version for version in _our_versions(path) if version not in kept)
    return [place for version in others for place in _version_files(version)]


def _version_files(folder: Path) -> list[Path]:
    """Our files in the folder of a version, whole or half written."""
    return [
        place for place in _entries(folder) if place.name in _STATE_FILES or _PARTIAL_STATE_FILES.fullmatch(place.name)
    ]


def _our_files(path: Path) -> Iterator[Path]:
    """The files of our names that may be there; the folders on the way to them are plain folders."""
    yield from (path / name for name in (*_FILES, _BEGUN))
    for version in _our_versions(path):
        yield from (version / name for name in _STATE_FILES)


def _our_versions(path: Path) -> Iterator[Path]:
    """The folders of versions, whole or half written."""
    if check_regular(path / STATES, folder=True):
        for place in _entries(path / STATES):
            if _VERSIONS.fullmatch(place.name):
                check_regular(place, folder=True)
                yield place


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise OneaError(f"{folder} cannot be read ({error.strerror}); make it readable.") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the folder is made if need be, and removed again if nothing was put into it.

    A lock file that was made here does not stay where no model came to be, such as in a folder of photos.

    Raises:
        OneaError: another process holds it; says which, and since when.
    """
    check_writable(folder)
    existed, had_lock = folder.exists(), os.path.lexists(folder / LOCK)
    try:
        with file_lock(folder / LOCK):
            try:
                yield
            finally:
                if not had_lock and not holds_model(folder):
                    with suppress(OSError):  # Windows does not remove what is open
                        (folder / LOCK).unlink()
    finally:
        if not existed:
            with suppress(OSError):  # it stays unless it is empty, as after a lock that found no room on the disk
                folder.rmdir()
