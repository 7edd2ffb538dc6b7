# SPDX-License-Identifier: Apache-2.0
"""Evaluation after a task: predictions for all test images of seen classes, open-set AUROC and the cost per image."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
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
from onea.vit.hooks import BlockHooks

_HOST = torch.device("cpu")
COST_AFTER_TASKS = (1, 10, 40)  # and after the last task
_COST_IMAGES = 8  # more than one, because the cost of some methods depends on the image


@dataclass(frozen=True)
class StreamPredictions:
    """Predictions of a method for the test images of some tasks of a stream.

    Attributes:
        classes: number of classes up to the last of these tasks.
        labels: true class of each image, by its position in the stream.
        predictions: predicted classes, by the name of the classifier. The first one is the method's own; most methods
            have no other.
        max_scores: the largest score of each image by the first classifier.
    """

    classes: int
    labels: Tensor
    predictions: dict[str, Tensor]
    max_scores: Tensor

    @property
    def accuracy(self) -> float:
        """Accuracy of the first classifier in percent."""
        return 100 * float((next(iter(self.predictions.values())) == self.labels).double().mean())

    def correct_per_class(self) -> dict[str, list[int]]:
        """The number of correct predictions for each class, by classifier."""
        return {
            name: torch.bincount(self.labels[predictions == self.labels], minlength=self.classes).tolist()
            for name, predictions in self.predictions.items()
        }


def open_set_auroc(seen: StreamPredictions, unseen: StreamPredictions | None) -> float | None:
    """AUROC in percent of images of seen against unseen classes by their largest score; None without such images."""
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
        feature_cache: features from earlier evaluations, for a method with cacheable modules. It saves time and does
            not change the result.
    """
    feature_cache = feature_cache or FeatureCache(test.rows, max_bytes=0)
    feature_cache.keep_only(method.cacheable_modules())
    batches = [rows for rows in _batches(method, test, class_ranges, seed) if len(rows)]
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
    return StreamPredictions(class_ranges[-1].stop, labels, by_name, processes.sum(max_scores).cpu())


def _batches(method: Method, test: ImageSubset, class_ranges: Sequence[range], seed: int) -> list[Tensor]:
    """The rows of the test images in batches.

    With cacheable modules the batches of a task are always the same, so that cached and computed features are equal to
    the last bit. Otherwise the order is random and the same for all methods, so that no method profits from neighbours
    of the same class.
    """
    labels = test.labels[test.rows]

    def select_rows(classes: range) -> Tensor:
        return test.rows[(labels >= classes.start) & (labels < classes.stop)]

    if method.cacheable_modules():
        return [batch for classes in class_ranges for batch in select_rows(classes).split(EVALUATION_BATCH)]
    rows = select_rows(range(class_ranges[0].start, class_ranges[-1].stop))
    order = torch.randperm(len(rows), generator=seeds.generator(seed, 0, "test order"))
    return list(rows[order].split(EVALUATION_BATCH))


def _scores_by_classifier(method: Method, test: ImageSubset, rows: Tensor, feature_cache: FeatureCache) -> list[Tensor]:
    """The scores of a batch by every classifier."""
    images = cache(lambda: test.images.test_views(pad_rows(rows)))

    def compute(hooks: BlockHooks) -> Tensor:
        return method.features(images(), hooks)[: len(rows)]

    modules = method.cacheable_modules()
    features = {
        name: feature_cache.features(name, rows, partial(compute, hooks)).to(method.runtime.device)
        for name, hooks in modules.items()
    }
    if isinstance(method, FeatureClassification) and len(method.classifiers) > 1:
        (module_features,) = features.values() or [compute(method.hooks())]
        return list(method.scores_by_classifier(module_features).values())
    return [method.scores_from_features(features) if modules else method.scores(images())[: len(rows)]]


class FeatureCache:
    """Test features of frozen modules in host memory.

    Features that do not fit into this memory are computed again.

    Args:
        rows: the images.
        max_bytes: memory for features; by default half of the free memory whenever a module is added.
    """

    def __init__(self, rows: Tensor, max_bytes: int | None = None):
        self._max_bytes = max_bytes
        self._position = torch.zeros(int(rows.max()) + 1 if len(rows) else 0, dtype=torch.int64)
        self._position[rows] = torch.arange(len(rows))
        self._images = len(rows)
        self._features: dict[str, Tensor] = {}  # a row per image, by module
        self._is_cached: dict[str, Tensor] = {}  # whether each row has been computed

    @property
    def bytes(self) -> int:
        """Allocated memory."""
        return sum(features.nbytes for features in self._features.values())

    def keep_only(self, modules: Collection[str]) -> None:
        """Remove the features of all other modules."""
        self._features = {name: features for name, features in self._features.items() if name in modules}

    def features(self, module: str, rows: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """The features of these rows, from the cache if it has all of them, else computed and added to it."""
        positions = self._position[rows]
        if module in self._features and bool(self._is_cached[module][positions].all()):
            return self._features[module][positions]
        features = compute()
        if module in self._features or self._allocate(module, features):
            self._features[module][positions] = features.to(_HOST)
            self._is_cached[module][positions] = True
        return features

    def _allocate(self, module: str, like: Tensor) -> bool:
        """Allocate memory for the features of a module, if there is enough."""
        needed = self._images * like.shape[1] * like.element_size()
        if choose_storage_tier(self.bytes + needed, self._max_bytes, _HOST) == "disk":
            return False
        self._features[module] = torch.empty(self._images, like.shape[1], dtype=like.dtype)
        self._is_cached[module] = torch.zeros(self._images, dtype=torch.bool)
        return True


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
