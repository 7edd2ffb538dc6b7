"""One writer at a time for a model folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onea.files import check_writable
from onea.locks import file_lock

_NAME = "lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the folder is made if need be, and removed again if nothing was put into it.

    Raises:
        OneaError: another process holds it; says which, and since when.
    """
    check_writable(folder)
    existed = folder.exists()
    with file_lock(folder / _NAME):
        try:
            yield
        finally:
            if not existed and {entry.name for entry in folder.iterdir()} <= {_NAME}:
                with suppress(OSError):  # Windows does not remove what is open
                    (folder / _NAME).unlink()
                    folder.rmdir()
