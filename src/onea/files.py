# SPDX-License-Identifier: Apache-2.0
"""Reading and writing files safely.

Files are written under another name and then renamed, so a crash leaves no partial file. In an untrusted folder, a name
may be a symbolic link, a pipe or a device: ``check_regular`` and ``read_regular`` accept regular files and folders
only. JSON files can include a checksum of their content."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import math
import os
import stat
import zlib
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from onea.errors import OneaError, truncate

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FILE = "model.json"
"""The file that marks a model folder."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of an exhausted quota."""
CHECKSUM = "content_sha256"
"""Key of the checksum in a JSON object."""
CACHE_REMEDY = "set ONEA_CACHE to another folder"
_MAX_BYTES = 2**30  # ten times the record of a stream with a thousand tasks and classes
_JUNCTION = 0xA0000003  # links between folders on Windows, which S_ISLNK does not recognise
# On systems without one of these flags (Windows), only lstat checks the name.
_BINARY = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | _BINARY
_NON_BLOCKING = getattr(os, "O_NONBLOCK", 0)  # opening a pipe must not wait for its writer


def cache_folder() -> Path:
    """The cache folder: ``$ONEA_CACHE``, else ``$XDG_CACHE_HOME/onea``, else ``~/.cache/onea``."""
    if chosen := os.environ.get("ONEA_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "onea"


def write_atomically(path: Path, content: bytes, remedy: str = "choose another folder") -> None:
    """Replace ``path`` by a file with this content, or leave it unchanged; ``remedy`` ends the error message."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # left by a crashed process with the same id, or a link planted there
            partial.unlink()
        _write_new(partial, content)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise write_error(path.parent, len(content), error, remedy) from error


def _write_new(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o666)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Wait until renames in a folder are on disk; Windows, which cannot open folders, does this itself."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any, remedy: str = "choose another folder") -> None:
    """Replace ``path`` by this value as indented JSON; NaN is refused, as JSON has none."""
    write_atomically(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode(), remedy)


def write_text(path: Path, text: str, remedy: str = "choose another folder") -> None:
    """Replace ``path`` by this text in UTF-8; bytes that are not UTF-8, as in file names, are escaped."""
    write_atomically(path, text.encode(errors="backslashreplace"), remedy)


def write_error(folder: Path, size: int, error: OSError, remedy: str) -> OneaError:
    """The error for ``size`` bytes that could not be written."""
    if error.errno in NO_SPACE:
        megabytes = max(1, -(-size // 1_000_000))
        return OneaError(f"No space left in {folder}: needs {megabytes:,} MB; free some or {remedy}.")
    return OneaError(f"Cannot write to {folder} ({error.strerror or error}): make it writable or {remedy}.")


def file_stamp(path: Path) -> str:
    """Size and times of a file, to detect changes without reading it; empty if the file does not exist.

    An edit that restores the modification time still changes ``ctime``, except on Windows, where ``ctime`` is the
    creation time.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return ""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def check_path(path: Path) -> None:
    """Refuse a path that is too long or has invalid characters."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OneaError(f"'{truncate(path)}' cannot be a path ({reason}); choose another.") from error


def check_writable(folder: Path) -> None:
    """Refuse a folder that is not writable, before a long computation."""
    check_path(folder)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        where = "it" if existing == folder else existing
        raise OneaError(f"Cannot write to {folder}: {where} is not a folder that you may write to; choose another.")


def check_no_model(folder: Path) -> None:
    """Refuse a model folder as the output folder of a run."""
    if os.path.lexists(folder / MODEL_FILE):
        raise OneaError(f"{folder} contains a model, and runs need a separate folder; choose another --out.")


def check_regular(path: Path, *, folder: bool = False) -> os.stat_result | None:
    """The status of a regular file (or folder); None if there is none; links, pipes and devices are refused."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    if stat.S_ISLNK(status.st_mode) or getattr(status, "st_reparse_tag", 0) == _JUNCTION:
        raise OneaError(f"{path} is a symbolic link; replace it with the file or folder that it points to.")
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(status.st_mode):
        raise OneaError(
            f"{path} is not a plain {'folder' if folder else 'file'}; remove it or restore it from a backup."
        )
    return status


def open_regular(path: Path, *, follow: bool = False) -> tuple[BufferedReader, int]:
    """A regular file, opened for reading, and its size; ``follow`` accepts a link to one."""
    if not follow:
        check_regular(path)
    try:
        handle = os.open(path, os.O_RDONLY | _NON_BLOCKING | (_BINARY if follow else _NO_FOLLOW))
    except OSError as error:
        raise _unreadable(path, error) from error
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):  # replaced since the check, or the target of a link
        os.close(handle)
        raise OneaError(f"{path} is not a plain file; remove it or restore it from a backup.")
    return os.fdopen(handle, "rb"), status.st_size


