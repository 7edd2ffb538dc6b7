# SPDX-License-Identifier: Apache-2.0
"""Recall of ``onea check`` on Grocery Store photos with wrong labels.

    python benchmarks/models/check_labels.py --data FOLDER --out results.json

FOLDER holds ``train/CLASS/*`` of the Grocery Store Dataset's 81 fine classes. In each trial 20 photos get a wrong
label: of any class (``random``), of a class of the same update in grocery-arrivals.json (``kind``), or, in groups of
four similar photos, of any class (``series``). The result is the fraction of them among the first 40 photos that a
check reports. The features are computed once, with the frozen bundled network. The rule was chosen on seeds 0 to 4,
and its number of series after seeds 5 to 9; the other seeds test it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onea import seeds
from onea.classifiers.statistics import ClassStatistics
from onea.files import write_json
from onea.model.engine import Engine
from onea.model.evaluation.label_errors import find_label_errors
from onea.model.learning.images import read_labelled
from onea.model.learning.update import initial_state
from onea.model.parameters import choose_options
from onea.vit.network_config import BUNDLED

UPDATES = Path(__file__).with_name("grocery-arrivals.json")
CHANGED, REPORTED, SERIES = 20, 40, 4  # photos with a wrong label, reported photos, photos of a series


def frozen_features(folder: Path, threads: int) -> tuple[Tensor, Tensor, list[str]]:
    """Features of all photos with the untrained adapter, their class indices, and the classes."""
    engine = Engine(BUNDLED, "auto", "auto", threads, mirror=True)
    batch = read_labelled(folder, None, engine.side)
    assert batch.labels is not None
    names = sorted(set(batch.labels))
    adapters = engine.adapters(initial_state(engine, choose_options("auto", {}, engine.vit), "ncm"))
    return engine.features(batch.pixels, adapters), torch.tensor([names.index(label) for label in batch.labels]), names


def change_labels(way: str, seed: int, features: Tensor, rows: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """The class indices of all photos with some of them changed, and the indices of the changed photos."""
    generator = seeds.generator(seed, 0, f"wrong names/{way}")
    unit, changed_rows, changed = F.normalize(features - features.mean(0), dim=1), rows.clone(), list[int]()
    for photo in torch.randperm(len(rows), generator=generator).tolist():
        own = (rows == rows[photo]).nonzero()[:, 0]
        count = SERIES if way == "series" else 1
        similar = own[(unit[own] @ unit[photo]).topk(count).indices].tolist() if count > 1 else [photo]
        others = kinds == kinds[rows[photo]] if way == "kind" else torch.ones(len(kinds), dtype=torch.bool)
        choice = [row for row in others.nonzero()[:, 0].tolist() if row != rows[photo]]
        if not choice or set(similar) & set(changed):
            continue
        changed_rows[similar] = choice[int(torch.randint(len(choice), (1,), generator=generator))]
        changed += similar
        if len(changed) >= CHANGED:
            break
    return changed_rows, torch.tensor(changed)


def recall(features: Tensor, rows: Tensor, changed: Tensor) -> float:
    """The fraction of the changed photos that are among the first results of a check."""
    errors = find_label_errors(ClassStatistics.empty(features.shape[1]), features, rows)
    reported = errors.ratio.argsort(descending=True, stable=True)[:REPORTED]
    return float(torch.isin(changed, reported).double().mean())


def main() -> None:
    """Run all seeds and settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(15)))
    parser.add_argument("--ways", nargs="+", default=["random", "kind", "series"])
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    features, rows, names = frozen_features(arguments.data / "train", arguments.threads)
    updates: Sequence[dict[str, Any]] = json.loads(UPDATES.read_text())
    kind_of = {name: number for number, update in enumerate(updates) for name in update["classes"]}
    kinds = torch.tensor([kind_of[name] for name in names])
    results: dict[str, Any] = {"moved": CHANGED, "named": REPORTED, "found": {}}
    for way in arguments.ways:
        by_seed = {}
        for seed in arguments.seeds:
            by_seed[str(seed)] = round(recall(features, *change_labels(way, seed, features, rows, kinds)), 3)
            print(way, seed, by_seed[str(seed)], flush=True)
        results["found"][way] = by_seed | {"mean": round(fmean(by_seed.values()), 3)}
        write_json(arguments.out, results)


if __name__ == "__main__":
    main()
