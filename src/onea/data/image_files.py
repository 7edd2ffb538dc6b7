# SPDX-License-Identifier: Apache-2.0
"""Many image files at once: decoded in threads, unreadable ones reported or skipped, one digest for all."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from onea.data.dataset import Labels, Split
from onea.data.decode import NO_FILE, BadImage, read_image
from onea.errors import OneaError
from onea.files import open_regular
from onea.text import list_names

OnBad = Literal["fail", "skip"]
_NAMED = 5  # reasons; the images of others are counted


def find_readable(split: Split, *, on_bad: OnBad, class_names: Sequence[str] | None = None) -> tuple[Labels, list[str]]:
    """Look at every file of a split whose images are not packed but read anew each time, and keep none of them.

    Returns:
        The rows that can be read, and ``path: reason`` of each file that cannot.

    Raises:
        OneaError: as ``pack`` of the same files does.
    """

    def problem(file: Path) -> str | None:
        try:
            read_image(file)
        except BadImage as error:
            return f"{error.path}: {error.reason}"
        return None

    assert split.files is not None
    found = list(map_threaded(problem, split.files, num_decode_threads(split.files)))
    rows = np.array([row for row, line in enumerate(found) if line is None], dtype=np.int64)
    skipped = [line for line in found if line is not None]
    check_readable(split, rows, skipped, on_bad, class_names)
    return rows, skipped


def describe_unreadable(skipped: Sequence[str], total: int, *, may_skip: bool = True) -> str:
    """What to tell a user whose images cannot be read, ``path: reason`` each; ``may_skip``: and who could skip them."""
    named = summarise_reasons(skipped)
    it, path = ("it", "path") if len(skipped) == 1 else ("them", "paths")
    remedy = f"check the {path}" if all(line.endswith(f": {NO_FILE}") for line in skipped) else f"remove {it}"
    otherwise = ' or pass on_bad="skip"' if may_skip and len(skipped) < total else ""  # which needs one that is left
    return f"{len(skipped)} of {total} images cannot be read ({named}): {remedy}{otherwise}."


def summarise_reasons(skipped: Sequence[str]) -> str:
    """The first reasons with their images, and how many images there are besides.

    >>> summarise_reasons(["a.heic: it is a HEIC photo", "b.jpg: the file is empty", "c.heic: it is a HEIC photo"])
    'a.heic and c.heic: it is a HEIC photo; b.jpg: the file is empty'
    """
    found = _images_of_reason(skipped)
    more = sum(map(len, list(found.values())[_NAMED:]))
    return "; ".join(group_by_reason(skipped)[:_NAMED]) + (f"; and {more} more" if more else "")


def group_by_reason(skipped: Sequence[str]) -> list[str]:
    """Lines ``path: reason``, those with the same reason as one.

    >>> group_by_reason([f"{n}.heic: it is a HEIC photo" for n in range(9)])
    ['0.heic, 1.heic, 2.heic, 3.heic, 4.heic and 4 more: it is a HEIC photo']
    """
    return [f"{list_names(images)}: {reason}" for reason, images in _images_of_reason(skipped).items()]


def _images_of_reason(skipped: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in skipped:
        image, _, reason = line.partition(
            ": "
        )  # a path that holds these two characters stays in one piece all the same
        found.setdefault(reason, []).append(image)
    return found


def check_readable(
    split: Split, rows: Labels, skipped: Sequence[str], on_bad: OnBad, names: Sequence[str] | None
) -> None:
    """Refuse a split whose images cannot all be read, or one of whose classes has none that can.

    Args:
        split: whose files were looked at.
        rows: those that can be read.
        skipped: ``path: reason`` of each that cannot.
        on_bad: whether one of them is too many.
        names: of the classes, by label.
    """
    if skipped and on_bad == "fail":
        raise OneaError(describe_unreadable(skipped, len(split)))
    check_no_empty_class(split, rows, skipped, names)


def check_no_empty_class(split: Split, rows: Labels, skipped: Sequence[str], names: Sequence[str] | None) -> None:
    """Refuse a split one of whose classes has no image that can be read."""
    empty = np.setdiff1d(split.labels, split.labels[rows])
    if not len(empty):
        return
    first = int(empty[0])
    called = f"'{names[first]}'" if names is not None else str(first)
    more = f" (and of {len(empty) - 1} more)" if len(empty) > 1 else ""
    raise OneaError(
        f"No image of class {called}{more} can be read ({skipped[0]}): replace the bad files or remove the class."
    )


Item = TypeVar("Item")
Result = TypeVar("Result")

FEW_THREADS = 4  # for what takes little time of each file
_AT_ONCE = 16  # files that a thread takes
_SMALL_BYTES, _SAMPLED = 16_000, 64


def map_threaded(work: Callable[[Item], Result], files: Sequence[Item], threads: int | None = None) -> Iterator[Result]:
    """The results in order, by default from a thread for each core (Pillow decodes without the interpreter's lock)."""
    workers = min(threads or _cores(), _cores())
    waiting: deque[Future[list[Result]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="onea-decode")
    list_names = max(1, min(_AT_ONCE, len(files) // (8 * workers)))
    try:
        for start in range(0, len(files), list_names):
            # A bounded queue: when the disk is slower than the decoders, memory must not fill up with images.
            if len(waiting) >= 2 * workers:
                yield from waiting.popleft().result()
            waiting.append(pool.submit(lambda part: [work(file) for file in part], files[start : start + list_names]))
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def num_decode_threads(files: Sequence[Path]) -> int:
    """A small image takes longer to hand over than to decode: many threads would only queue for the interpreter."""
    sizes = []
    for file in files[:: max(1, len(files) // _SAMPLED)]:
        with suppress(OSError):
            sizes.append(file.stat().st_size)
    small = sum(sizes) < _SMALL_BYTES * len(sizes)
    return min(FEW_THREADS, _cores()) if small else _cores()


def sha256_of_files(files: Sequence[Path]) -> str:
    """One digest of the contents of all these files, for images that are read anew whenever they are needed."""
    digest = hashlib.sha256()
    for own in map_threaded(_digest_of, files, FEW_THREADS):
        digest.update(own)
    return digest.hexdigest()


def _digest_of(file: Path) -> bytes:
    try:
        return bytes.fromhex(sha256_of(file))
    except (OneaError, OSError):  # reported when it is to be decoded
        return b"unreadable"


def sha256_of(file: Path) -> str:
    """The digest of what a file holds."""
    stream, _ = open_regular(file, follow=True)
    with stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _cores() -> int:
    """The cores this process may use, which in a container or a job are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