def read_regular(path: Path, max_bytes: int = _MAX_BYTES, *, follow: bool = False) -> bytes:
    """The content of a regular file; ``follow`` accepts a link to one.

    Raises:
        OneaError: it is not a regular file, cannot be read, or has more than ``max_bytes``.
    """
    file, size = open_regular(path, follow=follow)
    with file:
        if size > max_bytes:
            raise OneaError(
                f"{path} has {size:,} bytes, but at most {max_bytes:,} are allowed; restore it from a backup."
            )
        try:
            return file.read(size)
        except OSError as error:
            raise _unreadable(path, error) from error


def gunzip(content: bytes, max_bytes: int = _MAX_BYTES) -> bytes:
    """The content of a gzip file.

    Raises:
        ValueError: it is not a complete gzip file, or has more than ``max_bytes``.
    """
    try:
        with gzip.open(BytesIO(content)) as file:
            decompressed = file.read(max_bytes + 1)
    except (EOFError, OSError, zlib.error):
        raise ValueError("not gzip") from None
    if len(decompressed) > max_bytes:
        raise ValueError(f"more than {max_bytes:,} bytes uncompressed")
    return decompressed


def _unreadable(path: Path, error: OSError) -> OneaError:
    return OneaError(f"{path} cannot be read ({error.strerror}); check the path.")


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    content = read_regular(path, follow=True)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise OneaError(f"{path} is damaged (not JSON); delete it or restore it from a backup.") from error


def read_tensors(source: Path | bytes, what: str, remedy: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file or of its bytes; errors read "``what`` is damaged; ``remedy``."."""
    from safetensors import SafetensorError
    from safetensors.torch import load, load_file

    try:
        return load(source) if isinstance(source, bytes) else load_file(source)
    except OSError as error:
        raise OneaError(f"{what} cannot be read ({error}); {remedy}.") from error
    # safetensors raises KeyError for dtypes that torch lacks, and AttributeError for those it cannot view.
    except (SafetensorError, AssertionError, AttributeError, LookupError, ValueError) as error:
        reason = truncate(" ".join(str(error).split()))
        raise OneaError(f"{what} is damaged or not safetensors ({reason}); {remedy}.") from error


class DamagedFile(Exception):  # noqa: N818
    """A file is damaged; the message is the reason, as part of a longer error message."""


def dump_with_checksum(content: Mapping[str, Any]) -> bytes:
    """A JSON object with these values and their checksum, one line per value; NaN is refused, as JSON has none."""
    values = {name: value for name, value in content.items() if name != CHECKSUM}
    lines = (
        f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'), allow_nan=False)}"
        for name, value in (values | {CHECKSUM: _digest(values)}).items()
    )
    return ("{" + ",\n".join(lines) + "}\n").encode()


def parse_json_object(content: bytes) -> dict[str, Any]:
    """The values of a JSON object, including the checksum; NaN and infinite numbers are refused."""
    try:
        values = json.loads(content, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        raise DamagedFile("not JSON") from None
    if not isinstance(values, dict):
        raise DamagedFile("not a JSON object")
    return values


def verify_checksum(values: dict[str, Any]) -> None:
    """Remove the checksum from these values.

    Raises:
        DamagedFile: it does not match.
    """
    if values.pop(CHECKSUM, None) != _digest(values):
        raise DamagedFile("its content does not match its checksum")


def _digest(content: Mapping[str, Any]) -> str:
    """sha256 of values, independent of key order and white space."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is too large")
    return number
