# SPDX-License-Identifier: Apache-2.0
"""Time of one answer by ``predict`` and by the int8 export, by image size: an old commit and current code in turn.

    mkdir OLD && git archive 1f28aef src | tar x -C OLD
    python benchmarks/speed/one_photo.py --data FOLDER --old OLD --sizes 112 168 224 [--turns 5] > one-photo.csv

FOLDER holds one folder of photos for each class. Each model is taught 20 photos of 10 of its classes. Each measurement
is the median of 40 answers of a new process, on all cores, to a photo of 1920 x 1440 (``predict``) or to a square image
(``int8``, ONNX Runtime). The old commit has one size, its default.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from teaching import make_photos

ROOT = Path(__file__).resolve().parents[2]
TEACH = """
import json, sys
from pathlib import Path
from onea import OneA
from onea.model.export import export
model, photos = OneA(**json.loads(sys.argv[3])), Path(sys.argv[1])
model.learn(photos).save(sys.argv[2] + ".onea")
export(model.snapshot(), "onnx", Path(sys.argv[2] + ".onnx"), preprocess=False, precision="int8", check=photos)
"""
TIMING = """
import json, statistics, sys, time
def milliseconds(action):
    times = []
    for _ in range(50):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times[10:])
"""
PREDICT = (
    TIMING
    + """
import onea
model = onea.load(sys.argv[1] + ".onea")
print(milliseconds(lambda: model.predict([sys.argv[2]])))
"""
)
INT8 = (
    TIMING
    + """
import numpy as np
from onea.vit.onnx import onnx_runtime
session = onnx_runtime().InferenceSession(sys.argv[1] + ".onnx")
image = session.get_inputs()[0]
square = np.zeros([1, *image.shape[1:]], np.float32)
print(milliseconds(lambda: session.run(None, {image.name: square})))
"""
)


def python(root: Path, program: str, *arguments: object) -> str:
    """The last line that a program prints with the code in a folder."""
    words = [sys.executable, "-c", program, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    printed = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    return printed.strip().rpartition("\n")[2]


def main() -> None:
    """Teach a model per size, then measure them in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--old", type=Path, required=True, help="checkout of an earlier commit")
    parser.add_argument("--sizes", type=int, nargs="+", default=[112, 168, 224])
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        make_photos(arguments.data, place / "photos", classes=10, per_class=20)
        photo = next((place / "photos").glob("*/*"))
        sides: list[tuple[str, Path, dict[str, Any]]] = [("old", arguments.old, {})]
        sides += [(str(size), ROOT, {"image_size": size, "preset": "fast"}) for size in arguments.sizes]
        for name, root, params in sides:
            python(root, TEACH, place / "photos", place / name, json.dumps(params))
        rows: dict[str, list[list[float]]] = {name: [] for name, _, _ in sides}
        for _ in range(arguments.turns):
            for name, root, _ in sides:
                printed = python(root, PREDICT, place / name, photo), python(ROOT, INT8, place / name)
                rows[name].append([float(milliseconds) for milliseconds in printed])
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(("side", "turn", "predict_ms", "int8_ms"))
    for name, turns in rows.items():
        for number, (predict, int8) in enumerate(turns, 1):
            table.writerow((name, number, f"{predict:.2f}", f"{int8:.2f}"))
        table.writerow((name, "median", *(f"{statistics.median(column):.2f}" for column in zip(*turns, strict=True))))


if __name__ == "__main__":
    main()
