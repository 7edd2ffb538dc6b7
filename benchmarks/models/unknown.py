# SPDX-License-Identifier: Apache-2.0
"""Detection of unknown classes: a model is taught some classes of a dataset and asked about the others.

    python benchmarks/models/unknown.py --data FOLDER --classes 40 --seed 0 --far OTHER --out results.jsonl

FOLDER holds ``train/CLASS/*`` and ``test/CLASS/*``. The seed selects the taught classes. Test photos of the other
classes, and of OTHER with entirely different content, are unknown. Appends a line of JSON: the rates of photos that are
called unknown at 5 % of the known ones, the area under the ROC curve, that of each published detector on the same
features, and the calibration error of the probabilities.

``--validate`` evaluates a quarter of the training photos instead; all choices are made this way. ``--validate alike``
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
from grocery import Photos, hold_out_groups, labelled, photos, preset_options
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


def hold_out_random(train: Photos, seed: int) -> tuple[Photos, Photos]:
    """Split each class into three quarters for training and one for testing."""
    generator = torch.Generator().manual_seed(seed)
    kept, held_out = dict[str, list[Path]](), dict[str, list[Path]]()
    for name, files in train.items():
        order = torch.randperm(len(files), generator=generator).tolist()
        chosen = set(order[::4])
        held_out[name] = [files[row] for row in sorted(chosen)]
        kept[name] = [files[row] for row in sorted(set(order) - chosen)]
    return kept, held_out


def calibration_error(confidences: Tensor, correct: Tensor) -> float:
    """Expected calibration error over ten equal intervals of confidence."""
    bins = (confidences * BINS).long().clamp_max(BINS - 1)
    gaps = [(confidences[bins == index] - correct[bins == index].double()).sum().abs() for index in range(BINS)]
    return float(sum(gaps)) / len(correct)


def percent(fraction: float) -> float:
    """A fraction as a rounded percentage."""
    return round(100 * fraction, 2)


def detectors(model: Snapshot, features: Tensor) -> dict[str, Tensor]:
    """Scores of published detectors, higher for known classes."""
    result = model.score_features(features)
    signals = model.state.signals()
    cosine, _, likelihood_ratio, distance, _ = signals(features, result.scores).unbind(1)
    logits = result.scores.double() / model.state.temperature
    probabilities = logits.softmax(1)
    # The likelihood ratio with the shared covariance instead of one per class.
    largest_likelihood = result.scores.double().amax(1) * features.shape[1]
    return {
        "ours": result.familiarity,
        "largest probability": probabilities.amax(1),
        "largest score": logits.amax(1),
        "energy": logits.logsumexp(1),
        "entropy": (probabilities * probabilities.clamp_min(1e-12).log()).sum(1),
        "cosine": cosine,
        "Mahalanobis": distance,
        "relative Mahalanobis": likelihood_ratio - largest_likelihood - 0.5 * distance**2,
        "likelihood ratio": likelihood_ratio,
    }


def main() -> None:
    """Teach, evaluate and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--classes", required=True, type=int)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--gamma", type=float, default=0.01)
    parser.add_argument("--again", action="store_true", help="teach all photos once more at the end, in one update")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--far", type=Path)
    parser.add_argument("--validate", nargs="?", const="random", choices=("random", "alike"))
    parser.add_argument("--per-class", type=int)
    parser.add_argument("--params", type=json.loads, default={}, help="of OneA, as JSON")
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    train, test = photos(arguments.data / "train"), photos(arguments.data / "test")
    if arguments.validate:
        train, test = (hold_out_groups if arguments.validate == "alike" else hold_out_random)(train, arguments.seed)
    train = {name: files[: arguments.per_class] for name, files in train.items()}
    names = sorted(train)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(arguments.seed)).tolist()
    known, others = ([names[row] for row in part] for part in (order[: arguments.classes], order[arguments.classes :]))

    sizes = step_sizes(len(known), arguments.updates, arguments.gamma)
    shuffled = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(arguments.seed)).tolist()
    model, started, remaining = OneA(**arguments.params), time.perf_counter(), list(known)
    for size in (sizes[row] for row in shuffled):
        model.learn(*labelled(train, remaining[:size]))
        remaining = remaining[size:]
    if arguments.again:
        model.learn(*labelled(train, known))
    seconds, answers = time.perf_counter() - started, model.snapshot()

    def features_of(files: Any) -> Tensor:
        return answers.engine.features(answers.read(files).pixels, answers.adapters)

    files, labels = labelled(test, known)
    known_features = features_of(files)
    scored = answers.score_features(known_features)
    correct = scored.scores.argmax(1) == torch.tensor([answers.classes.index(label) for label in labels])
    result: dict[str, Any] = {
        "data": arguments.data.name,
        "looked_at": LOOKED_AT[arguments.validate],
        "backbone": answers.state.backbone["name"],
        **{
            name: getattr(arguments, name)
            for name in ("classes", "per_class", "updates", "gamma", "again", "seed", "params")
        },
        "chosen": preset_options(model),
        "seconds": round(seconds, 1),
        "trained": [update["trained"] for update in model.history],
        "right": percent(float(correct.double().mean())),
        "calibration_error": round(100 * calibration_error(answers.probabilities(scored).classes.amax(1), correct), 2),
        "known_called_unknown": percent(rejection_rate(scored.familiarity, answers.threshold)),
    }
    if others:
        ours, theirs = (
            detectors(answers, features) for features in (known_features, features_of(labelled(test, others)[0]))
        )
        result["others_called_unknown"] = percent(rejection_rate(theirs["ours"], answers.threshold))
        result["auroc"] = {name: percent(auroc(ours[name], theirs[name])) for name in ours}
    if arguments.far:
        far = answers.score_features(features_of(arguments.far)).familiarity
        result["far_called_unknown"] = percent(rejection_rate(far, answers.threshold))
    with arguments.out.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
