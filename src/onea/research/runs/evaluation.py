# SPDX-License-Identifier: Apache-2.0
"""What a method is worth after some tasks: right answers on classes seen, doubts about others, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from onea import seeds
from onea.data.image_storage import Images, choose_storage_tier
from onea.openset import auroc
from onea.research.methods.classification import FeatureClassification
from onea.research.methods.contract import Method
from onea.research.runs.setup import ImageSubset
from onea.vit.batching import EVALUATION_BATCH, pad_rows

_HOST = torch.device("cpu")
COST_AFTER_TASKS = (1, 10, 40)  # tasks; and after the last one
_SAMPLE = 8  # images; some methods route each image its own way


@dataclass(frozen=True)
class StreamPredictions:
    """Answers of a method to test images of some tasks of a stream.

    Attributes:
        truth: class of each image, by its position in the stream.
        answers: of each classifier by its name; the first is the one that answers, and most methods have no other.
        familiarity: the largest of each image's scores, by the classifier that answers.
    """

    truth: Tensor
    answers: dict[str, Tensor]
    familiarity: Tensor


def correct_per_class(
    method: Method, test: ImageSubset, class_ranges: Sequence[range], seed: int, known: FeatureCache | None = None
) -> dict[str, list[int]]:
    """Right answers for each class seen, over the test images of those classes, by every classifier of a method."""
    return count_correct(predict_tasks(method, test, class_ranges, seed, known), class_ranges[-1].stop)


def count_correct(found: StreamPredictions, classes: int) -> dict[str, list[int]]:
    """Right answers for each of the first classes, by every classifier."""
    return {
        name: torch.bincount(found.truth[answers == found.truth], minlength=classes).tolist()
        for name, answers in found.answers.items()
    }


def open_set_auroc(seen: StreamPredictions, to_come: StreamPredictions | None) -> float | None:
    """AUROC in percent of the images of classes seen against those of classes yet to come; None without either."""
    if to_come is None or not len(seen.truth) or not len(to_come.truth):
        return None
    return 100 * auroc(seen.familiarity, to_come.familiarity)


def predict_tasks(
    method: Method, test: ImageSubset, class_ranges: Sequence[range], seed: int, known: FeatureCache | None = None
) -> StreamPredictions:
    """Ask a method about all test images of some tasks.

    Args:
        method: after it has learned some tasks.
        test: images of all classes.
        class_ranges: the classes of each task that is asked about, one task after the other.
        seed: of the run.
        known: features of earlier evaluations, for a method with cacheable modules. They change only the time.
    """
    known = known or FeatureCache(test.rows, bound=0)
    known.keep_only(method.cacheable_modules())
    batches = _by_task(test, class_ranges) if method.cacheable_modules() else _shuffled(test, class_ranges, seed)
    batches = [rows for rows in batches if len(rows)]  # a class may come without test images
    processes, device = method.runtime.processes, method.runtime.device
    truth = test.labels[torch.cat([test.rows[:0], *batches])]
    names = list(method.classifiers) if isinstance(method, FeatureClassification) else [""]
    answers = torch.zeros(len(names), len(truth), dtype=torch.int64, device=device)
    familiarity = torch.zeros(len(truth), device=device)
    sizes = [len(rows) for rows in batches]
    parts = zip(batches, answers.split(sizes, dim=1), familiarity.split(sizes), strict=True)
    for number, (rows, own, largest) in enumerate(parts):
        if number % processes.count == processes.rank:
            by_classifier = _scores(method, test, rows, known)
            for line, scores in zip(own, by_classifier, strict=True):
                line.copy_(scores.argmax(1))
            largest.copy_(by_classifier[0].amax(1))
    found = dict(zip(names, processes.sum_of(answers).cpu(), strict=True))
    return StreamPredictions(truth, found, processes.sum_of(familiarity).cpu())


def _scores(method: Method, test: ImageSubset, rows: Tensor, known: FeatureCache) -> list[Tensor]:
    """The scores of a batch by every classifier."""
    parts, images = method.cacheable_modules(), cache(lambda: test.images.plain(pad_rows(rows)))
    features = {
        name: known.features(
            name,
            rows,
            lambda hooks=hooks: method.features(images(), hooks)[: len(rows)],  # type: ignore[misc]
        ).to(method.runtime.device)
        for name, hooks in parts.items()
    }
    if isinstance(method, FeatureClassification) and len(method.classifiers) > 1:
        (found,) = features.values() or [method.features(images(), method.hooks())[: len(rows)]]
        return list(method.scores_by_classifier(found).values())
    return [method.scores_from_features(features) if parts else method.scores(images())[: len(rows)]]


def _by_task(test: ImageSubset, class_ranges: Sequence[range]) -> list[Tensor]:
    """The images of each task in batches of their own.

    Always the same batches, so that it does not matter to the last bit which features are known from earlier. That
    neighbours share a class does not matter either: each image's features are its own.
    """
    return [part for classes in class_ranges for part in _rows(test, classes).split(EVALUATION_BATCH)]


def _shuffled(test: ImageSubset, class_ranges: Sequence[range], seed: int) -> list[Tensor]:
    """No method may profit from neighbours of the same class, so the order is random (and the same for all methods)."""
    rows = _rows(test, range(class_ranges[0].start, class_ranges[-1].stop))
    rows = rows[torch.randperm(len(rows), generator=seeds.generator(seed, 0, "test order"))]
    return list(rows.split(EVALUATION_BATCH))


def _rows(test: ImageSubset, classes: range) -> Tensor:
    labels = test.labels[test.rows]
    return test.rows[(labels >= classes.start) & (labels < classes.stop)]


@dataclass(frozen=True)
class _Held:
    """Features of one part, a row per image, and which rows are there."""

    features: Tensor
    known: Tensor


class FeatureCache:
    """Features by part and image in host memory, where a copy costs next to nothing against a pass.

    Beyond the bound nothing more is kept, and what is not kept is computed again.

    Args:
        rows: of the images that may be asked for.
        bound: bytes; without one, half of what is free whenever a part is added.
    """

    def __init__(self, rows: Tensor, bound: int | None = None):
        self._bound = bound
        self._position = torch.zeros(int(rows.max()) + 1 if len(rows) else 0, dtype=torch.int64)
        self._position[rows] = torch.arange(len(rows))
        self._images = len(rows)
        self._parts: dict[str, _Held] = {}

    @property
    def bytes(self) -> int:
        """What is set aside for all parts."""
        return sum(held.features.nbytes for held in self._parts.values())

    def keep_only(self, parts: Collection[str]) -> None:
        """Forget the parts that are not named: nobody will ask for them again."""
        self._parts = {name: held for name, held in self._parts.items() if name in parts}

    def features(self, part: str, rows: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """The features of these rows, from memory if all of them are there, else computed and kept."""
        at, held = self._position[rows], self._parts.get(part)
        if held is not None and bool(held.known[at].all()):
            return held.features[at]
        features = compute()
        held = held or self._add(part, features)
        if held is not None:
            held.features[at] = features.to(_HOST)
            held.known[at] = True
        return features

    def _add(self, part: str, like: Tensor) -> _Held | None:
        """Room for a part, if there is any."""
        needed = self._images * like.shape[1] * like.element_size()
        if choose_storage_tier(self.bytes + needed, self._bound, _HOST) == "disk":
            return None
        room = torch.empty(self._images, like.shape[1], dtype=like.dtype)
        self._parts[part] = _Held(room, torch.zeros(self._images, dtype=torch.bool))
        return self._parts[part]


def measure_cost(method: Method, images: Images, tasks: int) -> dict[str, Any]:
    """Floating-point operations and passes per image, and bytes kept, after this many tasks."""
    rows = torch.arange(min(_SAMPLE, len(images)))
    batch = images.plain(rows)
    with method.vit.uncompiled():
        flops = count_flops(lambda: method.scores(batch))
    return {
        "tasks": tasks,
        "flops_per_image": flops // len(rows),
        "passes_per_image": method.forward_passes(method.options, tasks),
        "state_bytes": sum(value.numel() * value.element_size() for value in method.inference_state().values()),
    }


def count_flops(action: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products in an action, as the mathematics needs them."""
    # Attention as plain products: the counter does not know every fused kernel.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        action()
    return int(counter.get_total_flops())
