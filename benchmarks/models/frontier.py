# SPDX-License-Identifier: Apache-2.0
"""Accuracy of models by image size and training, on held-out training photos.

    python benchmarks/models/frontier.py --data FOLDER --out frontier.csv --workers 16 \
        --sizes 112 224 --training frozen auto --photos 20 0 --rates 0.05 0.1

FOLDER holds ``SET/CLASS/*``. A quarter of each class, in groups of similar photos, is held out; ``--split`` is the
seed of this choice. Each trial teaches all classes in one update, with at most ``--photos`` of each class (0
is all), and classifies the held-out photos. ``frozen`` trains no adapter. With ``--updates``, the classes come in that
many uneven updates instead of one. Each finished trial is a row of ``--out``; repeat the command to resume.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from grocery import hold_out_groups, labelled, photos

from onea.data.dataset import natural_key
from onea.model.engine import Engine
from onea.model.learning.images import DecodedImages, read_labelled
from onea.model.learning.update import UpdateSettings, initial_state, learn
from onea.model.parameters import choose_options
from onea.model.state import State
from onea.research.streams import make_stream
from onea.vit.network_config import BUNDLED

GAMMA = 0.01  # imbalance of the updates
READOUT = "rgda"
# Names of trainings: a preset, and the options that differ.
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "frozen": ("fast", {}),
    "auto": ("auto", {}),
    "one-epoch": ("auto", {"epochs": 1}),
    "three-epochs": ("auto", {"epochs": 3}),
    "last-4-blocks": ("auto", {"adapter_blocks": 4}),
    "quarter-of-patches": ("auto", {"patch_drop_rate": 0.75}),
    "all-blocks": ("auto", {"adapter_blocks": 0, "patch_drop_rate": 0.0, "cached_views": 0, "epochs": 8}),
    "share-0.25": ("auto", {"min_share": 0.25}),
}


@dataclass(frozen=True)
class Trial:
    """A combination of a set of photos, the size of the network's input and the training."""

    data: str
    split: int
    photos: int
    updates: int
    image_size: int
    training: str
    learning_rate: float


@dataclass(frozen=True)
class Outcome:
    """The result of a trial. The seconds are those of learning, while other trials share the machine."""

    classes: int
    taught: int
    held_out: int
    accuracy: float
    class_balanced: float
    seconds: float


COLUMNS = [field.name for kind in (Trial, Outcome) for field in fields(kind)]


def trials(arguments: argparse.Namespace) -> list[Trial]:
    """All combinations; a trial without training has no learning rate."""
    return [
        Trial(data, split, photos, updates, size, training, rate)
        for split in arguments.splits
        for data in arguments.sets
        for updates in arguments.updates
        for size in arguments.sizes
        for training in arguments.training
        for photos in arguments.photos
        for rate in ([0.0] if training == "frozen" else arguments.rates)
    ]


def split_photos(folder: Path, split: int) -> tuple[list[Path], list[Path]]:
    """The photos to teach and those to classify, in the order of their classes and names."""
    kept, held_out = hold_out_groups(photos(folder), split)
    return labelled(kept, list(kept))[0], labelled(held_out, list(held_out))[0]


def select(batch: DecodedImages, rows: Sequence[int]) -> DecodedImages:
    """The photos of these rows."""
    assert batch.labels is not None
    return replace(
        batch,
        pixels=batch.pixels[list(rows)],
        labels=tuple(batch.labels[row] for row in rows),
        names=tuple(batch.names[row] for row in rows),
    )


def at_most(batch: DecodedImages, photos: int, seed: int) -> DecodedImages:
    """At most this many random photos of each class; 0 is all."""
    assert batch.labels is not None
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
    count: dict[str, int] = {}
    chosen = []
    for row in order:
        name = batch.labels[row]
        count[name] = count.get(name, 0) + 1
        if not photos or count[name] <= photos:
            chosen.append(row)
    return select(batch, sorted(chosen))


def split_classes(batch: DecodedImages, updates: int, seed: int) -> list[DecodedImages]:
    """The photos of each of some uneven updates, with random sizes, order and classes."""
    assert batch.labels is not None
    names = sorted(set(batch.labels), key=natural_key)
    stream = make_stream(classes=len(names), tasks=updates, gamma=GAMMA, seed=seed)
    update_of = {
        names[label]: index
        for index in range(updates)
        for label in map(stream.class_order.__getitem__, stream.range_of(index))
    }
    return [
        select(batch, [row for row, name in enumerate(batch.labels) if update_of[name] == index])
        for index in range(updates)
    ]


