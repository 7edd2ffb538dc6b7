# SPDX-License-Identifier: Apache-2.0
"""Every error message is a complete sentence."""

from __future__ import annotations

import ast
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from support import ROOT

import onea
from onea.errors import OneaError, did_you_mean, install_command
from onea.vit.weight_files import timm_config

FILES = sorted(Path(onea.__file__).parent.rglob("*.py"))


def messages(path: Path):
    """The line number, and the first and last literal part, of every error message."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "OneaError" and node.args:
            message = node.args[0]
            parts = message.values if isinstance(message, ast.JoinedStr) else [message]
            words = [part.value if isinstance(part, ast.Constant) else "" for part in (parts[0], parts[-1])]
            yield node.lineno, *words


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_error_message_is_a_sentence(path):
    articles = ("a ", "an ", "the ", "this ", "there ", "no ", "cannot ")
    for line, first, last in messages(path):
        assert not first.startswith(articles), f"{path}:{line} does not start with a capital letter"
        assert last.endswith((".", "?")) or not last or "pip install" in last, (
            f"{path}:{line} does not end with a full stop or question mark"
        )


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_install_command_lists_the_packages_for_this_python(extra):
    python, *words = shlex.split(install_command(extra))
    assert (python, words[:3]) == (sys.executable, ["-m", "pip", "install"])
    direct = {package for package in EXTRAS[extra] if not package.startswith("onea[")}
    assert direct <= {*words[3:]}
    assert not [word for word in words if word.startswith("onea")], "onea is not on PyPI"
    if extra == "ray":
        assert {*EXTRAS["serve"]} < {*words}


def test_no_page_or_message_installs_onea_from_pypi():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *FILES]
    wrong = re.compile(r"pip install '?onea")
    assert not [page for page in pages if wrong.search(page.read_text("utf-8"))]


def test_hints_are_sentences():
    assert did_you_mean("zzz", ["gamma", "tasks"]).endswith(".")
    assert did_you_mean("gama", ["gamma", "tasks"]).endswith("?")
    with pytest.raises(OneaError, match=r"^Unknown backbone 'zzz'; choose .* or one of timm's such as .*\.$") as error:
        timm_config("zzz")
    assert len(str(error.value)) < 200
