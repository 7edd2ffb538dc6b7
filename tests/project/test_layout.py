# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING.md and the list of benchmarks agree with the files."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from support import ROOT

PACKAGE = ROOT / "src/onea"


def changes() -> list[tuple[str, str]]:
    """The changes in the table of CONTRIBUTING.md, each with the text about its files."""
    table = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("| change |")[2].partition("\n\n")[0]
    return re.findall(r"^\| ([^|`]+) \| (.+) \|$", table, re.M)


def test_the_table_of_changes_has_the_usual_ones() -> None:
    assert {"a metric", "a merging operator", "a method", "a dataset", "an endpoint"} <= {
        change for change, _ in changes()
    }


@pytest.mark.parametrize(("change", "files"), changes(), ids=[change for change, _ in changes()])
def test_the_files_and_names_of_a_change_exist(change: str, files: str) -> None:
    places = re.findall(r"`([\w/]+(?:/|\.py))`(?: \(`(\w+)`\))?", files)
    assert places
    for path, name in places:
        assert (PACKAGE / path).exists(), path
        if name:
            module = ".".join(("onea", *Path(path).with_suffix("").parts)).removesuffix(".__init__")
            assert hasattr(importlib.import_module(module), name), f"{path} has no {name}"


def test_the_folders_of_the_table_exist() -> None:
    folders = re.findall(r"^\| `([\w/]+/)` \|", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M)
    assert len(folders) == 6
    assert all((ROOT / folder).is_dir() for folder in folders)


def test_the_index_of_benchmarks_names_every_script_and_every_result() -> None:
    folder = ROOT / "benchmarks"
    sections = re.split(r"^## ", (folder / "README.md").read_text("utf-8"), flags=re.M)
    for script in sorted(folder.glob("*/*.py")):
        (section,) = (text for text in sections if f"`{script.parent.name}/`" in text.splitlines()[0])
        assert f"`{script.name}`" in section, script
    commands = re.findall(r"python (benchmarks/\S+\.py)", "".join(sections))
    assert all((ROOT / command).is_file() for command in commands)
    results = [path for path in folder.glob("*/*") if path.suffix in (".csv", ".json", ".jsonl", ".txt")]
    scripts = {script.stem for script in folder.glob("*/*.py")} | {"bench", "demo", "trials"}
    assert not [path.name for path in results if not path.name.startswith(tuple(scripts))]