def taught_state(engine: Engine, batch: DecodedImages, trial: Trial) -> State:
    """A model that learned the photos with a preset."""
    preset, changes = TRAININGS[trial.training]
    rate = {"learning_rate": trial.learning_rate} if trial.learning_rate else {}
    options = choose_options(preset, changes | rate, engine.vit)
    state = initial_state(engine, options, READOUT)
    for version, part in enumerate(split_classes(batch, trial.updates, trial.split), 1):
        state = learn(engine, state, part, version=version, settings=UpdateSettings(seed=trial.split))[0]
    return state


def outcome(engine: Engine, state: State, taught: DecodedImages, held_out: DecodedImages, seconds: float) -> Outcome:
    """Accuracy on held-out photos, overall and as a mean over classes."""
    assert held_out.labels is not None
    features = engine.features(held_out.pixels, engine.adapters(state))
    rows = torch.tensor([state.classes.index(label) for label in held_out.labels])
    correct = (state.classifier.fit(state.statistics)(features).argmax(1) == rows).double()
    per_class = [float(correct[rows == row].mean()) for row in rows.unique()]
    return Outcome(
        len(state.classes),
        len(taught),
        len(held_out),
        round(100 * float(correct.mean()), 2),
        round(100 * sum(per_class) / len(per_class), 2),
        round(seconds, 1),
    )


def run_group(
    group: Sequence[Trial], photos: tuple[list[Path], list[Path]], backbone: str, depth: int, out: Path
) -> int:
    """All trials of one set and size, whose photos are decoded once."""
    engine = Engine(backbone, "auto", "auto", 1, mirror=True, image_size=group[0].image_size, depth=depth)
    train, held_out = (
        read_labelled([str(file) for file in files], [file.parent.name for file in files], engine.side)
        for files in photos
    )
    for trial in group:
        batch = at_most(train, trial.photos, trial.split)
        started = time.perf_counter()
        state = taught_state(engine, batch, trial)
        row = (*astuple(trial), *astuple(outcome(engine, state, batch, held_out, time.perf_counter() - started)))
        with out.open("a", newline="") as file:  # the system appends one short line atomically
            csv.writer(file, lineterminator="\n").writerow(row)
        print(*row, flush=True)
    return len(group)


def finished(out: Path) -> set[tuple[str, ...]]:
    """The trials in the file."""
    with out.open(newline="") as file:
        return {tuple(row[field.name] for field in fields(Trial)) for row in csv.DictReader(file)}


def main() -> None:
    """Run the missing trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--backbone", default=BUNDLED)
    parser.add_argument("--depth", type=int, default=0, help="number of blocks; 0 is all")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--sets", nargs="+", help="folders of --data; by default all")
    parser.add_argument("--sizes", nargs="+", type=int, default=[112])
    parser.add_argument("--training", nargs="+", choices=tuple(TRAININGS), default=["frozen"])
    parser.add_argument("--photos", nargs="+", type=int, default=[20])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.0], help="0 is the rate of the preset")
    parser.add_argument("--updates", nargs="+", type=int, default=[1])
    parser.add_argument("--splits", nargs="+", type=int, default=[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--per-worker", type=int, default=6, help="number of trials of one set and size per process")
    arguments = parser.parse_args()
    arguments.sets = arguments.sets or sorted(place.name for place in arguments.data.iterdir())
    if not arguments.out.exists():
        arguments.out.write_text(",".join(COLUMNS) + "\n")
    done = finished(arguments.out)
    missing = [trial for trial in trials(arguments) if tuple(map(str, astuple(trial))) not in done]
    by_size: dict[tuple[str, int, int], list[Trial]] = {}
    for trial in missing:
        by_size.setdefault((trial.data, trial.split, trial.image_size), []).append(trial)
    groups = [
        group[i : i + arguments.per_worker]
        for group in by_size.values()
        for i in range(0, len(group), arguments.per_worker)
    ]
    groups.sort(key=lambda group: -group[0].image_size * sum(t.updates for t in group if t.training != "frozen"))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
        wanted = sorted({(trial.data, trial.split) for trial in missing})
        found = pool.map(split_photos, [arguments.data / name for name, _ in wanted], [split for _, split in wanted])
        splits = dict(zip(wanted, found, strict=True))
        jobs = [
            pool.submit(
                run_group,
                group,
                splits[group[0].data, group[0].split],
                arguments.backbone,
                arguments.depth,
                arguments.out,
            )
            for group in groups
        ]
        for job in as_completed(jobs):
            job.result()


if __name__ == "__main__":
    main()
