# SPDX-License-Identifier: Apache-2.0
"""What a user reads when something is wrong is a whole sentence."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import onea

FILES = sorted(Path(onea.__file__).parent.rglob("*.py"))


def messages(path: Path):
    """The literal first and last words of every error, with their line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "OneaError" and node.args:
            said = node.args[0]
            parts = said.values if isinstance(said, ast.JoinedStr) else [said]
            words = [part.value if isinstance(part, ast.Constant) else "" for part in (parts[0], parts[-1])]
            yield node.lineno, *words


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_error_is_a_sentence(path):
    articles = ("a ", "an ", "the ", "this ", "there ", "no ", "cannot ")
    for line, first, last in messages(path):
        assert not first.startswith(articles), f"{path}:{line} begins without a capital"
        assert last.endswith((".", "?")) or not last or "pip install" in last, f"{path}:{line} has no end"
