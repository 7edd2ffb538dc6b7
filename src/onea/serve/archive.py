# SPDX-License-Identifier: Apache-2.0
"""Zips of class folders. Nothing is extracted to disk, and limits are checked before an image is read."""

from __future__ import annotations

import stat
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import PurePosixPath
from typing import BinaryIO

from onea.data.folders import is_ignored, is_photo
from onea.serve.problems import Problem
from onea.serve.settings import MEGABYTE, Limits

_LAYOUT = "the zip must contain one folder of images for each class"
_END_RECORD, _MAX_COMMENT = struct.Struct("<4s4H2LH"), 65_535
_ZIP64_LOCATOR = b"PK\x06\x07"
_ENTRY_BYTES = 1_000  # of one entry of the directory: its fields and a long name
_ANY_RATIO_BYTES = MEGABYTE  # smaller files, such as text, may have any compression ratio
_ENCRYPTED = 0x1
ArchivedImage = tuple[str, str, Callable[[], bytes]]


def read_archive(file: BinaryIO, limits: Limits) -> tuple[list[ArchivedImage], tuple[str, ...]]:
    """Class, name and reader of each image in a zip, and the names of the other files.

    The layout is ``<class>/<image>``, or the same below one folder that holds everything.

    Raises:
        Problem: it is not a zip, exceeds a limit, has unsafe names, or another layout.
    """
    _check_directory(file, limits)
    try:
        archive = zipfile.ZipFile(file)
    except MemoryError:
        raise
    except Exception as error:  # damaged files raise ValueError, struct.error, OSError and others
        raise _not_a_zip() from error
    _check_entries(archive.infolist(), limits)
    files = [entry for entry in archive.infolist() if not _is_folder(entry) and not _hidden(entry.filename)]
    photos = [entry for entry in files if is_photo(entry.filename)]
    photos = [entry for entry in photos if len(PurePosixPath(entry.filename).parts) > 1] or photos
    names = {entry.filename for entry in photos}
    images: list[ArchivedImage] = [
        (label, name, partial(_read, archive, entry))
        for entry, (label, name) in zip(photos, _labels_and_names(photos), strict=True)
    ]
    return images, tuple(entry.filename for entry in files if entry.filename not in names)


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    try:
        with archive.open(entry) as file:
            content = file.read(entry.file_size + 1)
    except MemoryError:
        raise
    except Exception as error:
        raise _damaged(entry) from error
    if len(content) != entry.file_size:
        raise _damaged(entry)
    return content


def _check_directory(file: BinaryIO, limits: Limits) -> None:
    """Refuse a directory with millions of entries before zipfile reads all of it."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _END_RECORD.size - _MAX_COMMENT))
    tail = file.read()
    start = tail.rfind(b"PK\x05\x06")
    if start < 0 or len(tail) - start < _END_RECORD.size:
        raise _not_a_zip()
    _, _, _, _, entries, directory, _, _ = _END_RECORD.unpack_from(tail, start)
    if tail[max(0, start - 20) : start].startswith(_ZIP64_LOCATOR):
        raise Problem(422, "The zip is in the zip64 format; send several smaller ones.")
    if entries > 2 * limits.zip_entries or directory > 2 * limits.zip_entries * _ENTRY_BYTES:
        raise _too_many(limits)
    file.seek(0)


def _check_entries(entries: list[zipfile.ZipInfo], limits: Limits) -> None:
    if len(entries) > 2 * limits.zip_entries or sum(not _is_folder(entry) for entry in entries) > limits.zip_entries:
        raise _too_many(limits)
    if sum(entry.file_size for entry in entries) > limits.zip_bytes:
        raise Problem(
            413, f"The zip has more than {limits.zip_bytes // MEGABYTE:,} MB uncompressed; send several smaller ones."
        )
    for entry in entries:
        _check_name(entry)
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise Problem(422, f"{_shown(entry)} in the zip is a link; include the image itself.")
        if entry.flag_bits & _ENCRYPTED:
            raise Problem(422, "The zip is encrypted; create it without a password.")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise Problem(422, f"{_shown(entry)} in the zip has an unsupported compression method; use deflate.")
        if entry.file_size > max(_ANY_RATIO_BYTES, limits.zip_ratio * entry.compress_size):
            raise Problem(413, f"{_shown(entry)} in the zip has a compression ratio above {limits.zip_ratio}.")


def _check_name(entry: zipfile.ZipInfo) -> None:
    """Refuse names outside the archive: nothing is written to disk, but such an archive is malicious."""
    name = entry.orig_filename
    parts = PurePosixPath(name).parts
    if (
        not name
        or name.startswith("/")
        or "\\" in name
        or "\0" in name
        or ".." in parts
        or (parts and parts[0].endswith(":"))
    ):
        raise Problem(422, f"The zip has an unsafe path ({_shown(entry)}); {_LAYOUT}.")


def _labels_and_names(files: list[zipfile.ZipInfo]) -> list[tuple[str, str]]:
    """Class and name of each image."""
    paths = [PurePosixPath(entry.filename).parts for entry in files]
    if not paths:
        raise Problem(422, f"There are no images in the zip; {_LAYOUT}.")
    if len({parts[0] for parts in paths}) == 1:
        depths = [len(parts) for parts in paths]
        if set(depths) == {2, 3}:  # a class with a folder in it, or classes and a photo beside them
            raise Problem(422, f"{_shown(files[depths.index(2)])} in the zip is next to folders; {_LAYOUT}.")
        if set(depths) == {3}:  # one folder may hold everything
            paths = [parts[1:] for parts in paths]
    for entry, parts in zip(files, paths, strict=True):
        if len(parts) != 2:
            raise Problem(422, f"{_shown(entry)} is not an image in a class folder of the zip; {_LAYOUT}.")
    return [(parts[0], "/".join(parts)) for parts in paths]


def _is_folder(entry: zipfile.ZipInfo) -> bool:
    return entry.filename.endswith("/")  # is_dir() of older Pythons fails on an empty name


def _hidden(name: str) -> bool:
    return any(is_ignored(part) and part != ".." for part in PurePosixPath(name).parts)


def _shown(entry: zipfile.ZipInfo) -> str:
    name = entry.filename if entry.filename.isprintable() else "an entry"
    return f"'{name[:100]}'"


def _damaged(entry: zipfile.ZipInfo) -> Problem:
    return Problem(422, f"{_shown(entry)} in the zip is damaged; create the zip again.")


def _not_a_zip() -> Problem:
    return Problem(422, "This is not a zip, or it is damaged; create it again.")


def _too_many(limits: Limits) -> Problem:
    return Problem(413, f"The zip contains more than {limits.zip_entries:,} files; send several smaller ones.")
