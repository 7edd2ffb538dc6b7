# SPDX-License-Identifier: Apache-2.0
"""Seconds to teach photos to a new model.

    python benchmarks/speed/teaching.py --data FOLDER [--photos MADE] [--threads 2] [--params '{"preset": "fast"}' ...]

FOLDER holds one folder of photos for each class. From them, 20 classes x 50 JPEGs of 1920 x 1440 are written to MADE
(by default a temporary folder; existing files are used). Of classes with fewer photos, several crops are used.

Prints a line of CSV for each ``--params`` of ``onea.OneA``: seconds to read the photos (decode), to load the network
(start), and of a new model that learns the folder (learn, which includes both), all in one process. With ``--old``, a
checkout of an earlier commit (``mkdir OLD && git archive 1a2ee9f src | tar x -C OLD``), its defaults learn the same
folder, in turn with the current code.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from onea.data.decode import read_image
from onea.model.estimator import OneA
from onea.model.learning.images import find_images, read_labelled

SIZE = (1920, 1440)
CROP_SIDE = 0.9  # relative side length of the crops of a photo
T = TypeVar("T")
TEACH_OLD = """
import json, sys, time
began = time.perf_counter()
from onea import OneA
model = OneA(threads=int(sys.argv[2]))
start = time.perf_counter() - began
model.learn(sys.argv[1])
update = model.history[-1]
print(json.dumps([update["images"], start, update.get("epochs"), update.get("held_out_accuracy")]))
"""
COLUMNS = ("photos", "threads", "decode_s", "start_s", "learn_s", "epochs", "held_out", "params")


def make_photos(source: Path, target: Path, classes: int, per_class: int) -> None:
    """Large JPEGs of the first classes of a folder, the same number of each."""
    folders = sorted(place for place in source.iterdir() if place.is_dir())[:classes]
    if len(folders) < classes:
        raise SystemExit(f"{source} has {len(folders)} folders of photos; give --classes {len(folders)} or fewer.")
    generator = random.Random(0)
    for folder in folders:
        (target / folder.name).mkdir(parents=True, exist_ok=True)
        files = find_images(folder)
        for number in range(per_class):
            photo = read_image(files[number % len(files)])
            if number >= len(files):
                width, height = (CROP_SIDE * side for side in photo.size)
                left, top = generator.uniform(0, photo.width - width), generator.uniform(0, photo.height - height)
                photo = photo.crop((round(left), round(top), round(left + width), round(top + height)))
            large = photo.resize(SIZE, Image.Resampling.BICUBIC)
            large.save(target / folder.name / f"{number:03d}.jpg", quality=90)


def seconds(action: Callable[[], T]) -> tuple[float, T]:
    """Seconds of a call, and its result."""
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


def measure(photos: Path, params: dict[str, Any]) -> dict[str, Any]:
    """A row of the table: the current code with these parameters."""
    model = OneA(**params)
    model._load_engine()  # imports are not part of the measurement
    start, engine = seconds(OneA(**params)._load_engine)
    decode, batch = seconds(lambda: read_labelled(photos, None, engine.side))
    learn, taught = seconds(lambda: OneA(**params).learn(photos))
    update = taught.history[-1]
    times = (f"{value:.2f}" for value in (decode, start, learn))
    values = (len(batch), engine.runtime.threads, *times, update["epochs"], update["held_out_accuracy"])
    return dict(zip(COLUMNS, (*values, json.dumps(params)), strict=True))


def measure_old(old: Path, photos: Path, threads: int) -> dict[str, Any]:
    """A row of the table: the defaults of an earlier commit, measured in a separate process."""
    learn, process = seconds(
        lambda: subprocess.run(
            [sys.executable, "-c", TEACH_OLD, str(photos), str(threads)],
            env=os.environ | {"PYTHONPATH": str(old / "src")}, capture_output=True, text=True, check=True,
        )
    )  # fmt: skip
    count, start, epochs, held_out = json.loads(process.stdout.splitlines()[-1])
    values = (count, threads, "", f"{start:.2f}", f"{learn:.2f}", epochs, held_out, '"the old commit"')
    return dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    """Create the photos and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="one folder of photos for each class")
    parser.add_argument("--photos", type=Path, help="folder of the large photos; existing ones are reused")
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--per-class", type=int, default=50)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--params", type=json.loads, nargs="+", default=[{}], help="of onea.OneA, as JSON")
    parser.add_argument("--old", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--turns", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        photos = arguments.photos or Path(temporary) / "photos"
        if not photos.exists():
            make_photos(arguments.data, photos, arguments.classes, arguments.per_class)
        table = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        table.writeheader()
        for _ in range(arguments.turns):
            if arguments.old:
                table.writerow(measure_old(arguments.old, photos, arguments.threads))
            for params in arguments.params:
                table.writerow(measure(photos, {"threads": arguments.threads} | params))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
