# SPDX-License-Identifier: Apache-2.0
"""Work on many files at once: results in order from a few threads, and one digest of all."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from onea.errors import OneaError
from onea.files import open_plain

Item = TypeVar("Item")
Result = TypeVar("Result")

FEW_THREADS = 4  # for what takes little time of each file
_AT_ONCE = 16  # files that a thread takes
_SMALL_BYTES, _SAMPLED = 16_000, 64


def in_threads(work: Callable[[Item], Result], files: Sequence[Item], threads: int | None = None) -> Iterator[Result]:
    """The results in order, by default from a thread for each core (Pillow decodes without the interpreter's lock)."""
    workers = min(threads or _cores(), _cores())
    waiting: deque[Future[list[Result]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="onea-decode")
    some = max(1, min(_AT_ONCE, len(files) // (8 * workers)))
    try:
        for start in range(0, len(files), some):
            # A bounded queue: when the disk is slower than the decoders, memory must not fill up with images.
            if len(waiting) >= 2 * workers:
                yield from waiting.popleft().result()
            waiting.append(pool.submit(lambda part: [work(file) for file in part], files[start : start + some]))
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def threads_for(files: Sequence[Path]) -> int:
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
    for own in in_threads(_digest_of, files, FEW_THREADS):
        digest.update(own)
    return digest.hexdigest()


def _digest_of(file: Path) -> bytes:
    try:
        return bytes.fromhex(sha256_of(file))
    except (OneaError, OSError):  # reported when it is to be decoded
        return b"unreadable"


def sha256_of(file: Path) -> str:
    """The digest of what a file holds."""
    stream, _ = open_plain(file, follow=True)
    with stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _cores() -> int:
    """The cores this process may use, which in a container or a job are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
