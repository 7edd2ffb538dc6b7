# SPDX-License-Identifier: Apache-2.0
"""The command line. ``main`` prints errors as one sentence."""

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

# Arguments of Python functions that messages may name.
_ARGUMENTS = ("backbone", "device", "epochs", "image_size", "merge", "on_bad", "preset", "seed", "unknown")
_NO_MEMORY = 3  # exit code
# New objects between two garbage collections. Importing torch creates close to a million, none of them garbage.
_FIRST_COLLECTION, _COLLECTIONS = 1_000_000, 50_000


def main() -> None:
    """Entry point of ``onea``."""
    try:
        from onea.cli.app import app
        from onea.cli.deferred import defer_compiler
    except KeyboardInterrupt:  # before any command has started
        sys.exit(130)

    defer_compiler()
    _delay_garbage_collection()
    atexit.register(_skip_final_collection)
    set_passive_waiting()
    with suppress(RuntimeError):  # a user without a home folder
        os.environ.setdefault("MPLCONFIGDIR", str(cache_folder() / "matplotlib"))  # for its list of fonts
    warnings.filterwarnings("ignore", module="PIL")  # it warns of every invalid tag of a photo
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a name that the terminal cannot encode must not fail
            stream.reconfigure(errors="onea.escaped")

    try:
        app()
    except OneaError as error:
        _stop(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _stop(str(error) if isinstance(error, OutOfMemory) else OUT_OF_MEMORY, _NO_MEMORY)
    except OSError as error:  # on stdout or in a temporary file; errors of other files are OneaErrors
        if error.errno not in NO_SPACE:
            raise
        with suppress(OSError, ValueError):  # otherwise flushing stdout fails again when the process ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _stop("No space left for the output or for temporary files; free some, or set TMPDIR to another disk.")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    r"""Error handler that writes unsupported characters as JSON escapes, so that JSON stays valid.

    >>> print("Äpfel 🍎".encode("ascii", "onea.escaped").decode())
    \u00c4pfel \ud83c\udf4e
    """
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("onea.escaped", _escaped)


def _delay_garbage_collection() -> None:
    """Collect garbage for the first time when the imports are complete."""
    if _after_collection not in gc.callbacks:  # as when several commands run in one process
        gc.callbacks.append(_after_collection)
    gc.set_threshold(_FIRST_COLLECTION, *gc.get_threshold()[1:])


def _after_collection(phase: str, _: dict[str, int]) -> None:
    if phase == "stop":
        gc.callbacks.remove(_after_collection)
        gc.set_threshold(_COLLECTIONS, *gc.get_threshold()[1:])


def _skip_final_collection() -> None:
    """Exit without collecting all modules, except with libraries that then complain of leaks."""
    if not sys.modules.keys() & {"jaxlib", "onnx", "triton"}:
        gc.freeze()


def _stop(reason: str, code: int = 2) -> NoReturn:
    print(f"onea: {single_line(with_options(reason))}", file=sys.stderr)
    sys.exit(code)


def with_options(reason: str) -> str:
    """A message with options of the command line in place of Python arguments.

    >>> with_options('Remove it or pass on_bad="skip".')
    'Remove it or pass --on-bad skip.'
    >>> with_options("Leave out epochs=, or set unknown=0.")
    'Leave out --epochs, or set --unknown 0.'
    >>> with_options("Merge them by merge=True.")
    'Merge them by --merge.'
    """
    argument = re.compile(rf"(?<![\w/(-])({'|'.join(_ARGUMENTS)})=(?:\"([^\"]*)\"|(\w*))")

    def option(match: re.Match[str]) -> str:
        value = match[2] or match[3] or ""
        return f"--{match[1].replace('_', '-')} {'' if value == 'True' else value}".rstrip()

    return argument.sub(option, reason)
