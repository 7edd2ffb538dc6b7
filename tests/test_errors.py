# SPDX-License-Identifier: Apache-2.0
"""What a user reads when something is wrong is a whole sentence."""

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


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_installs_an_extra_names_its_packages_and_this_python(extra):
    python, *words = shlex.split(install_command(extra))
    assert (python, words[:3]) == (sys.executable, ["-m", "pip", "install"])
    direct = {package for package in EXTRAS[extra] if not package.startswith("onea[")}
    assert direct <= {*words[3:]}
    assert not [word for word in words if word.startswith("onea")], "no registry has onea"
    if extra == "ray":
        assert {*EXTRAS["serve"]} < {*words}


def test_nothing_tells_people_to_get_onea_from_a_registry():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *FILES]
    wrong = re.compile(r"pip install '?onea")
    assert not [page for page in pages if wrong.search(page.read_text("utf-8"))]


def test_hints_are_sentences():
    assert did_you_mean("zzz", ["gamma", "tasks"]).endswith(".")
    assert did_you_mean("gama", ["gamma", "tasks"]).endswith("?")
    with pytest.raises(OneaError, match=r"^Unknown backbone 'zzz'; choose .* or one of timm's such as .*\.$") as error:
        timm_config("zzz")
    assert len(str(error.value)) < 200
