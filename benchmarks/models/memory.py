# SPDX-License-Identifier: Apache-2.0
"""Accuracy of models that keep small copies of photos, on held-out training photos or on test photos.

    python benchmarks/models/memory.py --data FOLDER --out memory.csv --memory 0 pending 2 5 10 20 --workers 16

FOLDER holds ``SET/CLASS/*``. The classes come in ``--updates`` uneven updates, or one by one with ``--updates 0``, and
``once`` as memory teaches all of them in one update. Photos, splits and held-out photos are those of ``frontier.py``;
with ``--test FOLDER`` (``SET/CLASS/*`` as well) all photos are taught and those of the second folder are classified.
``--arrivals`` takes the updates of grocery-arrivals.json, ``--classes N`` a random draw of N classes, and ``--variant
NAME OPTIONS`` other options of the model, as JSON. The split is also the seed. Each finished trial is a row of
``--out``; repeat the command to resume.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from frontier import READOUT, at_most, select, split_classes, split_photos
from grocery import UPDATES, labelled, photos
from unknown import calibration_error

from onea.data.dataset import natural_key
from onea.learner.memory import parse_memory
from onea.model.answers import Snapshot
from onea.model.engine import Engine
from onea.model.exemplars import count_bytes
from onea.model.learning.images import DecodedImages, read_labelled
from onea.model.learning.replay import MemoryPolicy
from onea.model.learning.update import UpdateSettings, initial_state, learn
from onea.model.parameters import choose_options
from onea.openset import rejection_rate
from onea.vit.network_config import BUNDLED

ONCE = "once"
UNKNOWN = 0.05  # the default rate of models


@dataclass(frozen=True)
class Trial:
    """A set of photos and how they are taught."""

    data: str
    split: int
    classes: int
    photos: int
    updates: int
    image_size: int
    memory: str
    variant: str


@dataclass(frozen=True)
class Outcome:
    """The result of a trial. The seconds are those of learning, while other trials share the machine."""

    accuracy: float
    class_balanced: float
    known_called_unknown: float
    calibration_error: float
    trainings: int
    kilobytes_per_class: float
    seconds: float


COLUMNS = [field.name for kind in (Trial, Outcome) for field in fields(kind)]


def of_classes(batch: DecodedImages, names: Sequence[str]) -> DecodedImages:
    """The photos of some classes."""
    assert batch.labels is not None
    return select(batch, [row for row, name in enumerate(batch.labels) if name in names])


def updates_of(batch: DecodedImages, trial: Trial, arrivals: Sequence[Sequence[str]]) -> list[DecodedImages]:
    """The photos of each update."""
    if arrivals and trial.memory != ONCE:
        return [of_classes(batch, names) for names in arrivals]
    updates = 1 if trial.memory == ONCE else trial.updates or len(set(batch.labels or ()))
    return split_classes(batch, updates, trial.split)


def run(
    trial: Trial,
    engine: Engine,
    train: DecodedImages,
    test: DecodedImages,
    options: dict[str, Any],
    arrivals: Sequence[Sequence[str]],
) -> Outcome:
    """Teach all updates and classify the test photos."""
    assert train.labels is not None
    if trial.classes:
        names = sorted(set(train.labels), key=natural_key)
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(trial.split))
        chosen = [names[row] for row in order[: trial.classes].tolist()]
        train, test = of_classes(train, chosen), of_classes(test, chosen)
    batch = at_most(train, trial.photos, trial.split)
    assert test.labels is not None
    memory = parse_memory(0 if trial.memory == ONCE else trial.memory)
    settings = UpdateSettings(seed=trial.split, policy=MemoryPolicy(memory))
    state = initial_state(engine, choose_options("auto", options, engine.vit), READOUT)
    started = time.perf_counter()
    for version, part in enumerate(updates_of(batch, trial, arrivals), 1):
        state = learn(engine, state, part, version=version, settings=settings)[0]
    seconds = time.perf_counter() - started
    features = engine.features(test.pixels, engine.adapters(state))
    rows = torch.tensor([state.classes.index(label) for label in test.labels])
    snapshot = Snapshot(engine, state, UNKNOWN)
    scored = snapshot.score_features(features)
    correct = (scored.scores.argmax(1) == rows).double()
    per_class = [float(correct[rows == row].mean()) for row in rows.unique()]
    probability, predicted = snapshot.probabilities(scored).classes.max(1)
    return Outcome(
        round(100 * float(correct.mean()), 2),
        round(100 * sum(per_class) / len(per_class), 2),
        round(100 * rejection_rate(scored.familiarity, snapshot.threshold), 2),
        round(100 * calibration_error(probability.double(), predicted == rows), 2),
        sum(update["trained"] for update in state.updates),
        round(count_bytes(state.exemplars) / 1000 / len(state.classes), 1),
        round(seconds, 1),
    )


def run_group(
    group: list[Trial],
    data: Path,
    test: Path | None,
    variants: dict[str, Any],
    arrivals: Sequence[Sequence[str]],
    out: Path,
) -> None:
    """All trials of one set, split and size, whose photos are decoded once."""
    first = group[0]
    engine = Engine(BUNDLED, "auto", "auto", 1, mirror=True, image_size=first.image_size)
    if test is None:
        parts = split_photos(data / first.data, first.split)
    else:
        taught, tested = (photos(folder / first.data) for folder in (data, test))
        parts = labelled(taught, list(taught))[0], labelled(tested, list(taught))[0]
    train, held_out = (
        read_labelled([str(file) for file in files], [file.parent.name for file in files], engine.side)
        for files in parts
    )
    for trial in group:
        row = (*astuple(trial), *astuple(run(trial, engine, train, held_out, variants[trial.variant], arrivals)))
        with out.open("a", newline="") as file:  # the system appends one short line atomically
            csv.writer(file, lineterminator="\n").writerow(row)
        print(*row, flush=True)


def main() -> None:
    """Run the missing trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--test", type=Path, help="folder of test photos")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--sets", nargs="+", help="folders of --data; by default all")
    parser.add_argument("--memory", nargs="+", default=["0", "10", ONCE])
    parser.add_argument("--variant", nargs=2, action="append", metavar=("NAME", "OPTIONS"), default=[])
    parser.add_argument("--arrivals", action="store_true", help="the updates of grocery-arrivals.json")
    parser.add_argument("--classes", nargs="+", type=int, default=[0], help="number of random classes; 0 is all")
    parser.add_argument("--photos", nargs="+", type=int, default=[0], help="photos of a class; 0 is all")
    parser.add_argument("--sizes", nargs="+", type=int, default=[168])
    parser.add_argument("--updates", nargs="+", type=int, default=[15])
    parser.add_argument("--splits", nargs="+", type=int, default=[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--per-worker", type=int, default=2, help="number of trials of one set and size per process")
    arguments = parser.parse_args()
    variants = {name: json.loads(options) for name, options in arguments.variant} or {"": {}}
    sets = arguments.sets or sorted(place.name for place in arguments.data.iterdir())
    arrivals = [update["classes"] for update in json.loads(UPDATES.read_text())] if arguments.arrivals else []
    if not arguments.out.exists():
        arguments.out.write_text(",".join(COLUMNS) + "\n")
    with arguments.out.open(newline="") as file:
        done = {tuple(row[field.name] for field in fields(Trial)) for row in csv.DictReader(file)}
    groups: dict[tuple[str, int, int], list[Trial]] = {}
    for split in arguments.splits:
        for data in sets:
            for size in arguments.sizes:
                trials = [
                    Trial(data, split, classes, photos, updates, size, memory, variant)
                    for classes in arguments.classes
                    for variant in variants
                    for updates in arguments.updates
                    for photos in arguments.photos
                    for memory in arguments.memory
                ]
                groups[data, split, size] = [trial for trial in trials if tuple(map(str, astuple(trial))) not in done]
    with ProcessPoolExecutor(arguments.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(
                run_group,
                group[i : i + arguments.per_worker],
                arguments.data,
                arguments.test,
                variants,
                arrivals,
                arguments.out,
            )
            for group in groups.values()
            for i in range(0, len(group), arguments.per_worker)
        ]
        for job in as_completed(jobs):
            job.result()


if __name__ == "__main__":
    main()
