# SPDX-License-Identifier: Apache-2.0
"""Without the extra ``research``, its commands exist and their errors name the command to install it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("yaml", ["run", "one-a", "--config", "run.yaml"]),
        ("accelerate", ["run", "one-a", "--track", "tensorboard"]),
    ],
)
def test_missing_library_error_names_the_extra(missing, arguments, tmp_path):
    (tmp_path / "run.yaml").write_text("tasks: 2\n")
    code = f"import sys; sys.modules['{missing}'] = None; from onea.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert f"This needs {missing}, which is not installed" in result.stderr
    assert "accelerate" in result.stderr.partition("pip install")[2]
    assert len(result.stderr.strip().splitlines()) == 1
