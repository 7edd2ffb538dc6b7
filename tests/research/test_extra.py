# SPDX-License-Identifier: Apache-2.0
"""Commands of research are there without the extra, and name what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("yaml", ["run", "one-a", "--config", "run.yaml"]),
        ("accelerate", ["run", "one-a", "--track", "tensorboard"]),
    ],
)
def test_missing_library_error_names_the_extra(missing, words, tmp_path):
    (tmp_path / "run.yaml").write_text("tasks: 2\n")
    code = f"import sys; sys.modules['{missing}'] = None; from onea.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"This needs {missing}, which is not installed" in done.stderr
    assert "accelerate" in done.stderr.partition("pip install")[2]
    assert len(done.stderr.strip().splitlines()) == 1
