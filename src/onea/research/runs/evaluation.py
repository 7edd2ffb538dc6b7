# SPDX-License-Identifier: Apache-2.0
"""Evaluation after a task: predictions for all test images of seen classes, open-set AUROC and the cost per image."""

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
COST_AFTER_TASKS = (1, 10, 40)  # and after the last task
_COST_IMAGES = 8  # some methods compute another path for each image


@dataclass(frozen=True)
class StreamPredictions:
    """Predictions of a method for test images of some tasks of a stream.

    Attributes:
        labels: true class of each image, by its position in the stream.
        predictions: predicted classes, by the name of the classifier. The first one is the method's own; most methods
            have no other.
        max_scores: the largest score of each image by the first classifier.
    """

    labels: Tensor
    predictions: dict[str, Tensor]
    max_scores: Tensor

    @property
    def accuracy(self) -> float:
        """Accuracy of the first classifier in percent."""
        return 100 * float((next(iter(self.predictions.values())) == self.labels).double().mean())


def correct_per_class(
    method: Method,
    test: ImageSubset,
    class_ranges: Sequence[range],
    seed: int,
    feature_cache: FeatureCache | None = None,
) -> dict[str, list[int]]:
    """The number of correct predictions for each class seen, by classifier."""
    return count_correct(predict_tasks(method, test, class_ranges, seed, feature_cache), class_ranges[-1].stop)


def count_correct(predicted: StreamPredictions, classes: int) -> dict[str, list[int]]:
    """The number of correct predictions for each of the first classes, by classifier."""
    labels = predicted.labels
    return {
        name: torch.bincount(labels[predictions == labels], minlength=classes).tolist()
        for name, predictions in predicted.predictions.items()
    }


def open_set_auroc(seen: StreamPredictions, unseen: StreamPredictions | None) -> float | None:
    """AUROC in percent of images of seen against unseen classes by their largest score; None where there are none."""
    if unseen is None or not len(seen.labels) or not len(unseen.labels):
        return None
    return 100 * auroc(seen.max_scores, unseen.max_scores)


def predict_tasks(
    method: Method,
    test: ImageSubset,
    class_ranges: Sequence[range],
    seed: int,
    feature_cache: FeatureCache | None = None,
) -> StreamPredictions:
    """Predict all test images of some tasks.

    Args:
        method: the method, after it has learned some tasks.
        test: images of all classes.
        class_ranges: the classes of each task to predict.
        seed: seed of the run.
        feature_cache: features of earlier evaluations, for a method with cacheable modules. It saves time and changes
            no result.
    """
    feature_cache = feature_cache or FeatureCache(test.rows, max_bytes=0)
    feature_cache.keep_only(method.cacheable_modules())
    if method.cacheable_modules():
        batches = _batches_by_task(test, class_ranges)
    else:
        batches = _shuffled_batches(test, class_ranges, seed)
    batches = [rows for rows in batches if len(rows)]  # a class may have no test images
    processes, device = method.runtime.processes, method.runtime.device
    labels = test.labels[torch.cat([test.rows[:0], *batches])]
    names = list(method.classifiers) if isinstance(method, FeatureClassification) else [""]
    predictions = torch.zeros(len(names), len(labels), dtype=torch.int64, device=device)
    max_scores = torch.zeros(len(labels), device=device)
    sizes = [len(rows) for rows in batches]
    outputs = zip(batches, predictions.split(sizes, dim=1), max_scores.split(sizes), strict=True)
    for number, (rows, predicted, largest) in enumerate(outputs):
        if number % processes.count == processes.rank:
            all_scores = _scores_by_classifier(method, test, rows, feature_cache)
            for output, scores in zip(predicted, all_scores, strict=True):
                output.copy_(scores.argmax(1))
            largest.copy_(all_scores[0].amax(1))
    by_name = dict(zip(names, processes.sum(predictions).cpu(), strict=True))
    return StreamPredictions(labels, by_name, processes.sum(max_scores).cpu())


