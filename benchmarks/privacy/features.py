# SPDX-License-Identifier: Apache-2.0
"""Reconstruction of photos from their features, some of which a model stores.

    python benchmarks/privacy/features.py --data grocery/train grocery/test --out FILE.csv

As in ``fingerprints.py``, an attacker has the photos of the first folder with their features. The attacker fits
decoders to grey images of 32 x 32 pixels, which are evaluated on photos of the second folder. Copies of photos (JPEG,
half the size) are searched among the features of all photos of the second folder.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from fingerprints import FIELDS, correlation, grey, pixels, recoded, reconstructions
from torch import Tensor
from torch.nn import functional as F

from onea.data.file_checks import map_threaded
from onea.model.engine import Engine
from onea.model.learning.images import find_images
from onea.vit.hooks import NO_HOOKS
from onea.vit.network_config import BUNDLED


def sample(folder: Path, count: int) -> list[Path]:
    """At most this many photos of a folder, at even intervals."""
    files = find_images(folder)
    return files[:: max(1, len(files) // count)][:count]


def read(files: list[Path], engine: Engine, load: Callable[[Path], np.ndarray]) -> tuple[Tensor, Tensor]:
    """The features of photos as models store them, and the grey images."""
    features, pictures = [], []
    for start in range(0, len(files), 64):
        images = np.stack(list(map_threaded(load, files[start : start + 64])))
        features.append(engine.features(images, NO_HOOKS).bfloat16().float())
        pictures.append(grey(images))
        print(f"{start + len(images)} of {len(files)}", flush=True)
    return torch.cat(features), torch.cat(pictures)


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs=2, required=True, help="two folders of photos")
    parser.add_argument("--photos", type=int, nargs=2, default=(1500, 500), help="of each folder, at most")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    engine = Engine(BUNDLED, "auto", "fp32", 0, True)
    files = [sample(folder, count) for folder, count in zip(args.data, args.photos, strict=True)]
    known, target = (read(part, engine, pixels) for part in files)
    mean, true, count = known[1].mean(0), target[1], len(target[1])
    rows = [("mean picture alone: correlation", count, correlation(mean.expand_as(true), true))]
    for decoder, pictures in reconstructions(known[0], target[0], known[1]).items():
        name = f"features, {decoder} decoder: correlation"
        rows.append((name, count, max(correlation(picture + mean, true) for picture in pictures)))
        rows.append(
            (f"{name} less the mean picture", count, max(correlation(picture, true - mean) for picture in pictures))
        )
    copies, _ = read(files[1], engine, partial(recoded, "JPEG", 60, 0.5))
    nearest = (F.normalize(copies, dim=1) @ F.normalize(target[0], dim=1).T).argmax(1)
    matched = float((nearest == torch.arange(count)).float().mean())
    rows.append(("features: share of photos found by a copy", count, matched))
    with args.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        writer.writerows((name, photos, round(value, 4)) for name, photos, value in rows)


if __name__ == "__main__":
    main()
