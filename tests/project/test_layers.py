# SPDX-License-Identifier: Apache-2.0
"""The layers of the package in pyproject.toml: which package may import which."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path
from xml.etree import ElementTree

import grimp
import pytest
from support import ROOT

CHECK = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(sources: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHECK, "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(sources), "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, cwd=sources, env=environment)


@pytest.fixture
def sources(tmp_path) -> Path:
    shutil.copytree(ROOT / "src" / "onea", tmp_path / "onea", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    return tmp_path


def test_every_layer_imports_only_those_below_it(sources):
    done = lint(sources)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("low", "line"),
    [
        ("merging/operator.py", "from onea.research.methods.contract import Method"),
        ("data/dataset.py", "from onea.vit.frozen import FrozenViT"),
        ("research/runs/grid.py", "import onea.research.report.html"),
        ("model/state.py", "from onea.research.record import Record"),
        ("cli/model.py", "import onea.research.cli.run"),
    ],
)
def test_an_import_from_above_or_beside_is_detected(sources, low, line):
    file = sources / "onea" / low
    file.write_text(file.read_text("utf-8") + f"\n\ndef later():\n    {line}\n", "utf-8")
    done = lint(sources)
    assert done.returncode == 1
    assert "onea." + low.removesuffix(".py").replace("/", ".") in done.stdout


# the architecture page


def layers(index: int = 0) -> list[set[str]]:
    """The layers of the whole package (0) or of research (1)."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"][index]
    return [{name.removeprefix("onea.") for name in layer.split(" | ")} for layer in contract["layers"]]


def test_the_architecture_page_lists_the_layers_in_order():
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page.partition("## The layers")[2], re.M)
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == layers() + layers(1)


def drawing(name: str) -> ElementTree.Element:
    return ElementTree.parse(ROOT / "docs/pictures" / name).getroot()


def test_the_drawing_has_every_package_in_its_layer():
    """From top to bottom in the order of the contract; packages of one layer at the same height."""
    groups = {group.get("data-package"): group for group in drawing("architecture-calls.svg").iter()}
    boxes = {name: group[0] for name, group in groups.items() if name}
    packages = {path.parent.name for path in (ROOT / "src/onea").glob("*/__init__.py")}
    assert packages <= set(boxes)
    height = {name: float(box.get("y", "")) for name, box in boxes.items()}
    drawn = [{name for name in height if height[name] == y} for y in sorted(set(height.values()))]
    assert drawn == [layer & set(boxes) for layer in layers() if layer & set(boxes)]


def test_every_arrow_of_the_drawing_is_an_import():
    graph = grimp.build_graph("onea", exclude_type_checking_imports=True, cache_dir=None)
    for module in graph.find_children("onea"):
        if graph.find_children(module):
            graph.squash_module(module)
    arrows = [(arrow.get("data-from"), arrow.get("data-to")) for arrow in drawing("architecture-calls.svg").iter()]
    arrows = [arrow for arrow in arrows if any(arrow)]
    assert len(arrows) > 9
    for caller, called in arrows:
        assert graph.direct_import_exists(importer=f"onea.{caller}", imported=f"onea.{called}"), (caller, called)


def test_no_modules_import_each_other():
    """Neither directly nor indirectly, including imports in functions."""
    graph = grimp.build_graph("onea", exclude_type_checking_imports=True, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imported).prepare()
    assert len(imported) > 100
