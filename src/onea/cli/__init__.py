"""The command line: thin commands, and one place where a user's mistake becomes one sentence."""

from __future__ import annotations

import os
import sys

from onea.errors import OneaError
from onea.text import printable


def main() -> None:
    """Entry point of ``onea``."""
    from onea.cli.app import app

    # Threads that wait by spinning bring a shared machine to a crawl; must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    try:
        app()
    except OneaError as error:
        print(f"onea: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
