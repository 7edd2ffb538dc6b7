"""Lock files: one process at a time. The system frees the lock of a process that ends, however it ends."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from onea.errors import OneaError
from onea.files import check_plain, read_plain, unwritable

_LONGEST = 1_000  # bytes that a holder writes, and more


@contextmanager
def file_lock(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file ``path``. It stays afterwards: a lock on a file that was removed protects nothing.

    Args:
        path: the lock file; it and its folder are made where they are missing.
        wait: whether to wait until another holder is done instead of refusing.

    Raises:
        OneaError: another holder has it (the sentence says which process, and since when), it is no plain file of one
            name, or its folder cannot be written to.
    """
    status = check_plain(path)
    if status and status.st_nlink > 1:  # what is written into it would change under its other name as well
        raise OneaError(f"{path} has another name elsewhere (a hard link); delete it and try again.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, timeout=-1 if wait else 0)
        lock.acquire()
    except Timeout:
        raise OneaError(
            f"{path.parent} is being written by {_holder(path)}; wait until it is done, or stop it."
        ) from None
    except OSError as error:
        raise unwritable(path.parent, len(_signature()), error, "choose another folder") from error
    try:
        _sign(path)
        yield
    finally:
        lock.release()


def _sign(path: Path) -> None:
    """Write down the holder, for the sentence that others get; where a held file cannot be written, they get less."""
    with suppress(OSError):
        handle = os.open(path, os.O_WRONLY | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0))
        try:
            os.write(handle, _signature())
        finally:
            os.close(handle)


def _signature() -> bytes:
    return json.dumps({"pid": os.getpid(), "since": time.time()}).encode()


def _holder(path: Path) -> str:
    try:
        holder = json.loads(read_plain(path, _LONGEST))
        return f"process {int(holder['pid'])}, for {max(0, time.time() - float(holder['since'])):.0f} s so far"
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "another process"
