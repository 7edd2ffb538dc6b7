# SPDX-License-Identifier: Apache-2.0
"""The images of a dataset as one array of pixels, decoded once, cached on disk and memory-mapped."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onea.data.dataset import Labels, Pixels, Split
from onea.data.decode import BadImage, fit, image_size, read_image
from onea.data.file_checks import (
    FEW_THREADS,
    OnBad,
    check_no_empty_class,
    check_readable,
    map_threaded,
    num_decode_threads,
    sha256_of,
)
from onea.data.pixel_limit import max_pixels
from onea.errors import OneaError
from onea.files import (
    CACHE_REMEDY,
    DamagedFile,
    dump_with_checksum,
    file_stamp,
    parse_json_object,
    read_regular,
    verify_checksum,
    write_atomically,
    write_error,
)
from onea.locks import file_lock

_VERSION = 1  # part of the key of every cached array; increase it when decoding or resizing changes
_DIGEST_LENGTH = 24  # characters of each of the two digests in a key


@dataclass(frozen=True)
class Packed:
    """The images of a split as one array.

    Attributes:
        pixels: ``uint8 [M, 3, height, width]``; images in files are memory-mapped and read-only.
        rows: ``int64 [M]``, the rows of the split in ``pixels``.
        skipped: ``path: reason`` of each unreadable image.
        sha256: hash of the pixels; empty for images that are not in files.
    """

    pixels: Pixels
    rows: Labels
    skipped: tuple[str, ...] = ()
    sha256: str = ""


def stored_shape(splits: Sequence[Split], size: int, cache: Path | None = None) -> tuple[int, int]:
    """Height and width at which the images of all these splits are stored.

    If all images have the same shape and no side above ``2 * size``, they are stored unchanged, otherwise as squares of
    ``size``. Only the headers are read; unreadable images are ignored. With a ``cache`` folder the headers of unchanged
    files are read only once.

    Raises:
        OneaError: the splits have pixels of different shapes.
    """
    shapes = {(int(split.pixels.shape[2]), int(split.pixels.shape[3])) for split in splits if split.pixels is not None}
    if len(shapes) > 1:
        sizes = " and ".join(f"{height} x {width}" for height, width in sorted(shapes))
        raise OneaError(f"The training and test pixels differ in size ({sizes}): give both the same height and width.")
    if shapes:
        return shapes.pop()
    files = [file for split in splits for file in split.files or ()]
    if cache is None:
        return _common_shape(files, size)[0]
    path = cache / f"shape-{_key(files, (size, size))}.json"
    with suppress(OneaError, KeyError, TypeError, ValueError, DamagedFile):
        height, width = _read_index(path)["shape"]
        if 1 <= min(height, width) <= max(height, width) <= 2 * size:
            return height, width
    shape, is_final = _common_shape(files, size)
    if is_final:
        with suppress(OSError, OneaError):  # a folder that is not writable is reported when the pixels are written
            for partial in cache.glob(f".{path.name}.*.partial"):
                partial.unlink(missing_ok=True)
            _write_index(path, {"shape": shape})
    return shape


def _common_shape(files: Sequence[Path], size: int) -> tuple[tuple[int, int], bool]:
    """The shape, and whether it would be the same if all files were readable."""
    common: tuple[int, int] | None = None
    all_readable = True
    for shape in map_threaded(_shape_or_none, files, FEW_THREADS):
        if shape is None:
            all_readable = False
        elif max(shape) > 2 * size or shape != (common or shape):
            return (size, size), True
        else:
            common = shape
    return common or (size, size), all_readable


def _shape_or_none(file: Path) -> tuple[int, int] | None:
    try:
        return image_size(file)
    except BadImage:
        return None


def _write_index(path: Path, content: dict[str, Any]) -> None:
    """Write a small JSON file that contains its own name, so that a renamed file is not used."""
    write_atomically(path, dump_with_checksum({"of": path.stem, **content}), CACHE_REMEDY)


def _read_index(path: Path) -> dict[str, Any]:
    content = parse_json_object(read_regular(path, follow=True))
    verify_checksum(content)
    if content["of"] != path.stem:
        raise DamagedFile(f"it belongs to {content['of']}")
    return content


def pack(
    split: Split,
    shape: tuple[int, int],
    *,
    cache: Path,
    on_bad: OnBad,
    class_names: Sequence[str] | None = None,
) -> Packed:
    """Decode the images of a split into one array, or map the cached array of the same files.

    Args:
        split: the images; pixels are returned unchanged, files are decoded.
        shape: height and width from ``stored_shape``.
        cache: folder for ``packed-<key>.bin`` and ``.json``. The key covers the path, size and times of every file.
            Arrays of earlier states of the same files are deleted.
        on_bad: how to handle unreadable images.
        class_names: class names by label, for error messages.

    Raises:
        OneaError: images are unreadable (with ``fail``), a class has no readable image (with ``skip``), or the cache is
            not writable. No files are left in the cache.
    """
    if split.files is None:
        assert split.pixels is not None
        return Packed(split.pixels, np.arange(len(split), dtype=np.int64))
    target = cache / f"packed-{_key(split.files, shape, on_bad, str(max_pixels()))}.bin"
    packed = _map(target, shape, len(split))
    if packed is None:
        with _pack_lock(target, wait=True):
            packed = _map(target, shape, len(split))  # another process may have written it
            if packed is None:
                _write(target, split, shape, on_bad, class_names)
                packed = _map(target, shape, len(split))
            _delete_outdated(target)
        if packed is None:
            raise OneaError(
                f"{target} was changed while it was written: try again while no other program uses {cache}."
            )
    elif _outdated(target):  # left after a kill
        with suppress(OneaError), _pack_lock(target, wait=False):
            _delete_outdated(target)
    # Also for a cached array: its key does not cover the labels.
    check_no_empty_class(split, packed.rows, packed.skipped, class_names)
    return packed


def _key(files: Sequence[Path], shape: tuple[int, int], *more: str) -> str:
    """Two digests: of the paths and the settings, and of the sizes and times of the files."""
    digest, stamps = hashlib.sha256(repr((_VERSION, shape, *more)).encode()), hashlib.sha256()
    folder = "" if all(file.is_absolute() for file in files) else f"{Path.cwd()}{os.sep}"
    for file in files:
        # The same as Path.absolute(), which would take longer than the rest of this function.
        digest.update(os.fsencode(str(file) if file.is_absolute() else f"{folder}{file}") + b"\0")
        stamps.update(f"{file_stamp(file)}\n".encode())  # a missing file is reported when it is decoded
    return f"{digest.hexdigest()[:_DIGEST_LENGTH]}-{stamps.hexdigest()[:_DIGEST_LENGTH]}"


@contextmanager
def _pack_lock(target: Path, *, wait: bool) -> Iterator[None]:
    """A lock for packing these files at any sizes and times; other processes wait and then map the result."""
    lock = target.with_name(f"{_prefix(target)}.lock")
    with file_lock(lock, wait=wait, remedy=CACHE_REMEDY):
        try:
            yield
        finally:
            with suppress(OSError):  # Windows does not remove open files
                lock.unlink()


def _prefix(target: Path) -> str:
    """The part of the name that all arrays of the same files share."""
    return target.stem.rpartition("-")[0]


def _outdated(target: Path) -> list[Path]:
    """Arrays of earlier states of the same files, and partial files after a kill."""
    return [path for path in target.parent.glob(f"*{_prefix(target)}*") if path.stem != target.stem]


def _delete_outdated(target: Path) -> None:
    """Delete outdated files; a process that has mapped one keeps its pixels."""
    for path in _outdated(target):
        if path.suffix != ".lock":
            with suppress(OSError):  # Windows does not remove mapped files
                path.unlink()


def _map(target: Path, shape: tuple[int, int], images: int) -> Packed | None:
    """Map the cached array; None if it is missing or damaged."""
    try:
        index = _read_index(target.with_suffix(".json"))
        stamp = file_stamp(target)
        if index["shape"][2:] != list(shape) or (stamp != index["stamp"] and sha256_of(target) != index["sha256"]):
            return None
        rows, skipped = np.array(index["rows"], dtype=np.int64), tuple(map(str, index["skipped"]))
        if rows.ndim != 1 or not np.all(np.diff(rows, prepend=-1, append=images) > 0):
            return None
        if len(rows):
            pixels: Pixels = np.memmap(target, np.uint8, mode="r", shape=tuple(index["shape"]))
        else:  # an empty file cannot be mapped
            pixels = np.empty(index["shape"], np.uint8)
    except (ValueError, OSError, KeyError, TypeError, OverflowError, OneaError, DamagedFile):
        return None
    if stamp != index["stamp"]:  # perhaps the file was copied; the new stamp saves the next call from reading all of it
        with suppress(OneaError):
            _write_index(target.with_suffix(".json"), index | {"stamp": stamp})
    return Packed(pixels, rows, skipped, index["sha256"])


def _write(
    target: Path, split: Split, shape: tuple[int, int], on_bad: OnBad, class_names: Sequence[str] | None
) -> None:
    """Write the pixels to a temporary file, move it, then write the index, so that an index implies complete pixels."""
    assert split.files is not None
    bytes_needed = len(split) * 3 * shape[0] * shape[1]
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(target.parent).free < bytes_needed:  # report this before an hour of decoding
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        handle, name = tempfile.mkstemp(prefix=f"{target.stem}-", suffix=".tmp", dir=target.parent)
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            rows, skipped, sha256 = _decode_into(file, split.files, shape, on_bad)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power failure could leave an index without its pixels
        check_readable(split, rows, skipped, on_bad, class_names)
        temporary.replace(target)
    except OSError as error:
        raise write_error(target.parent, bytes_needed, error, CACHE_REMEDY) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    index = {"shape": [len(rows), 3, *shape], "rows": rows.tolist(), "skipped": skipped, "sha256": sha256}
    try:
        _write_index(target.with_suffix(".json"), index | {"stamp": file_stamp(target)})
    except OneaError:
        target.unlink(missing_ok=True)
        raise


def _decode_into(
    file: BinaryIO, paths: Sequence[Path], shape: tuple[int, int], on_bad: OnBad
) -> tuple[Labels, list[str], str]:
    """Append each readable image to an open file, in order.

    With ``fail``, the images after an unreadable one are read but not written, so that all unreadable ones are listed.

    Returns:
        The rows of the readable images, ``path: reason`` of each unreadable one, and the hash of the pixels.
    """

    def decode(path: Path) -> Pixels | str:
        try:
            return fit(read_image(path, min_side=max(shape)), *shape)
        except BadImage as error:
            return f"{error.path}: {error.reason}"

    rows: list[int] = []
    skipped: list[str] = []
    digest = hashlib.sha256()
    for row, image in enumerate(map_threaded(decode, paths, num_decode_threads(paths))):
        if isinstance(image, str):
            skipped.append(image)
        elif not (skipped and on_bad == "fail"):
            # Not memory-mapped: on a full disk, writing raises an error, but touching a mapped page kills the process.
            file.write(image.data)
            digest.update(image.data)
            rows.append(row)
    return np.array(rows, dtype=np.int64), skipped, digest.hexdigest()
