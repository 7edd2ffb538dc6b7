# SPDX-License-Identifier: Apache-2.0
"""Drift maps and classifiers of One-A+ and of its prior art, each with each, on the same adapters.

    python benchmarks/merging/prior_art.py --data folder:cub200 --tasks 20 --seeds 1 2 3 --image-size 112 --out FILE.csv

One-A+ learns a stream without its guard, once for each start and seed: every adapter from ``fresh`` random weights, or
from the ``merged`` adapter. After each task the statistics of old classes follow the adapter by every map, and every
classifier is fitted to them and answers the test images of all classes so far. So nothing but map and classifier
differs between the rows of a start and a seed. The same command again resumes.

Maps: those of ``--carry``. ``dpcr-official`` erases, like its authors' code, directions that the new images lack.
RanPAC cannot follow a map. Without one it has the products of all images; with one it is fitted to samples of the
carried Gaussians of old classes, as many as there were images, and to the images of the newest task.

Columns: ``A_T`` is the accuracy after the last task and ``mean_A`` the mean over all tasks, in percent. ``one``,
``few`` and ``many`` are the part of A_T on classes of tasks of one, two to nine, and ten or more classes. ``trained``
is the number of tasks that trained an adapter, ``seconds`` the duration of the training and all rows of a start and a
seed.
"""

from __future__ import annotations

import argparse
import csv
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from onea import seeds
from onea.classifiers import make_classifier
from onea.classifiers.base import Classifier, Statistics
from onea.classifiers.published_drift import Carry, make_compensation
from onea.classifiers.ranpac import RanPAC
from onea.classifiers.samples import draw_features
from onea.classifiers.statistics import ClassStatistics
from onea.files import write_atomically
from onea.learner.tasks import Task
from onea.research.methods.adapter_merging import AdapterMerging
from onea.research.runs.config import make_config
from onea.research.runs.setup import PreparedRun, prepare
from onea.runtime import make_runtime
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.network_config import BUNDLED

STARTS = ("fresh", "merged")
MAPS: dict[str, tuple[Carry, dict[str, Any]]] = {
    "none": ("none", {}),
    "dpcr": ("dpcr", {}),
    "dpcr-official": ("dpcr", {"small_tasks": "official", "rank_tolerance": 0.0}),
    "sldc": ("sldc", {}),
    "hopdc": ("hopdc", {}),
    "ridge": ("ridge", {}),
}
CLASSIFIERS = ("ncm", "slda", "lr-rgda", "ranpac", "rgda")
KEY = ("data", "backbone", "image_size", "tasks", "options", "start", "seed")
GROUPS = {"one": range(1, 2), "few": range(2, 10), "many": range(10, 10**6)}
COLUMNS = (*KEY, "map", "classifier", "A_T", "mean_A", *GROUPS, "trained", "seconds")


class Ablation:
    """Statistics of the classes of a stream under every map, while one method learns it.

    All directions of each class are kept, as LR-RGDA needs them; the others take their part.
    """

    def __init__(self, prepared: PreparedRun, ranpac_features: int):
        assert isinstance(prepared.method, AdapterMerging)
        self.prepared, self.method = prepared, prepared.method
        self.width, self.seed = self.method.vit.width, prepared.seed
        self.classifiers: dict[str, Classifier] = {
            name: make_classifier(name, **({"features": ranpac_features} if name == "ranpac" else {}))
            for name in CLASSIFIERS
        }
        empty = ClassStatistics.empty(self.width, directions=self.width)
        self.statistics: dict[str, Statistics] = dict.fromkeys(MAPS, empty)
        self.products: Statistics = self.classifiers["ranpac"].statistics(self.width)
        self.trained = 0

    def learn(self, task: Task) -> Iterator[tuple[str, str, Tensor]]:
        """Learn a task; yields map, classifier and which test images of the classes so far are classified correctly."""
        before = self._features(task)
        self.trained += bool(self.method.learn(task)["trained"])
        after = self._features(task)
        labels = task.labels.to(after.device)
        rows = self.prepared.test.rows[self.prepared.test.labels[self.prepared.test.rows] < task.classes.stop]
        images, expected = self._test_features(rows), self.prepared.test.labels[rows].to(after.device)
        self.products = self.products.add(after, labels)
        for name, (carry, options) in MAPS.items():
            old = self.statistics[name]
            compensation = make_compensation(carry, **options)
            if compensation and task.index and not torch.equal(before, after):
                old = compensation.fit(before, after).move_statistics(old)
            self.statistics[name] = new = old.add(after, labels)
            for kind, classifier in self.classifiers.items():
                known = (
                    self._ranpac(name, old, after, labels, task) if kind == "ranpac" else self._part(new, classifier)
                )
                scores = classifier.fit(known).to(images.device)(images)
                yield name, kind, scores.argmax(1) == expected

    def _features(self, task: Task) -> Tensor:
        return self.method.task_features(task, self.method.hooks())

    def _test_features(self, rows: Tensor) -> Tensor:
        images, hooks = self.prepared.test.images, self.method.hooks()
        return torch.cat(
            [self.method.features(images.test_views(part), hooks) for part in rows.split(EVALUATION_BATCH)]
        )

    def _part(self, statistics: Statistics, classifier: Classifier) -> Statistics:
        """The part of the statistics that a run with this classifier alone would keep."""
        needed = classifier.statistics(self.width)
        assert isinstance(statistics, ClassStatistics)
        assert isinstance(needed, ClassStatistics)
        return statistics.reduce_to(needed)

    def _ranpac(self, name: str, old: Statistics, features: Tensor, labels: Tensor, task: Task) -> Statistics:
        """The products of all images, or of samples of old classes and images of the task."""
        if name == "none":
            return self.products
        assert isinstance(old, ClassStatistics)
        generator = seeds.generator(self.seed, task.index, "samples for RanPAC")
        sums = self.classifiers["ranpac"].statistics(self.width).to(features.device)
        if old.classes:
            sums = sums.add(*draw_features(old, old.counts.tolist(), generator))
        return sums.add(features, labels)


