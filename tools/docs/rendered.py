# SPDX-License-Identifier: Apache-2.0
"""Pages and figures of the committed records, which the site shows and the repository does not keep.

results/README.md has the commands; they run on a copy of the records, which takes half a minute. What they made is
used again until a record, a command or the program changes. ``make docs RESULTS="table3 methods"`` renders only some,
``RESULTS=none`` nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
RESULTS = Path("docs/results")
CACHE = ROOT / "build" / "results"
KEPT = (".csv", ".gz", ".md")  # what the repository holds


def commands(only: str = "") -> list[list[str]]:
    """The commands of results/README.md, in words, their variables filled in; ``only`` names some of the folders."""
    text = (ROOT / RESULTS / "README.md").read_text("utf-8")
    for name, value in re.findall(r'^([A-Z]+)="(.*)"$', text, re.M):
        text = text.replace(f"${name}", value)
    found = [line for line in text.splitlines() if line.startswith("onea ")]
    return [shlex.split(line) for line in found if not only or {*only.split()} & {*re.split(r"[ /]", line)}]


def render(folder: Path, chosen: Sequence[Sequence[str]]) -> Path:
    """Run commands in an empty folder with a copy of the records; returns where the results are."""
    for record in (ROOT / RESULTS).rglob("record.json.gz"):
        copy = folder / record.relative_to(ROOT)
        copy.parent.mkdir(parents=True)
        shutil.copy(record, copy)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

    def run(words: Sequence[str]) -> None:
        assert words[0] == "onea", words
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(words)} failed.\n{done.stdout}{done.stderr}")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, chosen))
    return folder / RESULTS


def rendered(cache: Path = CACHE) -> list[Path]:
    """What the commands make and the repository does not hold."""
    return sorted(path for path in made(cache).rglob("*.*") if path.suffix not in KEPT)


def made(cache: Path = CACHE) -> Path:
    """A folder like docs/results with all that the commands make, from ``cache`` if nothing has changed since."""
    chosen = commands(os.environ.get("RESULTS", ""))
    folder = cache / _digest(chosen)
    if chosen and not folder.exists():
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(parents=True)
        with TemporaryDirectory(dir=cache) as fresh:
            render(Path(fresh) / "whole", chosen)
            (Path(fresh) / "whole").rename(folder)
    return folder / RESULTS


def _digest(chosen: Sequence[Sequence[str]]) -> str:
    """Of the commands, the records, the program and what it is run by."""
    from importlib.metadata import version

    digest = hashlib.sha256(f"{sys.version} {version('matplotlib')} {version('numpy')} {chosen}".encode())
    for top, kind in ((RESULTS, "record.json.gz"), (Path("src/onea"), "*.py"), (Path("src/onea"), "*.yaml")):
        for path in sorted((ROOT / top).rglob(kind)):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
