# SPDX-License-Identifier: Apache-2.0
"""Run the commands of a page on the Grocery photos, and update the outputs below them.

The data of the figures of grocery.md are written to benchmarks/models/grocery-example.json, which pictures.py reads.

    python tools/docs/outputs.py FOLDER docs/index.md docs/grocery.md

FOLDER holds ``train/CLASS/*`` and ``test/CLASS/*`` of the Grocery Store Dataset's 81 fine classes. Shell and Python
blocks after ``<!-- test: run -->`` are run in order in a temporary folder, and the text block after each is replaced by
its output. Long tables are shortened in the middle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"<!-- test: run -->\n```(sh|python)\n(.*?)```\n(\n```text\n(.*?)```\n)?", re.DOTALL)
_HEAD, _TAIL, _MAX_LINES = 7, 3, 20  # first and last lines of a shortened table; the length above which it is shortened
_UPDATE_FIELDS = (
    "version",
    "name",
    "new_classes",
    "known",
    "held_out",
    "held_out_accuracy",
    "overall_images",
    "overall_accuracy",
)
_EXAMPLE = Path(__file__).parents[2] / "benchmarks/models/grocery-example.json"
_MONDAY = ("Banana", "Kiwi", "Lemon", "Mango")
_NEW = ("Banana", "Floury-Potato", "Leek", "Oatly-Oat-Milk", "Papaya", "Vine-Tomato")


def first(folder: Path) -> Path:
    """The first photo of a class."""
    return min(folder.iterdir())


def prepare(photos: Path, folder: Path) -> None:
    """Copy the photos to the paths in the commands of the pages."""
    (folder / "grocery").symlink_to(photos.resolve())
    (folder / "benchmarks").symlink_to(Path(__file__).parents[2].resolve() / "benchmarks")
    for name in (*_MONDAY, "Papaya"):
        day = "tuesday" if name == "Papaya" else "monday"
        shutil.copytree(photos / "train" / name, folder / "photos" / day / name)
        shutil.copytree(photos / "test" / name, folder / "photos/test" / name)
    (folder / "new").mkdir()
    for name in _NEW:
        shutil.copy(first(photos / "test" / name), folder / "new" / f"{name.removeprefix('Oatly-').lower()}.webp")
    shutil.copy(folder / "new/papaya.webp", folder / "photo.webp")
    shutil.copy(folder / "new/oat-milk.webp", folder / "other.webp")


def run_block(language: str, code: str, folder: Path) -> str:
    """The output of a block, without JSON."""
    environment = os.environ | {"COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
    if language == "python":
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout
    outputs = []
    for line in code.splitlines():
        words = line.replace("onea ", f"{sys.executable} -m onea ", 1)
        process = subprocess.run(words, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
        if process.returncode:
            raise SystemExit(f"{line}: {process.stderr}")
        print(f"$ {line}\n{process.stdout}", flush=True)
        if "--json" not in line:
            outputs.append(process.stdout)
    return "".join(outputs)


def shorten(text: str) -> str:
    """The text with long tables shortened in the middle."""
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    rules = [number for number, line in enumerate(lines) if line.startswith("──")]
    if rules:
        start, end = rules[0], rules[1] - 2 if rules[1:] else len(lines)  # a title and a heading precede a rule
        if end - start > _MAX_LINES:
            lines = [*lines[: start + _HEAD], "...", *lines[end - _TAIL :]]
    return "\n".join(lines) + "\n"


def write_example(folder: Path) -> None:
    """Write the data of the figures: the history of the model, and its accuracy on each class."""

    def as_json(*words: str) -> Any:
        command = [sys.executable, "-m", "onea", *words, "--json"]
        return json.loads(subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout)

    evaluation = as_json("evaluate", "shop.onea", "asked")
    updates = as_json("history", "shop.onea")["updates"]
    example = {
        "updates": [{name: update[name] for name in _UPDATE_FIELDS} for update in updates],
        "classes": evaluation["classes"],
        "confusions": evaluation["confusions"],
    }
    _EXAMPLE.write_text(json.dumps(example, indent=1, ensure_ascii=False) + "\n", "utf-8")


def updated(page: str, folder: Path, example: bool) -> str:
    """The page with current outputs; with ``example``, write the data of its figures after ``onea evaluate``."""

    def run(match: re.Match[str]) -> str:
        language, code, block, old = match.groups()
        output = run_block(language, code, folder)
        if example and "onea evaluate" in code:
            write_example(folder)
        return match[0] if block is None else match[0].replace(f"```text\n{old}```", f"```text\n{shorten(output)}```")

    return _BLOCK.sub(run, page)


def main() -> None:
    """Update the given pages, and the data of their figures."""
    photos, *pages = map(Path, sys.argv[1:])
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            prepare(photos, Path(folder))
            outputs = updated(page.read_text("utf-8"), Path(folder), example=page.stem == "grocery")
            page.write_text(outputs, "utf-8")


if __name__ == "__main__":
    main()