def ablate(config: Mapping[str, Any], ranpac_features: int = RanPAC.features) -> list[dict[str, Any]]:
    """Learn one stream from one start; a row for each map and classifier."""
    started = time.perf_counter()
    run = make_config({"method": "one-a-plus", "carry": "none", "guard": 0.0, "classifier": "ncm", **config})
    prepared = prepare(run, make_runtime(run.device, run.precision, run.threads))
    ablation = Ablation(prepared, ranpac_features)
    accuracies: dict[tuple[str, str], list[float]] = {}
    last: dict[tuple[str, str], Tensor] = {}
    for index in range(prepared.stream.tasks):
        for name, kind, right in ablation.learn(prepared.task(index)):
            accuracies.setdefault((name, kind), []).append(percent(right))
            last[name, kind] = right.cpu()
        print(f"task {index + 1} of {prepared.stream.tasks}: {config['start']}, seed {run.seed}", flush=True)
    sizes = torch.tensor(prepared.stream.sizes)
    task_sizes = sizes.repeat_interleave(sizes)[prepared.test.labels[prepared.test.rows]]
    groups = {name: (task_sizes >= span.start) & (task_sizes < span.stop) for name, span in GROUPS.items()}
    shared = {"trained": ablation.trained, "seconds": round(time.perf_counter() - started, 1)}
    return [
        {"map": name, "classifier": kind, "A_T": found[-1], "mean_A": round(fmean(found), 3)}
        | {group: percent(last[name, kind][members]) for group, members in groups.items() if members.any()}
        | shared
        for (name, kind), found in accuracies.items()
    ]


def percent(right: Tensor) -> float:
    """The share of true values in percent."""
    return round(100 * float(right.double().mean()), 3)


def table(
    file: Path,
    key: Mapping[str, Any],
    starts: Sequence[str],
    seeds: Sequence[int],
    config: Mapping[str, Any],
    size: int,
) -> int:
    """Add the rows of all starts and seeds that a file lacks; returns the number of rows in it."""
    rows: list[Mapping[str, Any]] = []
    if file.exists():
        with file.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
    for seed in seeds:
        for start in starts:
            values = {name: str(value) for name, value in {**key, "start": start, "seed": seed}.items()}
            if any(values.items() <= row.items() for row in rows):
                continue
            rows += [values | row for row in ablate({**config, "start": start, "seed": seed}, size)]
            text = io.StringIO()
            writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            write_atomically(file, text.getvalue().encode())
    return len(rows)


def main() -> None:
    """Run every start and seed and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--backbone", default=BUNDLED)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--ranpac-features", type=int, default=RanPAC.features)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="further options, such as min_share=0"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    key = {name: getattr(arguments, name) for name in ("data", "backbone", "image_size", "tasks")}
    config = key | dict(pair.split("=", 1) for pair in arguments.set)
    key |= {"options": " ".join(arguments.set)}
    rows = table(arguments.out, key, arguments.starts, arguments.seeds, config, arguments.ranpac_features)
    print(f"{rows} rows in {arguments.out}")


if __name__ == "__main__":
    main()
