# SPDX-License-Identifier: Apache-2.0
"""The commands of README and quick start, run in order in an empty folder with the package installed from a wheel."""

from __future__ import annotations

import os
import re
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from PIL import Image
from support import ROOT
from support.commands import in_one_process
from support.pages import Block, blocks
from support.tiny import write_tiny_images

HERE = Path(sysconfig.get_paths()["purelib"])
NOT_FOLLOWED = ("pip", "make", ".")  # of the checkout: the fixture below stands for them


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source, built from a copy of it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "-w", "dist", "."], cwd=source, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"no wheel can be built here, which needs pip and a registry: {done.stderr[-200:]}")
    (made,) = (source / "dist").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with the wheel, which also has the packages of this environment."""
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    paths = sysconfig.get_paths(vars={"base": str(place), "platbase": str(place)})
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (Path(paths["purelib"]) / "others.pth").write_text("\n".join([str(HERE), *others, *site.getsitepackages()]))
    python = Path(paths["scripts"]) / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*install, "--ignore-installed", str(wheel)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install into another environment here: {done.stderr[-200:]}")
    where = subprocess.run(
        [python, "-c", "import onea; print(onea.__file__)"], capture_output=True, text=True, cwd=place
    )
    assert str(place) in where.stdout, "the checkout would be tested"
    return python.parent


def test_the_wheel_contains_every_file_of_the_package(wheel):
    package = ROOT / "src/onea"
    ours = {
        str(file.relative_to(package.parent))
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith(".")
    }
    assert len(ours) > 200
    assert ours <= {*zipfile.ZipFile(wheel).namelist()}


def test_the_installed_command_prints_its_help(programs, tmp_path):
    done = subprocess.run([programs / "onea", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "Models" in done.stdout


# word by word


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with nothing but the photos that the pages mention."""
    write_tiny_images(tmp_path / "images", classes=5, train=6, test=3)
    for old, new in zip(range(5), ("Banana", "Kiwi", "Lemon", "Mango", "Papaya"), strict=True):
        day = "tuesday" if new == "Papaya" else "monday"
        shutil.move(tmp_path / f"images/train/class{old:02d}", tmp_path / "photos" / day / new)
        shutil.move(tmp_path / f"images/test/class{old:02d}", tmp_path / "photos/test" / new)
    shutil.rmtree(tmp_path / "images")
    (tmp_path / "new").mkdir()
    some = Image.open(tmp_path / "photos/test/Papaya/0.png")
    for name in ("photo.webp", "other.webp", "photo.jpg", "new/1.jpg"):
        some.save(tmp_path / name)
    return tmp_path


def followed(page: str) -> list[Block]:
    """The blocks for a reader with photos: those of README before research, and all of the quick start."""
    found = blocks(ROOT / page)
    text = (ROOT / page).read_text("utf-8")
    end = text[: text.index("\n## Research")].count("\n") if "\n## Research" in text else len(text)
    return [block for block in found if block.line <= end and (block.language == "sh" or block.how == "run")]


def served(words: list[str], place: Path, environment: dict[str, str]) -> None:
    """Check that the service starts, prints its address, and stops on request."""
    found = shutil.which(words[0], path=environment["PATH"])
    assert found
    with subprocess.Popen(
        [found, *words[1:]], cwd=place, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert re.search(r" at http://127\.0\.0\.1:\d+", process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode in (0, -signal.SIGTERM)


@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/index.md", marks=pytest.mark.slow)])
def test_every_command_of_a_page_succeeds_in_order(page: str, programs: Path, place: Path) -> None:
    for name in ("fastapi", "onnxruntime"):
        pytest.importorskip(name)
    unset = {"PYTHONPATH", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    ran = []
    waiting: list[list[str]] = []  # commands, which run in one process: each takes seconds to start

    def catch_up() -> None:
        done = in_one_process(waiting, python=programs / "python", cwd=place, env=environment) if waiting else []
        for words, (code, out, err) in zip(waiting, done, strict=True):
            assert code == 0, f"{page}: onea {' '.join(words)}\n{out}\n{err}"
        waiting.clear()

    for block in followed(page):
        if block.language == "python":
            catch_up()
            subprocess.run([programs / "python", "-c", block.text], cwd=place, env=environment, check=True)
            ran.append("python")
            continue
        for program, *words in block.commands():
            if program in NOT_FOLLOWED or words[:1] == ["demo"]:  # which has tests of its own
                continue
            if words[:1] == ["serve"]:
                catch_up()
                served([program, "serve", "--port", "0", *words[1:]], place, environment)
            else:
                assert program == "onea", f"{block.where}: {program}"
                photos = ([str(file.relative_to(place)) for file in place.glob(word)] or [word] for word in words)
                waiting.append([*chain.from_iterable(photos)])
            ran.append(words[0])
    catch_up()
    told = {
        "README.md": {"teach", "export", "serve", "--help"},
        "docs/index.md": {"tour", "evaluate", "python"},
    }
    assert told[page] <= {*ran}
