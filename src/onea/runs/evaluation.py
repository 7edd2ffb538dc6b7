# SPDX-License-Identifier: Apache-2.0
"""Counting right answers over all classes seen so far."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from onea import seeds
from onea.methods.classification import FeatureClassification
from onea.methods.contract import EVALUATION_BATCH, Method, filled_up
from onea.runs.feature_cache import FeatureCache
from onea.runs.setup import Side


def correct_per_class(
    method: Method, test: Side, arrivals: Sequence[range], seed: int, known: FeatureCache | None = None
) -> dict[str, list[int]]:
    """Right answers for each class seen, over the test images of those classes, by every classifier of a method.

    The first is the one that answers; most methods have no other.

    Args:
        method: after it has learned the classes.
        test: images of all classes.
        arrivals: the classes of every task so far.
        seed: of the run.
        known: features of earlier evaluations, for a method with frozen parts. They change nothing but the time.
    """
    known = known or FeatureCache(test.rows, bound=0)
    known.keep_only(method.parts())
    batches = _by_arrival(test, arrivals) if method.parts() else _shuffled(test, arrivals, seed)
    processes, device = method.runtime.processes, method.runtime.device
    truth = test.labels[torch.cat([test.rows[:0], *batches])]
    names = list(method.classifiers) if isinstance(method, FeatureClassification) else [""]
    answers = torch.zeros(len(names), len(truth), dtype=torch.int64, device=device)
    parts = answers.split([len(rows) for rows in batches], dim=1)
    for number, (rows, own) in enumerate(zip(batches, parts, strict=True)):
        if number % processes.count == processes.rank:
            for line, scores in zip(own, _scores(method, test, rows, known), strict=True):
                line.copy_(scores.argmax(1))
    found, classes = processes.sum_of(answers).cpu(), arrivals[-1].stop
    right = [torch.bincount(truth[line == truth], minlength=classes).tolist() for line in found]
    return dict(zip(names, right, strict=True))


def _scores(method: Method, test: Side, rows: Tensor, known: FeatureCache) -> list[Tensor]:
    """The scores of a batch by every classifier."""
    parts, images = method.parts(), cache(lambda: test.images.plain(filled_up(rows)))
    features = {
        name: known.features(
            name,
            rows,
            lambda plug=plug: method.features(images(), plug)[: len(rows)],  # type: ignore[misc]
        ).to(method.runtime.device)
        for name, plug in parts.items()
    }
    if isinstance(method, FeatureClassification) and len(method.classifiers) > 1:
        (found,) = features.values() or [method.features(images(), method.hooks())[: len(rows)]]
        return list(method.scores_by_classifier(found).values())
    return [method.scores_from(features) if parts else method.scores(images())[: len(rows)]]


def _by_arrival(test: Side, arrivals: Sequence[range]) -> list[Tensor]:
    """The images of each task in batches of their own.

    Always the same batches, so that it does not matter to the last bit which features are known from earlier. That
    neighbours share a class does not matter either: each image's features are its own.
    """
    parts = [part for classes in arrivals for part in _rows(test, classes).split(EVALUATION_BATCH)]
    return [part for part in parts if len(part)]  # a class may come without test images


def _shuffled(test: Side, arrivals: Sequence[range], seed: int) -> list[Tensor]:
    """No method may profit from neighbours of the same class, so the order is random (and the same for all methods)."""
    rows = _rows(test, range(arrivals[-1].stop))
    rows = rows[torch.randperm(len(rows), generator=seeds.generator(seed, 0, "test order"))]
    return list(rows.split(EVALUATION_BATCH))


def _rows(test: Side, classes: range) -> Tensor:
    labels = test.labels[test.rows]
    return test.rows[(labels >= classes.start) & (labels < classes.stop)]
