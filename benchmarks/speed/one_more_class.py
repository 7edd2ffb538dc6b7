# SPDX-License-Identifier: Apache-2.0
"""Time of one more class and of the first answer of ``onea predict``: an old commit and current code in turn.

    mkdir OLD && git archive 1a2ee9f src | tar x -C OLD
    python benchmarks/speed/one_more_class.py --data FOLDER --old OLD [--turns 5] [--out one-more-class.csv]

FOLDER holds one folder of photos for each class. Each side teaches 20 of its classes to a model with default options.
Then, in turn, a process loads the model (``start``), learns one more class of 20 photos and saves it (``learn``), and
``onea predict`` classifies one photo, timed from start to end of its process. All photos are JPEGs of 1920 x 1440.
Times are wall-clock seconds; ``cpu_s`` are seconds of the processor, which do not depend on other programs.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from teaching import make_photos

ROOT = Path(__file__).resolve().parents[2]
CLASSES, PHOTOS = 20, 20
TEACH = "import sys; from onea import OneA; OneA().learn(sys.argv[1]).save(sys.argv[2])"
MORE = """
import json, sys, time
began = time.perf_counter()
import onea
model = onea.load(sys.argv[1])
ready, used = time.perf_counter(), time.process_time()
model.learn(sys.argv[2])
model.save(sys.argv[1])
print(json.dumps([ready - began, time.perf_counter() - ready, time.process_time() - used]))
"""
COLUMNS = ("side", "turn", "start_s", "learn_s", "learn_cpu_s", "predict_s", "predict_cpu_s")


def python(root: Path, *arguments: object) -> str:
    """The output of a program that uses the code in a folder."""
    words = [sys.executable, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise each process would compile the libraries again
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout


def turn(root: Path, taught: Path, model: Path, more: Path, photo: Path) -> list[float]:
    """Teach one more class to a copy of a model, and predict once."""
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(taught, model)
    start, learn, learn_cpu = json.loads(python(root, "-c", MORE, model, more).splitlines()[-1])
    cpu_before, started = _children_cpu_seconds(), time.perf_counter()
    python(root, "-m", "onea", "predict", model, photo)
    return [start, learn, learn_cpu, time.perf_counter() - started, _children_cpu_seconds() - cpu_before]


def _children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Create photos and models, measure the sides in turn, and write a line for each turn, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="one folder of photos for each class")
    parser.add_argument("--old", type=Path, required=True, help="checkout of an earlier commit")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("one-more-class.csv"))
    arguments = parser.parse_args()
    sides = {"old": arguments.old.resolve(), "new": ROOT}
    with tempfile.TemporaryDirectory() as temporary, arguments.out.open("w", newline="") as file:
        folder, table = Path(temporary), csv.writer(file, lineterminator="\n")
        make_photos(arguments.data, folder / "photos", CLASSES + 1, PHOTOS)
        last = max((folder / "photos").iterdir())
        (folder / "more").mkdir()
        more = last.rename(folder / "more" / last.name).parent
        photo = next((folder / "photos").rglob("*.jpg"))
        for name, root in sides.items():
            python(root, "-c", TEACH, folder / "photos", folder / name)
        table.writerow(COLUMNS)
        times: dict[str, list[list[float]]] = {name: [] for name in sides}

        def write(*cells: Any) -> None:
            table.writerow([f"{cell:.2f}" if isinstance(cell, float) else cell for cell in cells])
            file.flush()
            print(*cells, flush=True)

        for number in range(1, arguments.turns + 1):
            for name, root in sides.items():
                times[name].append(turn(root, folder / name, folder / "model", more, photo))
                write(name, number, *times[name][-1])
        for name, lines in times.items():
            write(name, "median", *(statistics.median(column) for column in zip(*lines, strict=True)))


if __name__ == "__main__":
    main()
