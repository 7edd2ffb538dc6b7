# SPDX-License-Identifier: Apache-2.0
"""Accuracy of the bundled network in eight bits beside that of its float weights, nothing trained.

    python benchmarks/models/eight_bits.py --data FOLDER --weights FLOAT.safetensors --out eight-bits.csv

FOLDER holds ``train/CLASS/*`` and ``test/CLASS/*``; FLOAT holds the weights before quantisation, under timm's names.
Both networks compute the features of the same photos. The classifiers are those of SimpleCIL (``ncm``) and One-A+
(``rgda``). ``moved`` is the mean relative distance of the features of a test photo, in percent. Each run appends its
lines to ``--out``.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from grocery import labelled, photos
from torch import Tensor

from onea.classifiers import make_classifier
from onea.model.engine import Engine
from onea.model.learning.images import read_labelled
from onea.vit.hooks import NO_HOOKS
from onea.vit.network_config import BUNDLED

READOUTS = ("ncm", "rgda")
COLUMNS = ("data", "image_size", "train_photos", "test_photos", "readout", "float", "eight_bits", "moved")


def evaluate(readout: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> float:
    """Accuracy in percent of a classifier that is fitted to the first features and labels, on the second."""
    classifier = make_classifier(readout)
    scorer = classifier.fit(classifier.statistics(train[0].shape[1]).add(*train))
    return 100 * float((scorer(test[0]).argmax(1) == test[1]).double().mean())


def main() -> None:
    """Measure both networks and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--weights", required=True, type=Path)
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--per-class", type=int, help="at most this many photos of each class in each part")
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    networks = [
        Engine(name, "auto", "fp32", 0, mirror=True, image_size=arguments.image_size)
        for name in (f"{BUNDLED}:{arguments.weights}", BUNDLED)
    ]
    features: list[tuple[Tensor, Tensor]] = []
    rows: list[Tensor] = []
    for part in ("train", "test"):
        by_class = {name: files[: arguments.per_class] for name, files in photos(arguments.data / part).items()}
        files, labels = labelled(by_class, list(by_class))
        names = list(by_class)
        rows.append(torch.tensor([names.index(label) for label in labels]))
        pixels = read_labelled([str(file) for file in files], labels, networks[0].side).pixels
        exact, rounded = (network.features(pixels, NO_HOOKS) for network in networks)
        features.append((exact, rounded))
    exact, rounded = features[1]
    moved = 100 * float(((rounded - exact).norm(dim=1) / exact.norm(dim=1)).mean())
    new = not arguments.out.exists()
    with arguments.out.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        for readout in READOUTS:
            accuracies = [
                evaluate(readout, (train, rows[0]), (test, rows[1])) for train, test in zip(*features, strict=True)
            ]
            counts = (arguments.data.name, arguments.image_size, len(rows[0]), len(rows[1]))
            writer.writerow((*counts, readout, *(f"{value:.2f}" for value in accuracies), f"{moved:.2f}"))


if __name__ == "__main__":
    main()
