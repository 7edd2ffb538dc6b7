# SPDX-License-Identifier: Apache-2.0
"""The command line: thin commands, and one place where a user's mistake becomes one sentence."""

from __future__ import annotations

import atexit
import codecs
import gc
import json
import os
import re
import sys
import warnings
from contextlib import suppress
from io import TextIOWrapper
from typing import NoReturn

from onea.cpu import set_passive_waiting
from onea.errors import OUT_OF_MEMORY, OneaError, OutOfMemory, is_out_of_memory
from onea.files import NO_SPACE, cache_folder
from onea.text import single_line

# Arguments that messages may name.
_FLAGS = ("backbone", "device", "epochs", "image_size", "merge", "on_bad", "preset", "seed", "unknown")
_NO_MEMORY = 3  # exit code
# New objects until garbage is looked for: loading torch makes close to a million that stay, so first only after those.
_LOADED, _OBJECTS = 1_000_000, 50_000


def main() -> None:
    """Entry point of ``onea``."""
    try:
        from onea.cli.app import app
        from onea.cli.deferred import defer_compiler
    except KeyboardInterrupt:  # before any command has begun, so that there is nothing to say
        sys.exit(130)

    defer_compiler()
    _collect_later()
    atexit.register(_leave)
    set_passive_waiting()
    with suppress(RuntimeError):  # whoever has no home has no cache there
        os.environ.setdefault("MPLCONFIGDIR", str(cache_folder() / "matplotlib"))  # for its list of fonts
    warnings.filterwarnings("ignore", module="PIL")  # it would tell every odd tag of every photo
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a name that the terminal cannot show must not end a command
            stream.reconfigure(errors="onea.escaped")

    try:
        app()
    except OneaError as error:
        _stop(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _stop(str(error) if isinstance(error, OutOfMemory) else OUT_OF_MEMORY, _NO_MEMORY)
    except OSError as error:  # of what is printed, or of a temporary file; other files have sentences of their own
        if error.errno not in NO_SPACE:
            raise
        with suppress(OSError, ValueError):  # what is left to print would fail once more when the process ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _stop("No space left for what is printed or for temporary files; free some, or set TMPDIR to another disk.")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    r"""What an encoding lacks as JSON's escapes, so that lines of JSON stay valid; Python's own would spoil some.

    >>> print("Äpfel 🍎".encode("ascii", "onea.escaped").decode())
    \u00c4pfel \ud83c\udf4e
    """
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("onea.escaped", _escaped)


def _collect_later() -> None:
    """Look for garbage once what is loaded has been loaded; from then on every so many objects."""
    if _collected not in gc.callbacks:  # as it would be where several commands run in one process
        gc.callbacks.append(_collected)
    gc.set_threshold(_LOADED, *gc.get_threshold()[1:])


def _collected(phase: str, _: dict[str, int]) -> None:
    if phase == "stop":
        gc.callbacks.remove(_collected)
        gc.set_threshold(_OBJECTS, *gc.get_threshold()[1:])


def _leave() -> None:
    """Spare the process taking all modules apart before it ends, but for some that complain of what is left of them."""
    if not sys.modules.keys() & {"jaxlib", "onnx", "triton"}:
        gc.freeze()


def _stop(reason: str, code: int = 2) -> NoReturn:
    print(f"onea: {single_line(in_flags(reason))}", file=sys.stderr)
    sys.exit(code)


def in_flags(reason: str) -> str:
    """A message that names arguments, as Python writes them, in the words of the command line.

    >>> in_flags('Remove it or pass on_bad="skip".')
    'Remove it or pass --on-bad skip.'
    >>> in_flags("Leave out epochs=, or set unknown=0.")
    'Leave out --epochs, or set --unknown 0.'
    >>> in_flags("Set merge=True to make them one.")
    'Set --merge to make them one.'
    """
    named = re.compile(rf"(?<![\w/(-])({'|'.join(_FLAGS)})=(?:\"([^\"]*)\"|(\w*))")

    def flag(found: re.Match[str]) -> str:
        value = found[2] or found[3] or ""
        return f"--{found[1].replace('_', '-')} {'' if value == 'True' else value}".rstrip()

    return named.sub(flag, reason)
