# SPDX-License-Identifier: Apache-2.0
"""Accuracy of the Gaussian classifier by its settings, on held-out training photos.

    python benchmarks/models/gaussian.py --data FOLDER --out gaussian.csv --training frozen auto --photos 20

FOLDER, splits and trainings are those of ``frontier.py``. Each model is taught once and scored with every setting:
``directions`` and ``prior_images`` of ``rgda``, and ``ridge``, the multiple of the mean variance that is added to the
pooled covariance.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from dataclasses import replace
from pathlib import Path

import torch
from frontier import TRAININGS, Trial, at_most, split_photos, taught_state

from onea.classifiers import make_classifier
from onea.classifiers.statistics import ClassStatistics
from onea.model.engine import Engine
from onea.model.learning.images import read_labelled
from onea.vit.network_config import BUNDLED

DIRECTIONS = (8, 16, 32)
PRIOR_IMAGES = (100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0)
RIDGES = (0.0, 0.03, 0.1, 0.3)
DEFAULTS = (32, 800.0, 0.0)
COLUMNS = ("data", "split", "photos", "image_size", "training", "directions", "prior_images", "ridge", "accuracy")


def add_ridge(statistics: ClassStatistics, ridge: float) -> ClassStatistics:
    """The statistics with a multiple of the mean variance added to all variances of the pooled covariance."""
    scatter = statistics.scatter
    assert scatter is not None
    identity = torch.eye(len(scatter), dtype=scatter.dtype)
    return replace(statistics, scatter=scatter + ridge * scatter.diagonal().mean() * identity)


def main() -> None:
    """Teach each model and score all settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--sets", nargs="+", help="folders of --data; by default all")
    parser.add_argument("--sizes", nargs="+", type=int, default=[168])
    parser.add_argument("--training", nargs="+", choices=tuple(TRAININGS), default=["frozen", "auto"])
    parser.add_argument("--photos", nargs="+", type=int, default=[20])
    parser.add_argument("--splits", nargs="+", type=int, default=[0])
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    if not arguments.out.exists():
        arguments.out.write_text(",".join(COLUMNS) + "\n")
    for data, split in itertools.product(
        arguments.sets or sorted(place.name for place in arguments.data.iterdir()), arguments.splits
    ):
        parts = split_photos(arguments.data / data, split)
        for size in arguments.sizes:
            engine = Engine(BUNDLED, "auto", "auto", 0, mirror=True, image_size=size)
            train, held_out = (
                read_labelled([str(file) for file in files], [file.parent.name for file in files], engine.side)
                for files in parts
            )
            assert held_out.labels is not None
            for training, photos in itertools.product(arguments.training, arguments.photos):
                trial = Trial(data, split, photos, 1, size, training, 0.0)
                state = taught_state(engine, at_most(train, photos, split), trial)
                features = engine.features(held_out.pixels, engine.adapters(state))
                rows = torch.tensor([state.classes.index(label) for label in held_out.labels])
                with arguments.out.open("a", newline="") as file:
                    writer = csv.writer(file, lineterminator="\n")
                    for ridge in RIDGES:
                        statistics = add_ridge(state.statistics, ridge)
                        for directions, prior in itertools.product(DIRECTIONS, PRIOR_IMAGES):
                            classifier = make_classifier("rgda", directions=directions, prior_images=prior)
                            correct = (classifier.fit(statistics)(features).argmax(1) == rows).double().mean()
                            accuracy = round(100 * float(correct), 2)
                            writer.writerow((data, split, photos, size, training, directions, prior, ridge, accuracy))
                            if (directions, prior, ridge) == DEFAULTS:
                                print(data, split, photos, size, training, accuracy, flush=True)


if __name__ == "__main__":
    main()
