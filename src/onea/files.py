"""Writing that a crash cannot spoil: the new content is complete on disk before the old name points to it."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from onea.errors import OneaError, short

CACHE_REMEDY = "set ONEA_CACHE to another folder"


def default_cache() -> Path:
    """The folder for what can be made again: ``$ONEA_CACHE``, else ``$XDG_CACHE_HOME/onea``, else ``~/.cache/onea``."""
    if chosen := os.environ.get("ONEA_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "onea"


def write_atomically(path: Path, content: bytes, remedy: str = "choose another folder") -> None:
    """Replace ``path`` by a file with this content, or leave it as it was; ``remedy`` ends the message of a failure."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise unwritable(path.parent, len(content), error, remedy) from error


def write_json(path: Path, value: Any, remedy: str = "choose another folder") -> None:
    """Replace ``path`` by this value as readable JSON; NaN is refused, because JSON has none."""
    write_atomically(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode(), remedy)


def unwritable(folder: Path, size: int, error: OSError, remedy: str) -> OneaError:
    """What to tell a user when ``size`` bytes could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        megabytes = max(1, -(-size // 1_000_000))
        return OneaError(f"No space left in {folder}: needs {megabytes:,} MB; free some or {remedy}.")
    return OneaError(f"Cannot write to {folder} ({error.strerror or error}): make it writable or {remedy}.")


def stamp_of(path: Path) -> str:
    """Size and times of a file, which tell without reading it that nobody has touched it; empty where there is none.

    An edit that puts the modification time back still moves the change time (``ctime``). On Windows that one is the
    time of creation, and such an edit shows only in the content.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return ""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def check_path(path: Path) -> None:
    """Refuse what the system cannot even look for: a path that is too long, or holds what no name can hold."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OneaError(f"'{short(path)}' cannot be a path ({reason}); choose another.") from error


def check_writable(folder: Path) -> None:
    """Refuse a folder that could not be written to, before hours are spent on what should go there."""
    check_path(folder)
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OneaError(f"Cannot write to {folder}: {existing} is not a folder that you may write to; choose another.")


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise OneaError(f"{path} cannot be read ({error.strerror}); check the path.") from error
    except ValueError as error:
        raise OneaError(f"{path} is damaged (not JSON); delete it or restore it from a copy.") from error
