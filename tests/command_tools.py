# SPDX-License-Identifier: Apache-2.0
"""Every command by its name, and several commands in one new process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from onea.cli.app import app

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]

_LONGEST = 240  # seconds that a command may take, its share of the start included
_ONE_BY_ONE = """
import contextlib, io, json, sys
sys.path[:0] = sys.argv[2:]
from onea.cli import main
said = []
for words in json.loads(sys.argv[1]):
    print("$ onea", *words, file=sys.stderr, flush=True)  # the last one, if the process is killed
    sys.argv, out, err = ["onea", *words], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main() or 0
        except SystemExit as stop:
            code = stop.code or 0
    said.append((code, out.getvalue(), err.getvalue()))
print()  # whatever a command has left on the last line
print(json.dumps(said))
"""


def in_one_process(
    commands: Sequence[Sequence[str]],
    *packages: Path,
    python: Path | str = sys.executable,
    before: Sequence[str | Path] = (),
    **how: Any,
) -> list[tuple[int, str, str]]:
    """Exit code, standard output and error of each command; a process of its own takes seconds to start.

    Args:
        commands: the words after ``onea``.
        packages: folders in which the process finds more packages.
        python: the interpreter.
        before: a script that runs ``-c CODE`` in its own way, with its arguments.
        how: for ``subprocess.run``.
    """
    words = [python, *before, "-c", _ONE_BY_ONE, json.dumps(commands), *packages]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=_LONGEST * len(commands), **how)
    assert done.returncode == 0, done.stderr
    return [tuple(said) for said in json.loads(done.stdout.splitlines()[-1])]  # others may have printed before
