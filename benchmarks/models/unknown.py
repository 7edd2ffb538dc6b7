# SPDX-License-Identifier: Apache-2.0
"""Detection of unknown classes: a model is taught some classes of a dataset and asked about the others.

    python benchmarks/models/unknown.py --data FOLDER --classes 40 --seed 0 --far OTHER --out results.jsonl

FOLDER holds ``train/CLASS/*`` and ``test/CLASS/*``. The seed selects the taught classes. Test photos of the other
classes, and of OTHER with entirely different content, are unknown. Appends a line of JSON: the rates of photos that are
called unknown at 5 % of the known ones, the area under the ROC curve, that of each published detector on the same
features, and the calibration error of the probabilities.

``--validate`` evaluates a quarter of the training photos instead; all choices are made on it. ``--validate alike``
holds out whole groups of similar photos, for photos taken in series. ``--updates`` is the number of updates,
``--gamma`` their imbalance (1: equal), and ``--per-class`` the maximum number of photos per class. ``--again`` adds a
last update with all photos.

Two configurations are compared by runs that differ only in ``--params``: the seed selects the same classes, photos and
order. ``chosen`` holds the options of the preset; in earlier lines without it, no preset (or ``auto``) is the current
``thorough``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from grocery import Photos, chosen, divided, labelled, photos
from torch import Tensor

from onea.model.answers import Snapshot
from onea.model.estimator import OneA
from onea.openset import auroc, rejection_rate
from onea.research.streams import step_sizes

BINS = 10
LOOKED_AT = {
    None: "test photos",
    "random": "a quarter of the training photos",
    "alike": "a quarter of the training photos, in groups that look alike",
}


def at_random(train: Photos, seed: int) -> tuple[Photos, Photos]:
    """Split each class into three quarters for training and one for testing."""
    generator = torch.Generator().manual_seed(seed)
    kept, seen = dict[str, list[Path]](), dict[str, list[Path]]()
    for name, files in train.items():
        order = torch.randperm(len(files), generator=generator).tolist()
        shown = set(order[::4])
        seen[name] = [files[row] for row in sorted(shown)]
        kept[name] = [files[row] for row in sorted(set(order) - shown)]
    return kept, seen


def calibration_error(chances: Tensor, right: Tensor) -> float:
    """Expected calibration error over ten equal intervals of confidence."""
    place = (chances * BINS).long().clamp_max(BINS - 1)
    gaps = [(chances[place == row] - right[place == row].double()).sum().abs() for row in range(BINS)]
    return float(sum(gaps)) / len(right)


def percent(share: float) -> float:
    """A fraction as a rounded percentage."""
    return round(100 * share, 2)


def detectors(model: Snapshot, features: Tensor) -> dict[str, Tensor]:
    """Scores of published detectors, higher for known classes."""
    found = model.score_features(features)
    signals = model.state.signals()
    near, _, likely, away, _ = signals(features, found.scores).unbind(1)
    logits = found.scores.double() / model.state.temperature
    chances = logits.softmax(1)
    # The likelihood ratio with the shared covariance instead of one per class.
    likeliest = found.scores.double().amax(1) * features.shape[1]
    return {
        "ours": found.familiarity,
        "largest probability": chances.amax(1),
        "largest score": logits.amax(1),
        "energy": logits.logsumexp(1),
        "entropy": (chances * chances.clamp_min(1e-12).log()).sum(1),
        "cosine": near,
        "Mahalanobis": away,
        "relative Mahalanobis": likely - likeliest - 0.5 * away**2,
        "likelihood ratio": likely,
    }


def main() -> None:
    """Teach, evaluate and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--classes", required=True, type=int)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--gamma", type=float, default=0.01)
    parser.add_argument("--again", action="store_true", help="teach all of them once more at the end, in one update")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--far", type=Path)
    parser.add_argument("--validate", nargs="?", const="random", choices=("random", "alike"))
    parser.add_argument("--per-class", type=int)
    parser.add_argument("--params", type=json.loads, default={}, help="of OneA, as JSON")
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args()
    train, test = photos(given.data / "train"), photos(given.data / "test")
    if given.validate:
        train, test = (divided if given.validate == "alike" else at_random)(train, given.seed)
    train = {name: files[: given.per_class] for name, files in train.items()}
    names = sorted(train)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(given.seed)).tolist()
    known, others = ([names[row] for row in part] for part in (order[: given.classes], order[given.classes :]))

    sizes = step_sizes(len(known), given.updates, given.gamma)
    shuffled = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(given.seed)).tolist()
    model, started, rest = OneA(**given.params), time.perf_counter(), list(known)
    for size in (sizes[row] for row in shuffled):
        model.learn(*labelled(train, rest[:size]))
        rest = rest[size:]
    if given.again:
        model.learn(*labelled(train, known))
    seconds, answers = time.perf_counter() - started, model.snapshot()

    def seen(files: Any) -> Tensor:
        return answers.engine.features(answers.read(files).pixels, answers.adapters)

    files, labels = labelled(test, known)
    inside = seen(files)
    found = answers.score_features(inside)
    right = found.scores.argmax(1) == torch.tensor([answers.classes.index(label) for label in labels])
    result: dict[str, Any] = {
        "data": given.data.name,
        "looked_at": LOOKED_AT[given.validate],
        "backbone": answers.state.backbone["name"],
        **{
            name: getattr(given, name)
            for name in ("classes", "per_class", "updates", "gamma", "again", "seed", "params")
        },
        "chosen": chosen(model),
        "seconds": round(seconds, 1),
        "trained": [update["trained"] for update in model.history],
        "right": percent(float(right.double().mean())),
        "calibration_error": round(100 * calibration_error(answers.probabilities(found).classes.amax(1), right), 2),
        "known_called_unknown": percent(rejection_rate(found.familiarity, answers.threshold)),
    }
    if others:
        ours, theirs = (detectors(answers, features) for features in (inside, seen(labelled(test, others)[0])))
        result["others_called_unknown"] = percent(rejection_rate(theirs["ours"], answers.threshold))
        result["auroc"] = {name: percent(auroc(ours[name], theirs[name])) for name in ours}
    if given.far:
        far = answers.score_features(seen(given.far)).familiarity
        result["far_called_unknown"] = percent(rejection_rate(far, answers.threshold))
    with given.out.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
