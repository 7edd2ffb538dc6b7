# SPDX-License-Identifier: Apache-2.0
"""Accuracy of carried class statistics, compared with statistics that are recomputed from all images.

    python benchmarks/merging/carried_statistics.py --data folder:cub200 --tasks 20 --backbone NETWORK --out FILE.csv

One-A+ learns a stream. After each task, the statistics of all classes so far are recomputed from all their images with
the current adapter. They are compared with the carried statistics of the method, and with statistics that were never
corrected. Only training images are used; a fifth of them is held out and classified.

Columns: ``mean`` is the distance of class means from the recomputed ones, in standard deviations of an image from its
class mean. ``shared`` and ``own`` are the relative errors of the shared and of the class covariances. Classes of the
current task are exact and left out. ``right`` is the accuracy on the held-out images.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onea.classifiers.statistics import ClassStatistics
from onea.research.runs.config import make_config
from onea.research.runs.setup import PreparedRun, prepare
from onea.runtime import make_runtime
from onea.vit.network_config import BUNDLED

FIELDS = ("data", "seed", "task", "classes", "trained", "statistics", "mean", "shared", "own", "right")


def errors(estimate: ClassStatistics, exact: ClassStatistics, old: int) -> dict[str, float]:
    """Errors of the statistics of the first ``old`` classes against recomputed ones."""
    if not old:
        return {"mean": 0.0, "shared": 0.0, "own": 0.0}
    root = exact.whitening()
    offsets = (estimate.means[:old].double() - exact.means[:old].double()) @ root
    pooled, actual = (
        known.scatter / known.degrees_of_freedom for known in (estimate, exact) if known.scatter is not None
    )
    assert estimate.factors is not None
    assert exact.factors is not None
    own = []
    for left, right in zip(estimate.factors[:old].double() @ root, exact.factors[:old].double() @ root, strict=True):
        covariance, expected = left.T @ left, right.T @ right
        own.append(float((covariance - expected).norm() / expected.norm().clamp_min(1e-12)))
    return {
        "mean": float(offsets.norm(dim=1).mean() / root.shape[0] ** 0.5),
        "shared": float((pooled - actual).norm() / actual.norm()),
        "own": sum(own) / len(own),
    }


def held_out(prepared: PreparedRun, classes: int) -> Tensor:
    """The rows of the held-out images of the first classes."""
    rows = prepared.test.rows
    return rows[prepared.test.labels[rows] < classes]


def follow(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Learn the stream and compare after each task."""
    run = make_config(config)
    prepared = prepare(run, make_runtime(run.device, run.precision, run.threads))
    method: Any = prepared.method
    lines, uncorrected = [], next(iter(method.statistics.values()))
    for index in range(prepared.stream.tasks):
        task = prepared.task(index)
        report = method.learn(task)
        uncorrected = uncorrected.add(method.task_features(task, method.hooks()), task.labels)
        all_tasks = task.cumulative_task() if task.cumulative_task else task
        exact = method.classifiers["rgda"].statistics(method.vit.width)
        exact = exact.add(method.task_features(all_tasks, method.hooks()), all_tasks.labels)
        rows = held_out(prepared, task.classes.stop)
        features = torch.cat(
            [method.features(prepared.test.images.test_views(part), method.hooks()) for part in rows.split(512)]
        )
        labels = prepared.test.labels[rows].to(features.device)
        carried = next(iter(method.statistics.values()))
        for name, known in {"left": uncorrected, "carried": carried, "recomputed": exact}.items():
            scores = method.classifiers["rgda"].fit(known).to(features.device)(features)
            line = {"data": prepared.description["data"]["name"], "seed": run.seed, "task": index + 1}
            line |= {"classes": task.classes.stop, "trained": int(report["trained"]), "statistics": name}
            line |= errors(known, exact, task.classes.start)
            lines.append(line | {"right": float((scores.argmax(1) == labels).double().mean())})
        print(lines[-2:], flush=True)
    return lines


def main() -> None:
    """Run one stream and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backbone", default=BUNDLED)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    lines = follow(
        {
            "method": "one-a-plus",
            "data": arguments.data,
            "tasks": arguments.tasks,
            "seed": arguments.seed,
            "backbone": arguments.backbone,
            "holdout": 0.2,
        }
    )
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: round(v, 5) if isinstance(v, float) else v for k, v in line.items()} for line in lines)


if __name__ == "__main__":
    main()
