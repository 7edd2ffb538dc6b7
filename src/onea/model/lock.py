# SPDX-License-Identifier: Apache-2.0
"""One writer at a time for a model folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onea.files import check_writable
from onea.locks import file_lock
from onea.model.layout import LOCK, holds_model


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the folder is made if need be, and removed again if nothing was put into it.

    A lock file that was made here does not stay where no model came to be, such as in a folder of photos.

    Raises:
        OneaError: another process holds it; says which, and since when.
    """
    check_writable(folder)
    existed, had_lock = folder.exists(), os.path.lexists(folder / LOCK)
    try:
        with file_lock(folder / LOCK):
            try:
                yield
            finally:
                if not had_lock and not holds_model(folder):
                    with suppress(OSError):  # Windows does not remove what is open
                        (folder / LOCK).unlink()
    finally:
        if not existed:
            with suppress(OSError):  # it stays unless it is empty, as after a lock that found no room on the disk
                folder.rmdir()
