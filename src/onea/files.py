# SPDX-License-Identifier: Apache-2.0
"""Reading and writing files safely.

New content is complete on disk before the old name points to it, so a crash leaves no half-written file. In a folder
from somebody else, a name may be a symbolic link, a pipe or a device: ``check_regular`` and ``read_regular`` accept
regular files and folders only. JSON files can carry a checksum of their content."""

from __future__ import annotations

import errno
import gzip
import json
import os
import stat
import zlib
from contextlib import suppress
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onea.errors import OneaError, truncate

if TYPE_CHECKING:
    from torch import Tensor


import hashlib
import math
from collections.abc import Mapping
from typing import NoReturn

MODEL_FILE = "model.json"
"""What makes a folder that of a taught model."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""What the system says of a full disk, or of one whose share is used up."""
CACHE_REMEDY = "set ONEA_CACHE to another folder"
_MOST = 2**30  # bytes of a JSON file: ten times those of a stream of a thousand tasks and classes
_JUNCTION = 0xA0000003  # Windows' links between folders, which are no links to S_ISLNK
# Where a system lacks one of these (Windows), lstat has looked at the name just before.
_BYTES = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_ITSELF = getattr(os, "O_NOFOLLOW", 0) | _BYTES
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # opening a pipe would wait for a writer


