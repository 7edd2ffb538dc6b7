# SPDX-License-Identifier: Apache-2.0
"""Teach the Grocery Store photos in updates, as a shop would, and all at once for comparison.

    python benchmarks/models/grocery.py --data FOLDER --out results.json

FOLDER holds ``train/CLASS/*`` and ``test/CLASS/*`` of the Grocery Store Dataset's 81 fine classes. The updates, of 1 to
20 classes, are in grocery-arrivals.json; they were chosen before any measurement. ``--validate N`` evaluates a quarter
of the training photos instead of the test photos, held out in groups of similar photos; N is the seed of the split.
All choices are made this way. ``--params '{"preset": "accurate"}'`` uses another preset. Results contain the options of
their preset.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from onea.data.dataset import natural_key
from onea.files import write_json
from onea.model.answers import Snapshot
from onea.model.engine import Engine
from onea.model.estimator import OneA
from onea.model.learning.images import find_images, read_labelled
from onea.model.learning.series import MAX_GROUPS, groups_by_class
from onea.model.learning.update import initial_state
from onea.model.learning.update_images import held_out_rows
from onea.model.parameters import choose_options
from onea.model.progress_bar import LearningBar
from onea.openset import rejection_rate
from onea.vit.network_config import BUNDLED

UPDATES = Path(__file__).with_name("grocery-arrivals.json")
# Options that a preset sets; they are recorded because presets may change.
PRESET_OPTIONS = (
    *("train", "adapter_blocks", "epochs", "learning_rate", "views", "enough_images", "patch_drop_rate", "min_share"),
)
SIZE_TO_SPLIT = 112  # pixels; the groups of similar photos must not depend on the size of the trials
Photos = dict[str, list[Path]]


def photos(folder: Path) -> Photos:
    """The files of each class."""
    return {place.name: find_images(place) for place in sorted(folder.iterdir()) if place.is_dir()}


def hold_out_groups(train: Photos, split: int) -> tuple[Photos, Photos]:
    """Split each class into three quarters for training and one for testing; groups of similar photos stay together.

    A random quarter would contain near-duplicates of the rest, which would be too easy: 94 % of them are recognised.
    """
    files, labels = labelled(train, list(train))
    engine = Engine(BUNDLED, "auto", "auto", 0, mirror=True, image_size=SIZE_TO_SPLIT)
    frozen = engine.adapters(initial_state(engine, choose_options("auto", {}, engine.vit), "ncm"))
    features = engine.features(read_labelled(files, labels, engine.side).pixels, frozen)
    names = list(train)
    rows = torch.tensor([names.index(label) for label in labels])
    held = set(
        held_out_rows(rows, names, groups_by_class(features, rows, MAX_GROUPS), 0.25, seed=split, update=0).tolist()
    )
    kept: Photos = {name: [] for name in names}
    held_out: Photos = {name: [] for name in names}
    for row, (file, name) in enumerate(zip(files, labels, strict=True)):
        (held_out if row in held else kept)[name].append(file)
    return kept, held_out


def labelled(photos: Photos, classes: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Files and labels of some classes."""
    pairs = [(file, name) for name in classes for file in sorted(photos[name], key=lambda file: natural_key(file.name))]
    return [file for file, _ in pairs], [name for _, name in pairs]


def preset_options(model: OneA) -> dict[str, Any]:
    """The options of a model that its preset set."""
    state = model.snapshot().state
    return {"image_size": state.preprocess["size"]} | {name: state.options[name] for name in PRESET_OPTIONS}


def evaluate(snapshot: Snapshot, files: Sequence[Path], labels: Sequence[str]) -> dict[str, float]:
    """Accuracy without the answer unknown, as in all benchmarks of accuracy, and how many photos are answered so."""
    scored = snapshot.score_features(snapshot.engine.features(snapshot.read(files).pixels, snapshot.adapters))
    rows = torch.tensor([snapshot.classes.index(label) for label in labels])
    correct = (scored.scores.argmax(1) == rows).double()
    balanced = torch.stack([correct[rows == row].mean() for row in rows.unique()]).mean()
    rates = {
        "accuracy": float(correct.mean()),
        "class_balanced": float(balanced),
        "answered_unknown": rejection_rate(scored.familiarity, snapshot.threshold),
    }
    return {name: round(100 * rate, 2) for name, rate in rates.items()}


def teach(
    model: OneA, updates: Sequence[dict[str, Any]], train: Photos, test: Photos, only_last: bool
) -> dict[str, Any]:
    """Teach update by update, and evaluate the test photos of all classes so far after each, or after the last only."""
    steps, known = [], []
    for update in updates:
        started = time.perf_counter()
        with LearningBar() as bar:
            model.learn(*labelled(train, update["classes"]), name=update["name"], progress=bar)
        seconds = time.perf_counter() - started
        known += update["classes"]
        step = {
            "name": update["name"],
            "classes": len(update["classes"]),
            "known": len(known),
            "seconds": round(seconds, 1),
            "epochs": model.history[-1]["epochs"],
            "images": model.history[-1]["images"],
            "held_out_accuracy": model.history[-1]["held_out_accuracy"],
        }
        if update is updates[-1] or not only_last:
            step |= evaluate(model.snapshot(), *labelled(test, known))
        print(json.dumps(step), flush=True)
        steps.append(step)
    image_steps = sum(step["epochs"] * step["images"] for step in steps)
    total = sum(step["seconds"] for step in steps)
    return {"seconds": round(total, 1), "image_steps_per_second": round(image_steps / total, 1), "steps": steps}


def main() -> None:
    """Run updates, all at once, or both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--way", choices=("stream", "at-once", "both"), default="both")
    parser.add_argument("--validate", type=int, metavar="N", help="evaluate this split of the training photos")
    parser.add_argument("--only-last", action="store_true", help="evaluate after the last update only")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--params", type=json.loads, default={}, help="of OneA, as JSON")
    arguments = parser.parse_args()
    updates = json.loads(UPDATES.read_text())
    train, test = photos(arguments.data / "train"), photos(arguments.data / "test")
    if arguments.validate is not None:
        train, test = hold_out_groups(train, arguments.validate)
    at_once = [{"name": "all at once", "classes": [name for update in updates for name in update["classes"]]}]
    results: dict[str, Any] = {
        "params": arguments.params,
        "looked_at": "test" if arguments.validate is None else f"split {arguments.validate}",
    }
    for way, taught in (("stream", updates), ("at-once", at_once)):
        if arguments.way in (way, "both"):
            model = OneA(threads=arguments.threads, **arguments.params)
            results[way] = teach(model, taught, train, test, arguments.only_last)
            results["chosen"] = preset_options(model)
            write_json(arguments.out, results)


if __name__ == "__main__":
    main()
