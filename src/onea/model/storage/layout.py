# SPDX-License-Identifier: Apache-2.0
"""The files of a model folder, its lock, and the removal of old versions.

model.json                    format, valid versions (the last one is current), parameters
states/000007/state.json      classes, updates, backbone, options, calibration
states/000007/state.safetensors
copies/SHA256.safetensors     small copies of photos of a class, if the model keeps any; versions share these files
README.md, history.png        the model card
sources.json                  folders that were taught, if they are remembered; never sent
lock                          held by the process that writes

A folder may come from an untrusted source. Links, pipes and devices with these names are refused, and files with other
names are never removed.
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

MANIFEST, STATES, COPIES, LOCK = MODEL_FILE, "states", "copies", "lock"
CARD, PICTURE = "README.md", "history.png"
SOURCES = "sources.json"
STATE, TENSORS = "state.json", "state.safetensors"
FORMAT = 7  # of model.json and state.json
LAST_VERSION = 999_999  # names of versions have six digits
_VERSION = "[0-9]" * 6
# Glob patterns of the files that a model needs.
MODEL_FILES = (
    MANIFEST,
    f"{STATES}/{_VERSION}/{STATE}",
    f"{STATES}/{_VERSION}/{TENSORS}",
    f"{COPIES}/*.safetensors",
)
# Marks an incomplete first save. Versions without this file and without model.json belong to a damaged model, which
# must not be overwritten.
_FIRST_SAVE = ".first-save.partial"
_COPIES_FILE = re.compile(r"\.?[0-9a-f]{64}\.safetensors(\.[0-9]+\.partial)?")  # complete or partial
_VERSION_FOLDER = re.compile(rf"{_VERSION}|\.partial-\w+")  # complete or partial


def _partial_of(*names: str) -> re.Pattern[str]:
    """A pattern of the temporary files that ``write_atomically`` leaves if its process is killed."""
    return re.compile(rf"\.({'|'.join(map(re.escape, names))})\.[0-9]+\.partial")


_TOP_FILES = (MANIFEST, CARD, PICTURE, SOURCES, LOCK)
_PARTIAL_TOP_FILES = _partial_of(MANIFEST, CARD, PICTURE, SOURCES, _FIRST_SAVE)
_STATE_FILES = (STATE, TENSORS, CARD, PICTURE)
_PARTIAL_STATE_FILES = _partial_of(*_STATE_FILES)


def state_folder(path: Path, version: int) -> Path:
    """The folder of a version."""
    return path / STATES / f"{version:06d}"


def with_name(path: Path) -> Path:
    """The path with the name of the folder, even for ``.`` and ``..``.

    >>> with_name(Path("shop.onea")).name, with_name(Path(".")) == Path.cwd().resolve()
    ('shop.onea', True)
    """
    return path if path.name not in ("", "..") else path.resolve()


def holds_model(path: Path) -> bool:
    """Whether a folder contains a model of any format."""
    return os.path.lexists(path / MANIFEST)


def check_can_hold(path: Path) -> None:
    """Refuse a folder with links instead of model files, or with other files and no model."""
    if not path.exists():
        return
    for entry in _model_files(path):
        check_regular(entry)
    if holds_model(path):
        return
    names = {entry.name for entry in _entries(path)}
    if (versions := list(_version_folders(path))) and _FIRST_SAVE not in names:
        raise OneaError(
            f"{path} has versions of a model ({versions[0].name}) and no {MANIFEST}; restore it from a backup or "
            "choose another folder."
        )
    if any(
        name not in (LOCK, STATES, COPIES, _FIRST_SAVE) and not _PARTIAL_TOP_FILES.fullmatch(name) for name in names
    ):
        raise OneaError(f"{path} is not empty and contains no model; choose another folder.")


def begin_first_save(path: Path) -> None:
    """Mark the start of the first save."""
    if not holds_model(path):
        write_atomically(path / _FIRST_SAVE, b"")
        sync_folder(path)


def remove_other_versions(path: Path, versions: Collection[int]) -> None:
    """Remove all other versions and partial files. The lock must be held."""
    kept = {state_folder(path, version) for version in versions}
    for version in _version_folders(path):
        if version not in kept:
            remove_version(version)
    for entry in _entries(path):
        if entry.name == _FIRST_SAVE or _PARTIAL_TOP_FILES.fullmatch(entry.name):
            with suppress(OSError):
                entry.unlink()
    with suppress(OSError):  # only if empty
        (path / STATES).rmdir()


def remove_version(folder: Path) -> None:
    """Remove the files of a version, and its folder unless it contains other files."""
    if check_regular(folder, folder=True):
        for entry in _version_files(folder):
            with suppress(OSError):
                entry.unlink()
        with suppress(OSError):
            folder.rmdir()


def remaining_files(path: Path, versions: Collection[int]) -> list[Path]:
    """Files of other versions, which ``remove_other_versions`` could not remove."""
    kept = {state_folder(path, version) for version in versions}
    others = (version for version in _version_folders(path) if version not in kept)
    return [entry for version in others for entry in _version_files(version)]


def remove_other_copies(path: Path, names: Collection[str]) -> None:
    """Remove all files of copies but these, and partial ones. The lock must be held."""
    for entry in copies_files(path):
        if entry.name not in names:
            with suppress(OSError):
                entry.unlink()
    with suppress(OSError):  # only if empty
        (path / COPIES).rmdir()


def copies_files(path: Path) -> list[Path]:
    """The files of copies, complete or partial."""
    if not check_regular(path / COPIES, folder=True):
        return []
    return [entry for entry in _entries(path / COPIES) if _COPIES_FILE.fullmatch(entry.name)]


def _version_files(folder: Path) -> list[Path]:
    """The files of a version, complete or partial."""
    return [
        entry for entry in _entries(folder) if entry.name in _STATE_FILES or _PARTIAL_STATE_FILES.fullmatch(entry.name)
    ]


def _model_files(path: Path) -> Iterator[Path]:
    """Paths that files of a model may have; the folders on these paths are checked not to be links."""
    yield from (path / name for name in (*_TOP_FILES, _FIRST_SAVE))
    for version in _version_folders(path):
        yield from (version / name for name in _STATE_FILES)
    yield from copies_files(path)


def _version_folders(path: Path) -> Iterator[Path]:
    """The folders of versions, complete or partial."""
    if check_regular(path / STATES, folder=True):
        for entry in _entries(path / STATES):
            if _VERSION_FOLDER.fullmatch(entry.name):
                check_regular(entry, folder=True)
                yield entry


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise OneaError(f"{folder} cannot be read ({error.strerror}); make it readable.") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a model folder; the folder is created if necessary.

    If no model was saved, a new lock file is removed again, and a new folder if it is empty.

    Raises:
        OneaError: another process holds the lock.
    """
    check_writable(folder)
    existed, had_lock = folder.exists(), os.path.lexists(folder / LOCK)
    try:
        with file_lock(folder / LOCK):
            try:
                yield
            finally:
                if not had_lock and not holds_model(folder):
                    with suppress(OSError):  # Windows cannot remove open files
                        (folder / LOCK).unlink()
    finally:
        if not existed:
            with suppress(OSError):  # only if empty, for example after an error of the lock
                folder.rmdir()
