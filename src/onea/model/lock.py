"""One writer at a time for a model folder; the system frees the lock of a process that died."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onea.errors import OneaError
from onea.files import check_writable

_NAME = "lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the folder is made if need be, and removed again if nothing was put into it.

    Raises:
        OneaError: another process holds it; says which, and since when.
    """
    check_writable(folder)
    existed = folder.exists()
    handle = _take(folder)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "since": time.time()}).encode(), 0)
        yield
    finally:
        if not existed and {entry.name for entry in folder.iterdir()} <= {_NAME}:
            (folder / _NAME).unlink()
            with suppress(OSError):
                folder.rmdir()
        os.close(handle)


def _take(folder: Path) -> int:
    path = folder / _NAME
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OneaError(
                f"Cannot write to {folder} ({error.strerror}); make it writable or choose another."
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it may have removed the file meanwhile: a lock on a file without a name protects nothing.
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
            os.close(handle)
        except BlockingIOError:
            os.close(handle)
            raise OneaError(_held(folder, path)) from None
        except FileNotFoundError:
            os.close(handle)


def _held(folder: Path, path: Path) -> str:
    try:
        holder = json.loads(path.read_bytes())
        who = f"process {holder['pid']}, for {max(0, time.time() - holder['since']):.0f} s so far"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return f"{folder} is being written by {who}; wait until it is done, or stop it."
