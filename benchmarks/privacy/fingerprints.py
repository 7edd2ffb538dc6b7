# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of photos: how much they reveal, and how many copies and other photos they match.

    python benchmarks/privacy/fingerprints.py --data grocery/train grocery/test cub200/train cub200/test --out FILE.csv

Each folder holds photos at any depth. An attacker has the photos of the first folder and all fingerprints. The attacker
fits decoders to grey images of 32 x 32 pixels. They are evaluated on the photos of the second folder by the mean
correlation of the reconstructed and the true image, with and without the mean image. The settings of each decoder are
the best on these photos, in the attacker's favour. For comparison, the same decoders get the signs of the 128
frequencies. Copies are made of the second folder's photos; pairs are those of all photos of all folders.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from onea.data.decode import fit, read_image
from onea.data.file_checks import map_threaded
from onea.model.learning.fingerprints import compute_fingerprints, match_in_blocks, same_photos
from onea.model.learning.images import find_images

FIELDS = ("what", "photos", "value")
SIDE, SMALL = 128, 32
COPIES = (("JPEG", 40, 0.5), ("JPEG", 80, 0.5), ("JPEG", 60, 1.0), ("JPEG", 80, 2.0), ("WEBP", 70, 0.7))
RIDGES, WIDTHS = (1.0, 10.0, 100.0, 1000.0), (0.2, 0.5, 1.0, 2.0)  # a width in mean squared distances


def pixels(file: Path) -> np.ndarray:
    """A photo as a model loads it."""
    return fit(read_image(file, min_side=SIDE), SIDE, SIDE)


def recoded(form: str, quality: int, scale: float, file: Path) -> np.ndarray:
    """A photo, re-encoded at another size."""
    image, content = read_image(file), BytesIO()
    size = round(image.width * scale), round(image.height * scale)
    image.resize(size, Image.Resampling.LANCZOS).save(content, form, quality=quality)
    return fit(read_image(content.getvalue(), min_side=SIDE), SIDE, SIDE)


def grey(images: np.ndarray) -> Tensor:
    """The images to reconstruct, ``[N, 1024]``."""
    small = F.adaptive_avg_pool2d(torch.from_numpy(images).float(), SMALL)
    return torch.einsum("nchw,c->nhw", small, torch.tensor([0.299, 0.587, 0.114])).flatten(1)


def read(folder: Path) -> tuple[Tensor, Tensor]:
    """The fingerprints and the grey images of all photos of a folder."""
    files, prints, pictures = find_images(folder), [], []
    for start in range(0, len(files), 256):
        images = np.stack(list(map_threaded(pixels, files[start : start + 256])))
        prints.append(compute_fingerprints(images))
        pictures.append(grey(images))
    return torch.cat(prints), torch.cat(pictures)


def inputs(prints: Tensor) -> Tensor:
    """The inputs of a decoder: each bit of a fingerprint, and each byte as a number."""
    read = np.ascontiguousarray(prints.numpy()).view(np.uint8)
    bits = np.unpackbits(read, axis=1) * 2.0 - 1
    return torch.from_numpy(np.concatenate([bits, read.astype(float)], 1)).float()


def signs(pictures: Tensor) -> Tensor:
    """The signs of the lowest frequencies except the mean."""
    step = torch.arange(SMALL, dtype=torch.float64)
    transform = torch.cos(torch.pi * (step + 0.5) * step[:, None] / SMALL)
    lowest = (step + step[:, None]).flatten().argsort(stable=True)[1:129]
    coefficients = transform @ pictures.double().unflatten(1, (SMALL, SMALL)) @ transform.T
    result: Tensor = coefficients.flatten(1)[:, lowest].sign().float()
    return result


def correlation(estimate: Tensor, true: Tensor) -> float:
    """The mean correlation between the pixels of image pairs."""
    estimate, true = (F.normalize(image - image.mean(1, keepdim=True), dim=1) for image in (estimate, true))
    return float((estimate * true).sum(1).mean())


def reconstructions(known: Tensor, target: Tensor, pictures: Tensor) -> dict[str, list[Tensor]]:
    """Reconstructions, minus the mean image, by ridge and kernel regression with all their settings."""
    mean, spread = known.mean(0), known.std(0)
    known, target = ((rows - mean)[:, spread > 0] / spread[spread > 0] for rows in (known, target))
    centred = pictures - pictures.mean(0)
    results: dict[str, list[Tensor]] = {"linear": [], "kernel": []}
    for ridge in RIDGES:
        gram = known.T @ known + ridge * torch.eye(known.shape[1])
        results["linear"].append(target @ torch.linalg.solve(gram, known.T @ centred))
    known_distances, target_distances = torch.cdist(known, known).square(), torch.cdist(target, known).square()
    for width in WIDTHS:
        scale = width * known_distances.mean()
        for ridge in RIDGES:
            kernel = (-known_distances / scale).exp() + ridge / 10 * torch.eye(len(known))
            results["kernel"].append((-target_distances / scale).exp() @ torch.linalg.solve(kernel, centred))
    return results


def decoder_rows(known: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Iterator[tuple[str, int, float]]:
    """The quality of reconstructions from fingerprints and from signs."""
    mean, true = known[1].mean(0), target[1]
    yield "mean picture alone: correlation", len(true), correlation(mean.expand_as(true), true)
    for source, pair in (
        ("fingerprint", (inputs(known[0]), inputs(target[0]))),
        ("128 signs", (signs(known[1]), signs(target[1]))),
    ):
        for decoder, pictures in reconstructions(*pair, known[1]).items():
            without = max(correlation(picture, true - mean) for picture in pictures)
            name = f"{source}, {decoder} decoder: correlation"
            yield name, len(true), max(correlation(picture + mean, true) for picture in pictures)
            yield f"{name} less the mean picture", len(true), without


def copy_rows(folder: Path, prints: Tensor) -> Iterator[tuple[str, int, float]]:
    """The fraction of a folder's photos whose copies match their fingerprint."""
    files = find_images(folder)
    for form, quality, scale in COPIES:
        matches = 0
        for start in range(0, len(files), 256):
            part = files[start : start + 256]
            images = np.stack(list(map_threaded(partial(recoded, form, quality, scale), part)))
            matches += int(same_photos(compute_fingerprints(images), prints[start : start + 256]).diagonal().sum())
        yield f"{form} {quality} at {scale} times the size: share of copies found", len(files), matches / len(files)


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="two folders of photos, or more")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    pairs = [read(folder) for folder in args.data]
    rows = list(decoder_rows(*pairs[:2]))
    for name, count, value in rows:
        print(name, count, round(value, 4), flush=True)
    rows += copy_rows(args.data[1], pairs[1][0])
    prints = torch.cat([part for part, _ in pairs])
    matching = sum(int(same.tril(part.start - 1).sum()) for part, same in match_in_blocks(prints, prints))
    rows.append(("pairs of photos that match", len(prints), float(matching)))
    with args.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        writer.writerows((name, count, round(value, 4)) for name, count, value in rows)


if __name__ == "__main__":
    main()
