# SPDX-License-Identifier: Apache-2.0
"""The floors of the house, as pyproject.toml names them: who may know whom."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECK = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(sources: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHECK, "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(sources), "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, cwd=sources, env=environment)


@pytest.fixture
def sources(tmp_path) -> Path:
    shutil.copytree(ROOT / "src" / "onea", tmp_path / "onea", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    return tmp_path


def test_every_floor_knows_only_those_below_it(sources):
    done = lint(sources)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("low", "line"),
    [
        ("merging/operator.py", "from onea.methods.contract import Method"),
        ("data/dataset.py", "from onea.vit.frozen import FrozenViT"),
        ("runs/grid.py", "import onea.report.page"),
    ],
)
def test_a_step_upwards_or_sideways_is_noticed(sources, low, line):
    file = sources / "onea" / low
    file.write_text(file.read_text("utf-8") + f"\n\ndef later():\n    {line}\n", "utf-8")
    done = lint(sources)
    assert done.returncode == 1
    assert "onea." + low.removesuffix(".py").replace("/", ".") in done.stdout