def cache_folder() -> Path:
    """The folder for what can be made again: ``$ONEA_CACHE``, else ``$XDG_CACHE_HOME/onea``, else ``~/.cache/onea``."""
    if chosen := os.environ.get("ONEA_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "onea"


def write_atomically(path: Path, content: bytes, remedy: str = "choose another folder") -> None:
    """Replace ``path`` by a file with this content, or leave it as it was; ``remedy`` ends the message of a failure."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # left by a process that had our number, or a link that waits for us
            partial.unlink()
        _write_new(partial, content)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise write_error(path.parent, len(content), error, remedy) from error


def _write_new(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _ITSELF, 0o666)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Wait until what was renamed in a folder is on disk; Windows opens no folders and sees to it by itself."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any, remedy: str = "choose another folder") -> None:
    """Replace ``path`` by this value as readable JSON; NaN is refused, because JSON has none."""
    write_atomically(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode(), remedy)


def write_text(path: Path, text: str, remedy: str = "choose another folder") -> None:
    """Replace ``path`` by this text in UTF-8; a file's name that is none is told by escapes, as terminals show it."""
    write_atomically(path, text.encode(errors="backslashreplace"), remedy)


def write_error(folder: Path, size: int, error: OSError, remedy: str) -> OneaError:
    """What to tell a user when ``size`` bytes could not be written."""
    if error.errno in NO_SPACE:
        megabytes = max(1, -(-size // 1_000_000))
        return OneaError(f"No space left in {folder}: needs {megabytes:,} MB; free some or {remedy}.")
    return OneaError(f"Cannot write to {folder} ({error.strerror or error}): make it writable or {remedy}.")


def file_stamp(path: Path) -> str:
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
        raise OneaError(f"'{truncate(path)}' cannot be a path ({reason}); choose another.") from error


def check_writable(folder: Path) -> None:
    """Refuse a folder that could not be written to, before hours are spent on what should go there."""
    check_path(folder)
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        where = "it" if existing == folder else existing
        raise OneaError(f"Cannot write to {folder}: {where} is not a folder that you may write to; choose another.")


def check_no_model(folder: Path) -> None:
    """Refuse the folder of a taught model for runs, whose files would lie among those of the model."""
    if os.path.lexists(folder / MODEL_FILE):
        raise OneaError(f"{folder} holds a model, and runs need a folder of their own; choose another --out.")


def check_regular(path: Path, *, folder: bool = False) -> os.stat_result | None:
    """The status of the plain file (or folder) of this name, if there is one; anything else is refused."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    if stat.S_ISLNK(status.st_mode) or getattr(status, "st_reparse_tag", 0) == _JUNCTION:
        raise OneaError(f"{path} is a link, which may lead anywhere; put what it leads to in its place.")
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(status.st_mode):
        raise OneaError(f"{path} is not a plain {'folder' if folder else 'file'}; remove it or restore it from a copy.")
    return status


def open_regular(path: Path, *, follow: bool = False) -> tuple[BufferedReader, int]:
    """A plain file, opened for reading, and its size; ``follow`` takes a link to one as well."""
    if not follow:
        check_regular(path)
    try:
        handle = os.open(path, os.O_RDONLY | _AT_ONCE | (_BYTES if follow else _ITSELF))
    except OSError as error:
        raise _unreadable(path, error) from error
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):  # it was replaced just now, or a link leads there
        os.close(handle)
        raise OneaError(f"{path} is not a plain file; remove it or restore it from a copy.")
    return os.fdopen(handle, "rb"), status.st_size


def read_regular(path: Path, most: int = _MOST, *, follow: bool = False) -> bytes:
    """The content of a plain file of at most so many bytes; ``follow`` takes a link to one as well."""
    file, size = open_regular(path, follow=follow)
    with file:
        if size > most:
            raise OneaError(f"{path} has {size:,} bytes, and may have {most:,} at most; restore it from a copy.")
        try:
            return file.read(size)
        except OSError as error:
            raise _unreadable(path, error) from error


def gunzip(content: bytes, most: int = _MOST) -> bytes:
    """The content of a gzip file, of at most so many bytes.

    Raises:
        ValueError: it is not a whole gzip file, or there is more in it.
    """
    try:
        with gzip.open(BytesIO(content)) as file:
            found = file.read(most + 1)
    except (EOFError, OSError, zlib.error):
        raise ValueError("not gzip") from None
    if len(found) > most:
        raise ValueError(f"more than {most:,} bytes are in it")
    return found


def _unreadable(path: Path, error: OSError) -> OneaError:
    return OneaError(f"{path} cannot be read ({error.strerror}); check the path.")


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    content = read_regular(path, follow=True)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise OneaError(f"{path} is damaged (not JSON); delete it or restore it from a copy.") from error


def read_tensors(source: Path | bytes, what: str, remedy: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of its content; a failure is told as "``what`` is damaged; ``remedy``."."""
    from safetensors import SafetensorError
    from safetensors.torch import load, load_file

    try:
        return load(source) if isinstance(source, bytes) else load_file(source)
    except OSError as error:
        raise OneaError(f"{what} cannot be read ({error}); {remedy}.") from error
    # A type of numbers that torch does not have is a KeyError, and one that it cannot show an AttributeError.
    except (SafetensorError, AssertionError, AttributeError, LookupError, ValueError) as error:
        reason = truncate(" ".join(str(error).split()))
        raise OneaError(f"{what} is damaged or not safetensors ({reason}); {remedy}.") from error


CHECKSUM = "content_sha256"
"""Name under which a file has its checksum."""
_CLOSE: dict[str, Any] = {"separators": (",", ":"), "allow_nan": False}


class DamagedFile(Exception):  # noqa: N818 - a reason, which becomes part of a sentence
    """The damage of a file, in words."""


def dump_with_checksum(content: Mapping[str, Any]) -> bytes:
    """A JSON file with these values and a new checksum; NaN is refused, because JSON has none."""
    values = {name: value for name, value in content.items() if name != CHECKSUM}
    return dump_json({**values, CHECKSUM: _digest(values)})


def dump_json(content: Mapping[str, Any]) -> bytes:
    """A JSON file with a line for each value: easy to look at, and records with many numbers stay small."""
    lines = (f"{json.dumps(name)}:{json.dumps(value, **_CLOSE)}" for name, value in content.items())
    return ("{" + ",\n".join(lines) + "}\n").encode()


def load_with_checksum(content: bytes) -> dict[str, Any]:
    """The values in a file that ``dump_with_checksum`` made.

    Raises:
        DamagedFile: they are not those.
    """
    found = parse_json_object(content)
    verify_checksum(found)
    return found


def parse_json_object(content: bytes) -> dict[str, Any]:
    """The values in a JSON file, their checksum included; of JSON's numbers only those that Python has."""
    try:
        found = json.loads(content, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError):
        raise DamagedFile("not JSON") from None
    if not isinstance(found, dict):
        raise DamagedFile("no JSON object")
    return found


def verify_checksum(found: dict[str, Any]) -> None:
    """Take the checksum off these values, and refuse them if it is another one."""
    if found.pop(CHECKSUM, None) != _digest(found):
        raise DamagedFile("it is not what was written, says its checksum")


def _digest(content: Mapping[str, Any]) -> str:
    """sha256 of values, whatever the order and the white space they are written with."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is too large")
    return number
