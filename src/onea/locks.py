# SPDX-License-Identifier: Apache-2.0
"""Lock files: one process at a time. The system frees the lock of a process that ends, however it ends."""

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

_LONGEST = 1_000  # bytes that a holder writes, and more

LOCK = "lock"
"""Name of the lock file of a folder."""


@contextmanager
def folder_lock(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder; folders that are made for it are removed again if nothing was put into them.

    Args:
        folder: the folder.
        wait: whether to wait until another holder is done instead of refusing.

    Raises:
        OneaError: as ``file_lock``.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        with file_lock(folder / LOCK, wait=wait):
            try:
                yield
            finally:
                if made and {entry.name for entry in folder.iterdir()} <= {LOCK}:
                    with suppress(OSError):  # Windows does not remove what is open
                        (folder / LOCK).unlink()
    finally:
        with suppress(OSError):  # the first that is not empty stays, and those around it
            for place in made:
                place.rmdir()


@contextmanager
def file_lock(path: Path, *, wait: bool = False, remedy: str = "choose another folder") -> Iterator[None]:
    """Hold the lock file ``path``. It stays afterwards: a lock on a file that was removed protects nothing.

    Args:
        path: the lock file; it and its folder are made where they are missing.
        wait: whether to wait until another holder is done instead of refusing.
        remedy: ends the message of a failure to write.

    Raises:
        OneaError: another holder has it (the sentence says which process, and since when), it is no plain file of one
            name, or its folder cannot be written to.
    """
    status = check_regular(path)
    if status and status.st_nlink > 1:  # what is written into it would change under its other name as well
        raise OneaError(f"{path} has another name elsewhere (a hard link); delete it and try again.")
    try:
        lock = _acquired(path, wait)
    except Timeout:
        raise OneaError(
            f"{path.parent} is being written by {_holder(path)}; wait until it is done, or stop it."
        ) from None
    except NotImplementedError as error:  # filelock's word for a file system without locks
        raise OneaError(f"The file system of {path.parent} has no locks; {remedy}.") from error
    except OSError as error:
        raise write_error(path.parent, len(_signature()), error, remedy) from error
    try:
        _write(path, _signature())
        yield
    finally:
        _write(path, b"")  # whoever gets a copy of the folder needs not know on which machine it was written
        lock.release()


def _acquired(path: Path, wait: bool) -> BaseFileLock:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, timeout=-1 if wait else 0)
        try:
            lock.acquire()
        except FileNotFoundError:
            if path.parent.exists():
                raise
            continue  # whoever had the lock has left nothing, and taken its empty folder away
        return lock


def _write(path: Path, holder: bytes) -> None:
    """Write down the holder, for the sentence that others get; where a held file cannot be written, they get less."""
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
        holder = json.loads(read_regular(path, _LONGEST))
        host = str(holder.get("host", platform.node()))
        where = "" if host == platform.node() else f" on {host}"
        return f"process {int(holder['pid'])}{where}, for {max(0, time.time() - float(holder['since'])):.0f} s so far"
    except (OneaError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return "another process"