def _scores_by_classifier(method: Method, test: ImageSubset, rows: Tensor, feature_cache: FeatureCache) -> list[Tensor]:
    """The scores of a batch by every classifier."""
    modules, images = method.cacheable_modules(), cache(lambda: test.images.test_views(pad_rows(rows)))
    features = {
        name: feature_cache.features(
            name,
            rows,
            lambda hooks=hooks: method.features(images(), hooks)[: len(rows)],  # type: ignore[misc]
        ).to(method.runtime.device)
        for name, hooks in modules.items()
    }
    if isinstance(method, FeatureClassification) and len(method.classifiers) > 1:
        (of_batch,) = features.values() or [method.features(images(), method.hooks())[: len(rows)]]
        return list(method.scores_by_classifier(of_batch).values())
    return [method.scores_from_features(features) if modules else method.scores(images())[: len(rows)]]


def _batches_by_task(test: ImageSubset, class_ranges: Sequence[range]) -> list[Tensor]:
    """The images of each task in batches of their own.

    The batches of a task are always the same, so that cached and computed features are equal to the last bit. The order
    within a batch is no advantage: features do not depend on the other images.
    """
    return [batch for classes in class_ranges for batch in _rows_of(test, classes).split(EVALUATION_BATCH)]


def _shuffled_batches(test: ImageSubset, class_ranges: Sequence[range], seed: int) -> list[Tensor]:
    """Batches in random order, the same for all methods, so that none can profit from neighbours of the same class."""
    rows = _rows_of(test, range(class_ranges[0].start, class_ranges[-1].stop))
    rows = rows[torch.randperm(len(rows), generator=seeds.generator(seed, 0, "test order"))]
    return list(rows.split(EVALUATION_BATCH))


def _rows_of(test: ImageSubset, classes: range) -> Tensor:
    labels = test.labels[test.rows]
    return test.rows[(labels >= classes.start) & (labels < classes.stop)]


@dataclass(frozen=True)
class _CachedFeatures:
    """Features of one module, a row per image, and whether each row has been computed."""

    features: Tensor
    is_cached: Tensor


class FeatureCache:
    """Test features of frozen modules in host memory.

    Features that do not fit into the memory are computed again.

    Args:
        rows: the images.
        max_bytes: memory for features; by default half of the free memory whenever a module is added.
    """

    def __init__(self, rows: Tensor, max_bytes: int | None = None):
        self._max_bytes = max_bytes
        self._position = torch.zeros(int(rows.max()) + 1 if len(rows) else 0, dtype=torch.int64)
        self._position[rows] = torch.arange(len(rows))
        self._images = len(rows)
        self._modules: dict[str, _CachedFeatures] = {}

    @property
    def bytes(self) -> int:
        """Allocated memory."""
        return sum(cached.features.nbytes for cached in self._modules.values())

    def keep_only(self, modules: Collection[str]) -> None:
        """Remove the features of all other modules."""
        self._modules = {name: cached for name, cached in self._modules.items() if name in modules}

    def features(self, module: str, rows: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """The features of these rows, from the cache if it has all of them, else computed and added to it."""
        positions, cached = self._position[rows], self._modules.get(module)
        if cached is not None and bool(cached.is_cached[positions].all()):
            return cached.features[positions]
        features = compute()
        cached = cached or self._allocate(module, features)
        if cached is not None:
            cached.features[positions] = features.to(_HOST)
            cached.is_cached[positions] = True
        return features

    def _allocate(self, module: str, like: Tensor) -> _CachedFeatures | None:
        """Memory for the features of a module, or None if there is not enough."""
        needed = self._images * like.shape[1] * like.element_size()
        if choose_storage_tier(self.bytes + needed, self._max_bytes, _HOST) == "disk":
            return None
        features = torch.empty(self._images, like.shape[1], dtype=like.dtype)
        self._modules[module] = _CachedFeatures(features, torch.zeros(self._images, dtype=torch.bool))
        return self._modules[module]


def measure_cost(method: Method, images: Images, tasks: int) -> dict[str, Any]:
    """FLOPs and forward passes per image, and bytes of state, after this many tasks."""
    rows = torch.arange(min(_COST_IMAGES, len(images)))
    batch = images.test_views(rows)
    with method.vit.uncompiled():
        flops = count_flops(lambda: method.scores(batch))
    return {
        "tasks": tasks,
        "flops_per_image": flops // len(rows),
        "passes_per_image": method.forward_passes(method.options, tasks),
        "state_bytes": sum(value.numel() * value.element_size() for value in method.inference_state().values()),
    }


def count_flops(action: Callable[[], object]) -> int:
    """FLOPs of the matrix products in an action."""
    # Attention as plain products: the counter does not support every fused kernel.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        action()
    return int(counter.get_total_flops())
