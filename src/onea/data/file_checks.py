# SPDX-License-Identifier: Apache-2.0
"""Many image files at once: decoded in threads, unreadable ones reported or skipped, one digest for all."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from onea.cpu import available_cores
from onea.data.dataset import Labels, Split
from onea.data.decode import NO_FILE, BadImage, read_image
from onea.errors import OneaError
from onea.files import open_regular
from onea.text import list_names

OnBad = Literal["fail", "skip"]
_MAX_REASONS = 5  # in a message, which gives only the number of images with other reasons


def find_readable(split: Split, *, on_bad: OnBad, class_names: Sequence[str] | None = None) -> tuple[Labels, list[str]]:
    """Decode every file of a split to find those that cannot be read.

    Returns:
        The rows that can be read, and ``path: reason`` of each file that cannot.

    Raises:
        OneaError: as in ``check_readable``.
    """

    def error_line(file: Path) -> str:
        try:
            read_image(file)
        except BadImage as error:
            return f"{error.path}: {error.reason}"
        return ""

    assert split.files is not None
    lines = list(map_threaded(error_line, split.files, num_decode_threads(split.files)))
    rows = np.array([row for row, line in enumerate(lines) if not line], dtype=np.int64)
    skipped = [line for line in lines if line]
    check_readable(split, rows, skipped, on_bad, class_names)
    return rows, skipped


def describe_unreadable(skipped: Sequence[str], total: int, *, may_skip: bool = True) -> str:
    """The error message for unreadable images, ``path: reason`` each; ``may_skip`` mentions ``on_bad="skip"``."""
    reasons = summarise_reasons(skipped)
    it, path = ("it", "path") if len(skipped) == 1 else ("them", "paths")
    remedy = f"check the {path}" if all(line.endswith(f": {NO_FILE}") for line in skipped) else f"remove {it}"
    alternative = ' or pass on_bad="skip"' if may_skip and len(skipped) < total else ""
    return f"{len(skipped)} of {total} images cannot be read ({reasons}): {remedy}{alternative}."


def summarise_reasons(skipped: Sequence[str]) -> str:
    """The first reasons with their images, and the number of other images.

    >>> summarise_reasons(["a.heic: it is a HEIC photo", "b.jpg: the file is empty", "c.heic: it is a HEIC photo"])
    'a.heic and c.heic: it is a HEIC photo; b.jpg: the file is empty'
    """
    images = _images_of_reason(skipped)
    more = sum(map(len, list(images.values())[_MAX_REASONS:]))
    return "; ".join(group_by_reason(skipped)[:_MAX_REASONS]) + (f"; and {more} more" if more else "")


def group_by_reason(skipped: Sequence[str]) -> list[str]:
    """Lines ``path: reason``, merged by reason.

    >>> group_by_reason([f"{n}.heic: it is a HEIC photo" for n in range(9)])
    ['0.heic, 1.heic, 2.heic, 3.heic, 4.heic and 4 more: it is a HEIC photo']
    """
    return [f"{list_names(images)}: {reason}" for reason, images in _images_of_reason(skipped).items()]


def _images_of_reason(skipped: Sequence[str]) -> dict[str, list[str]]:
    images: dict[str, list[str]] = {}
    for line in skipped:
        image, _, reason = line.partition(": ")
        images.setdefault(reason, []).append(image)
    return images


def check_readable(
    split: Split, rows: Labels, skipped: Sequence[str], on_bad: OnBad, names: Sequence[str] | None
) -> None:
    """Refuse unreadable images if ``on_bad`` is ``fail``, and classes without a readable image.

    ``rows`` are those of the readable images, ``skipped`` has ``path: reason`` of the others.
    """
    if skipped and on_bad == "fail":
        raise OneaError(describe_unreadable(skipped, len(split)))
    check_no_empty_class(split, rows, skipped, names)


def check_no_empty_class(split: Split, rows: Labels, skipped: Sequence[str], names: Sequence[str] | None) -> None:
    """Refuse a split with a class without readable images."""
    empty = np.setdiff1d(split.labels, split.labels[rows])
    if not len(empty):
        return
    first = int(empty[0])
    name = f"'{names[first]}'" if names is not None else str(first)
    more = f" (and of {len(empty) - 1} more)" if len(empty) > 1 else ""
    raise OneaError(
        f"No image of class {name}{more} can be read ({skipped[0]}): replace the bad files or remove the class."
    )


Item = TypeVar("Item")
Result = TypeVar("Result")

FEW_THREADS = 4  # for small tasks per file
_MAX_CHUNK = 16  # files per task of a thread
_SMALL_BYTES, _SAMPLED = 16_000, 64


def map_threaded(work: Callable[[Item], Result], files: Sequence[Item], threads: int | None = None) -> Iterator[Result]:
    """Map a function over files in threads, by default one per core (Pillow decodes without the GIL), in order."""
    workers = min(threads or available_cores(), available_cores())
    pending: deque[Future[list[Result]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="onea-decode")
    chunk = max(1, min(_MAX_CHUNK, len(files) // (8 * workers)))
    try:
        for start in range(0, len(files), chunk):
            # A bounded queue, so that decoded images do not fill the memory.
            if len(pending) >= 2 * workers:
                yield from pending.popleft().result()
            pending.append(pool.submit(lambda part: [work(file) for file in part], files[start : start + chunk]))
        while pending:
            yield from pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def num_decode_threads(files: Sequence[Path]) -> int:
    """The number of decoding threads: few for small images, for which threads mostly wait for the GIL."""
    sizes = []
    for file in files[:: max(1, len(files) // _SAMPLED)]:
        with suppress(OSError):
            sizes.append(file.stat().st_size)
    small = sum(sizes) < _SMALL_BYTES * len(sizes)
    return min(FEW_THREADS, available_cores()) if small else available_cores()


def sha256_of_files(files: Sequence[Path]) -> str:
    """One digest of the contents of all files."""
    digest = hashlib.sha256()
    for part in map_threaded(_digest, files, FEW_THREADS):
        digest.update(part)
    return digest.hexdigest()


def _digest(file: Path) -> bytes:
    try:
        return bytes.fromhex(sha256_of(file))
    except (OneaError, OSError):  # reported when it is decoded
        return b"unreadable"


def sha256_of(file: Path) -> str:
    """The sha256 of the content of a file."""
    stream, _ = open_regular(file, follow=True)
    with stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
