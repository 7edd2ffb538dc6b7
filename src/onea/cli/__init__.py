# SPDX-License-Identifier: Apache-2.0
"""The command line: thin commands, and one place where a user's mistake becomes one sentence."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import NoReturn

from onea.errors import OneaError, is_out_of_memory
from onea.text import sentence


def main() -> None:
    """Entry point of ``onea``."""
    from onea.cli.app import app

    # Threads that wait by spinning bring a shared machine to a crawl; must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a name that the terminal cannot show must not end a command
            stream.reconfigure(errors="backslashreplace")

    try:
        app()
    except OneaError as error:
        _stop(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _stop("There is not enough memory for this; ask for less (batch size, rank, images), or use a larger machine.")


def _stop(reason: str) -> NoReturn:
    print(f"onea: {sentence(reason)}", file=sys.stderr)
    sys.exit(2)
