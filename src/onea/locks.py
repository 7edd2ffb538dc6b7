# SPDX-License-Identifier: Apache-2.0
"""Lock files: one process at a time. The operating system releases the locks of a process that exits or crashes."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from onea.errors import OneaError
from onea.files import check_regular, read_regular, write_error

_MAX_BYTES = 1_000  # of a lock file; holders write fewer

LOCK = "lock"
"""Name of the lock file of a folder."""


@contextmanager
def folder_lock(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder, which is created if missing, and removed again if it stays empty.

    Args:
        folder: the folder.
        wait: whether to wait for another process instead of raising an error.

    Raises:
        OneaError: as ``file_lock``.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with file_lock(folder / LOCK, wait=wait):
            try:
                yield
            finally:
                if created and {entry.name for entry in folder.iterdir()} <= {LOCK}:
                    with suppress(OSError):  # Windows does not remove open files
                        (folder / LOCK).unlink()
    finally:
        with suppress(OSError):  # stop at the first folder that is not empty
            for path in created:
                path.rmdir()


@contextmanager
def file_lock(path: Path, *, wait: bool = False, remedy: str = "choose another folder") -> Iterator[None]:
    """Hold the lock file ``path``, which is never removed, as a lock on a removed file is ineffective.

    Args:
        path: the lock file; it and its folder are created if missing.
        wait: whether to wait for another process instead of raising an error.
        remedy: end of the error message when the folder is not writable.

    Raises:
        OneaError: another process holds the lock (the message names it), the path is not a regular file, or its folder
            is not writable.
    """
    status = check_regular(path)
    if status and status.st_nlink > 1:  # writing would change the other file, too
        raise OneaError(f"{path} is a hard link to another file; delete it and try again.")
    try:
        lock = _acquire(path, wait)
    except Timeout:
        raise OneaError(
            f"{path.parent} is being written by {_holder(path)}; wait until it is done, or stop it."
        ) from None
    except NotImplementedError as error:  # raised by filelock if the file system has no locks
        raise OneaError(f"The file system of {path.parent} does not support locks; {remedy}.") from error
    except OSError as error:
        raise write_error(path.parent, len(_signature()), error, remedy) from error
    try:
        _write(path, _signature())
        yield
    finally:
        _write(path, b"")  # a copied folder must not reveal the machine
        lock.release()


def _acquire(path: Path, wait: bool) -> BaseFileLock:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, timeout=-1 if wait else 0)
        try:
            lock.acquire()
        except FileNotFoundError:
            if path.parent.exists():
                raise
            continue  # the last holder removed its empty folder
        return lock


def _write(path: Path, holder: bytes) -> None:
    """Record the process for the error message of others, if the system allows writing to a locked file."""
    with suppress(OSError):
        handle = os.open(path, os.O_WRONLY | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0))
        try:
            os.write(handle, holder)
        finally:
            os.close(handle)


def _signature() -> bytes:
    return json.dumps({"pid": os.getpid(), "host": platform.node(), "since": time.time()}).encode()


def _holder(path: Path) -> str:
    try:
        holder = json.loads(read_regular(path, _MAX_BYTES))
        host = str(holder.get("host", platform.node()))
        where = "" if host == platform.node() else f" on {host}"
        return f"process {int(holder['pid'])}{where}, for {max(0, time.time() - float(holder['since'])):.0f} s so far"
    except (OneaError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return "another process"
