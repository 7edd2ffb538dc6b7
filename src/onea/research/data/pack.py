# SPDX-License-Identifier: Apache-2.0
"""From the files of one side of a dataset to one array of pixels on disk, decoded once and mapped from then on."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onea.data.dataset import Labels, Pixels, Split
from onea.data.decode import BadImage, fit, image_size, read_image
from onea.data.image_files import (
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
    load_with_checksum,
    read_regular,
    write_atomically,
    write_error,
)
from onea.locks import file_lock

Progress = Callable[[int, int], None]

# Part of the key of every cached pack: raise it when decoding or resizing changes.
_VERSION = 1
_KEY = 24  # characters of each of its two digests


@dataclass(frozen=True)
class Packed:
    """The images of a split as one array.

    Attributes:
        pixels: ``uint8 [M, 3, height, width]``; read-only and mapped from disk where it was made from files.
        rows: ``int64 [M]``, the rows of the split that are in ``pixels``.
        skipped: ``path: reason`` of each image that could not be read.
        sha256: of the pixels, computed while they were packed; empty where they were not made from files.
    """

    pixels: Pixels
    rows: Labels
    skipped: tuple[str, ...]
    height: int
    width: int
    sha256: str = ""


def stored_shape(splits: Sequence[Split], size: int, cache: Path | None = None) -> tuple[int, int]:
    """Height and width at which all these splits are to be stored, so that training and test images agree.

    Images that all have one size, no side above ``2 * size``, keep it and with it every pixel. All others become
    squares of ``size``. Only headers are read; images that cannot be read have no say. With a ``cache`` folder the
    headers of the same files are read only once.

    Raises:
        OneaError: splits that hold pixels differ in size.
    """
    held = {(int(split.pixels.shape[2]), int(split.pixels.shape[3])) for split in splits if split.pixels is not None}
    if len(held) > 1:
        sizes = " and ".join(f"{height} x {width}" for height, width in sorted(held))
        raise OneaError(f"The training and test pixels differ in size ({sizes}): give both the same height and width.")
    if held:
        return held.pop()
    files = [file for split in splits for file in split.files or ()]
    if cache is None:
        return _common_shape(files, size)[0]
    known = cache / f"shape-{_key(files, (size, size))}.json"
    with suppress(OneaError, KeyError, TypeError, ValueError, DamagedFile):
        height, width = _read_note(known)["shape"]
        if 1 <= min(height, width) <= max(height, width) <= 2 * size:
            return height, width
    shape, final = _common_shape(files, size)
    if final:
        with suppress(OSError, OneaError):  # whoever cannot write here is told so when the pixels are written
            for partial in cache.glob(f".{known.name}.*.partial"):  # another process can do without its note, too
                partial.unlink(missing_ok=True)
            _write_note(known, {"shape": shape})
    return shape


def _write_note(path: Path, content: dict[str, Any]) -> None:
    """A small file beside the pixels, which says of what it is: it would mislead under another name."""
    write_atomically(path, dump_with_checksum({"of": path.stem, **content}), CACHE_REMEDY)


def _read_note(path: Path) -> dict[str, Any]:
    found = load_with_checksum(read_regular(path, follow=True))
    if found["of"] != path.stem:
        raise DamagedFile(f"it is of {found['of']}")
    return found


def _common_shape(files: Sequence[Path], size: int) -> tuple[tuple[int, int], bool]:
    """The shape, and whether no file that could not be read might have had another say."""
    common: tuple[int, int] | None = None
    all_read = True
    for found in map_threaded(_size_or_none, files, FEW_THREADS):
        if found is None:
            all_read = False
            continue
        if max(found) > 2 * size or (common is not None and found != common):
            return (size, size), True
        common = found
    return common or (size, size), all_read


def pack(
    split: Split,
    size: int,
    *,
    cache: Path,
    on_bad: OnBad,
    shape: tuple[int, int] | None = None,
    class_names: Sequence[str] | None = None,
    on_progress: Progress | None = None,
) -> Packed:
    """Decode the images of a split into one array, or map the array that an earlier call made from the same files.

    Args:
        split: pixels pass through unchanged; files are decoded.
        size: side of the stored squares, unless ``shape`` is given.
        cache: folder for ``packed-<key>.bin`` and ``.json``. The key covers path, size and times of every file, so that
            an edit which puts the modification time back is noticed too, but on Windows (see ``file_stamp``). What was
            packed of the same files before they changed is deleted.
        on_bad: what a file that cannot be read does: stop everything, or be left out and reported.
        shape: height and width from ``stored_shape`` over both sides; by default over this one alone.
        class_names: names for messages; without them a class is called by its number.
        on_progress: called with the images done and in all.

    Raises:
        OneaError: images cannot be read (``fail``), none of a class can (``skip``), or the cache cannot be written.
            Nothing is left in the cache then.
    """
    if split.files is None:
        assert split.pixels is not None
        height, width = split.pixels.shape[2:]
        return Packed(split.pixels, np.arange(len(split), dtype=np.int64), (), height, width)
    shape = shape or stored_shape([split], size)
    target = cache / f"packed-{_key(split.files, shape, on_bad, str(max_pixels()))}.bin"
    packed = _mapped(target, shape, len(split))
    if packed is None:
        with _only_packer(target, wait=True):
            packed = _mapped(target, shape, len(split))
            if packed is None:
                rows, skipped, sha256 = _write(target, split, shape, on_bad, class_names, on_progress)
                _write_index(target, shape, rows, skipped, sha256)
                packed = _mapped(target, shape, len(split))
            _forget_others(target)
        if packed is None:
            raise OneaError(f"{target} was changed while it was written: run again, with no other program in {cache}.")
    elif _others(target):  # after a kill in the last step; what cannot be deleted does no harm
        with suppress(OneaError), _only_packer(target, wait=False):
            _forget_others(target)
    # Again for a cached array: the key has no labels in it, and these may be new.
    check_no_empty_class(split, packed.rows, packed.skipped, class_names)
    return packed


def _key(files: Sequence[Path], shape: tuple[int, int], *more: str) -> str:
    """Two digests: of what is to be packed and how, and of the state in which the files are."""
    digest, stamps = hashlib.sha256(repr((_VERSION, shape, *more)).encode()), hashlib.sha256()
    here = "" if all(file.is_absolute() for file in files) else f"{Path.cwd()}{os.sep}"
    for file in files:
        # As Path.absolute() has it, which takes longer than all the rest.
        digest.update(os.fsencode(str(file) if file.is_absolute() else f"{here}{file}") + b"\0")
        stamps.update(f"{file_stamp(file)}\n".encode())  # a missing file is reported when it is to be decoded
    return f"{digest.hexdigest()[:_KEY]}-{stamps.hexdigest()[:_KEY]}"


@contextmanager
def _only_packer(target: Path, *, wait: bool) -> Iterator[None]:
    """Keep other processes from packing the same files, in whatever state; they wait and find them packed."""
    lock = target.with_name(f"{_family(target)}.lock")
    with file_lock(lock, wait=wait, remedy=CACHE_REMEDY):
        try:
            yield
        finally:
            with suppress(OSError):  # Windows does not remove what is open
                lock.unlink()


def _family(target: Path) -> str:
    """What the names of all packs of the same files have in common."""
    return target.stem.rpartition("-")[0]


def _others(target: Path) -> list[Path]:
    """What was packed of the same files in another state, and what a kill has left of packing them."""
    return [place for place in target.parent.glob(f"*{_family(target)}*") if place.stem != target.stem]


def _forget_others(target: Path) -> None:
    """Delete all that but the lock; a process that has mapped an older pack keeps its pixels."""
    for other in _others(target):
        if other.suffix != ".lock":
            with suppress(OSError):  # Windows keeps what somebody has mapped
                other.unlink()


def _mapped(target: Path, shape: tuple[int, int], total: int) -> Packed | None:
    """The cached array, or None when it is not there or not whole."""
    index = target.with_suffix(".json")
    try:
        found = _read_note(index)
        stamp = file_stamp(target)
        if found["shape"][2:] != list(shape) or (stamp != found["stamp"] and sha256_of(target) != found["sha256"]):
            return None
        rows, skipped = np.array(found["rows"], dtype=np.int64), tuple(map(str, found["skipped"]))
        if rows.ndim != 1 or not np.all(np.diff(rows, prepend=-1, append=total) > 0):
            return None
        if len(rows):
            pixels: Pixels = np.memmap(target, np.uint8, mode="r", shape=tuple(found["shape"]))
        else:  # an empty file cannot be mapped
            pixels = np.empty(found["shape"], np.uint8)
    except (ValueError, OSError, KeyError, TypeError, OverflowError, OneaError, DamagedFile):
        return None
    if stamp != found["stamp"]:  # copied, perhaps: the next look need not read it all
        with suppress(OneaError):
            _write_note(index, found | {"stamp": stamp})
    return Packed(pixels, rows, skipped, *shape, found["sha256"])


def _write(
    target: Path,
    split: Split,
    shape: tuple[int, int],
    on_bad: OnBad,
    class_names: Sequence[str] | None,
    on_progress: Progress | None,
) -> tuple[Labels, list[str], str]:
    """Write the pixel file beside its final place and move it there only when all is well."""
    assert split.files is not None
    bytes_needed = len(split) * 3 * shape[0] * shape[1]
    temporary: Path | None = None
    try:
        _check_space(target.parent, bytes_needed)
        handle, name = tempfile.mkstemp(prefix=f"{target.stem}-", suffix=".tmp", dir=target.parent)
        temporary = Path(name)
        with os.fdopen(handle, "wb") as stream:
            rows, skipped, sha256 = _decode_into(stream, split.files, shape, on_bad, on_progress)
            stream.flush()
            os.fsync(stream.fileno())  # or a power cut could leave an index beside pixels that never reached the disk
        check_readable(split, rows, skipped, on_bad, class_names)
        temporary.replace(target)
    except OSError as error:
        raise write_error(target.parent, bytes_needed, error, CACHE_REMEDY) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return rows, skipped, sha256


def _decode_into(
    stream: BinaryIO, files: Sequence[Path], shape: tuple[int, int], on_bad: OnBad, on_progress: Progress | None
) -> tuple[Labels, list[str], str]:
    """Append each readable image to the stream, in order; the rows, what was skipped, and the digest of the pixels.

    After a bad file that is to be fatal nothing more is written, but the rest is still looked at: better one list of
    all bad files than one run for each.
    """

    def decode(file: Path) -> Pixels | str:
        try:
            return fit(read_image(file, min_side=max(shape)), *shape)
        except BadImage as error:
            return f"{error.path}: {error.reason}"

    rows: list[int] = []
    skipped: list[str] = []
    digest = hashlib.sha256()
    for row, result in enumerate(map_threaded(decode, files, num_decode_threads(files))):
        if isinstance(result, str):
            skipped.append(result)
        elif not (skipped and on_bad == "fail"):
            # Plain writes, not a writable map: on a full disk those raise, where a map would kill the process.
            stream.write(result.data)
            digest.update(result.data)
            rows.append(row)
        if on_progress is not None:
            on_progress(row + 1, len(files))
    return np.array(rows, dtype=np.int64), skipped, digest.hexdigest()


def _write_index(target: Path, shape: tuple[int, int], rows: Labels, skipped: Sequence[str], sha256: str) -> None:
    """Written last and moved into place whole: where it exists, the pixels were complete."""
    index = {"shape": [len(rows), 3, *shape], "rows": rows.tolist(), "skipped": list(skipped), "sha256": sha256}
    try:
        _write_note(target.with_suffix(".json"), index | {"stamp": file_stamp(target)})
    except OneaError:
        target.unlink(missing_ok=True)
        raise


def _check_space(cache: Path, bytes_needed: int) -> None:
    """Fail before an hour of decoding, not after it."""
    cache.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(cache).free < bytes_needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _size_or_none(file: Path) -> tuple[int, int] | None:
    try:
        return image_size(file)
    except BadImage:
        return None
