# SPDX-License-Identifier: Apache-2.0
"""All commands by name, the validation of command lines, and the execution of several commands in one process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from onea.cli.app import app
from support import ROOT

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]

NOT_OURS = ("curl", "docker", "export", "git", "tensorboard", "cd")
_TIMEOUT = 240  # seconds per command, including the start of the process
_ONE_BY_ONE = """
import contextlib, io, json, sys
sys.path[:0] = sys.argv[2:]
from onea.cli import main
results = []
for words in json.loads(sys.argv[1]):
    print("$ onea", *words, file=sys.stderr, flush=True)  # the last one, if the process is killed
    sys.argv, out, err = ["onea", *words], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main() or 0
        except SystemExit as stop:
            code = stop.code or 0
    results.append((code, out.getvalue(), err.getvalue()))
print()  # ends a line that a command has left open
print(json.dumps(results))
"""


def in_one_process(
    commands: Sequence[Sequence[str]],
    *packages: Path,
    python: Path | str = sys.executable,
    before: Sequence[str | Path] = (),
    **options: Any,
) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each command; a process for each would take seconds to start.

    Args:
        commands: the words after ``onea``.
        packages: folders with further packages for the process.
        python: the interpreter.
        before: a wrapper script with its arguments, which runs ``-c CODE``.
        options: for ``subprocess.run``.
    """
    words = [python, *before, "-c", _ONE_BY_ONE, json.dumps(commands), *packages]
    process = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=_TIMEOUT * len(commands), **options)
    assert process.returncode == 0, process.stderr
    return [tuple(result) for result in json.loads(process.stdout.splitlines()[-1])]  # libraries may print before


def check_onea(words: list[str]) -> None:
    """Parse a command like the command line and look up every name in it; raises an error if it is invalid."""
    from onea.cli.app import app

    group: Any = typer.main.get_command(app)
    name, *arguments = words
    if name.startswith("-"):
        return
    assert name in group.commands, f"there is no command '{name}'"
    context = group.commands[name].make_context(name, arguments)
    given = context.params
    if name == "run":
        from onea.options import parse_arguments
        from onea.research.data.sources import DATASETS
        from onea.research.runs.config import RunConfig, make_config

        fields = {key: value for key, value in given.items() if key in RunConfig.__dataclass_fields__}
        if str(fields.get("stream")).endswith(".json"):  # a file that an earlier command writes
            del fields["stream"]
        config = make_config(fields | parse_arguments(context.args))
        assert config.data.partition(":")[0] in DATASETS.names
    elif name == "merge":
        from onea.merging import make_operator
        from onea.options import parse_arguments

        loose = [*given["inputs"], *context.args]
        cut = next((index for index, word in enumerate(loose) if word.startswith("--")), len(loose))
        make_operator(given["operator"], **parse_arguments(loose[cut:]))
    elif name == "teach":
        assert (given["folder"] is None) != (given["background"] is None), "teach takes one folder"
    elif name == "methods" and given["name"] and not given["backbones"]:
        from onea.research.methods import method_class

        method_class(given["name"])
    elif name == "paper" and given["name"]:
        from onea.research.paper.experiments import find_experiment

        find_experiment(given["name"])


def check_command(words: list[str]) -> None:
    """Check a command of the pages: ours, make, python and pip completely, others by name only."""
    match words:
        case ["onea", *rest] | ["accelerate", "launch", "-m", "onea", *rest] | ["torchrun", "-m", "onea", *rest]:
            check_onea(rest)
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), re.M), f"make has no '{target}'"
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), f"there is no {script}"
        case ["pip", "install", package]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
            wanted = re.fullmatch(r"\.\[(\w+)\]", package)  # of a checkout: no registry has onea
            assert package == "." or (wanted and wanted[1] in extras), f"pip cannot install {package}"
        case [".", ".venv/bin/activate"]:
            assert re.search(r"^BIN := \.venv/bin$", (ROOT / "Makefile").read_text("utf-8"), re.M)
        case [program, *_]:
            assert program in NOT_OURS, f"unknown program '{program}'"
