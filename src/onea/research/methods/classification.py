# SPDX-License-Identifier: Apache-2.0
"""Methods that answer from features of one pass: a representation, and any classifier on top of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onea import seeds
from onea.classifiers import make_classifier
from onea.classifiers.contract import Classifier, Scorer, Statistics
from onea.classifiers.statistics import ClassStatistics
from onea.data.transforms import VIEW_AREA
from onea.errors import OneaError
from onea.learner.fixed_views import FixedViews
from onea.learner.options import ClassifierOptions
from onea.learner.tasks import StreamPlan, Task
from onea.learner.update import with_images
from onea.options import parse_pairs
from onea.research.methods.contract import Method
from onea.runtime import Runtime
from onea.schema import Count
from onea.tensors import Tensors, part_of, prefixed
from onea.vit.batching import EVALUATION_BATCH, pad_rows
from onea.vit.frozen import FrozenViT
from onea.vit.hooks import BlockHooks

_OTHERS = "statistics."


@dataclass(frozen=True)
class RandomFeatures(ClassifierOptions):
    """Options of RanPAC.

    Attributes:
        random_features: the number of random features (M); two matrices of M x M numbers are kept, 200 MB for 5,000.
    """

    classifier: str = "ranpac"
    random_features: Count = 5000

    def classifiers(self) -> dict[str, Classifier]:
        """Those that are asked for; RanPAC, where it is among them, with so many random features."""
        found = super().classifiers()
        if "ranpac" in found:
            own = self.classifier_options if self.classifier == "ranpac" else ""
            given: dict[str, Any] = {"features": self.random_features} | parse_pairs(own, "classifier_options")
            found["ranpac"] = make_classifier("ranpac", **given)
        return found


class FeatureClassification(Method):
    """A method whose features come from one pass and have the network's width, so that any classifier can read them."""

    options: Any

    def __init__(self, vit: FrozenViT, options: Any, runtime: Runtime, plan: StreamPlan | None = None):
        super().__init__(vit, options, runtime, plan)
        self.classifiers: dict[str, Classifier] = options.classifiers()
        self.statistics: dict[Hashable, Statistics] = {}
        self._kinds: dict[str, Hashable] = {}  # of the statistics that each classifier reads
        for name, classifier in self.classifiers.items():
            needed = classifier.statistics(vit.width)
            self._kinds[name] = needed.kind
            known = self.statistics.get(needed.kind)
            if known is None or known.richness < needed.richness:
                self.statistics[needed.kind] = needed
        self._scorers: dict[str, Scorer] = {}

    @property
    def prototypes(self) -> Tensor:
        """The mean feature of each class, ``[classes, width]``, where the classifier keeps them."""
        for known in self.statistics.values():
            if isinstance(known, ClassStatistics):
                return known.means
        raise OneaError(f"The classifier {next(iter(self.classifiers))} keeps no prototypes; choose another one.")

    @abstractmethod
    def hooks(self) -> BlockHooks:
        """What the network is run with now."""

    def scores(self, images: Tensor) -> Tensor:
        """Scores of the classifier that answers."""
        return self.scorer()(self.features(images, self.hooks()))

    def scores_from_features(self, features: Mapping[str, Tensor]) -> Tensor:
        """The same, where the network stands still and its features are known."""
        (known,) = features.values()
        return self.scorer()(known)

    def scores_by_classifier(self, features: Tensor) -> dict[str, Tensor]:
        """Scores of every classifier, the one that answers first."""
        return {name: self.scorer(name)(features) for name in self.classifiers}

    def scorer(self, name: str | None = None) -> Scorer:
        """A classifier fitted to what is known now."""
        name = name or next(iter(self.classifiers))
        if name not in self._scorers:
            self._scorers[name] = self.classifiers[name].fit(self.known(name)).to(self.runtime.device)
        return self._scorers[name]

    def known(self, name: str) -> Statistics:
        """The statistics that a classifier reads."""
        return self.statistics[self._kinds[name]]

    def known_kind(self, name: str) -> Hashable:
        """The kind of the statistics that a classifier reads."""
        return self._kinds[name]

    def looks(self, task: Task) -> tuple[int, int]:
        """The number of views of each image that are looked at, and of those that enter the statistics."""
        return self.options.looks(len(task), len(task.classes)), self.options.views

    def observe(self, task: Task) -> None:
        """Add a task's images to the statistics, as the network sees them now."""
        looks, views = self.looks(task)
        features = torch.stack([self.features_of(task, self.hooks(), view) for view in range(looks)])
        self.set_statistics(with_images(self.statistics, features.expand(views, -1, -1), task.labels))

    def set_statistics(self, statistics: Mapping[Hashable, Statistics]) -> None:
        """Answer from other statistics of the same kinds."""
        self.statistics = dict(statistics)
        self._scorers = {}
        for name in self.classifiers:  # now, so that the first answer is no slower than the others
            self.scorer(name)

    def features_of(self, task: Task, hooks: BlockHooks, view: int = 0, views: FixedViews | None = None) -> Tensor:
        """Features of all images of a task, ``[N, width]`` float32: as they are, or a view of them.

        ``views`` are fixed ones of the same images, where there are some.
        """
        if views is not None:
            return views.features(view, hooks)
        processes, device = self.runtime.processes, self.runtime.device
        found = torch.zeros(len(task), self.vit.width, device=device)
        for number, part in enumerate(torch.arange(len(task)).split(EVALUATION_BATCH)):
            if number % processes.count == processes.rank:
                images = _seen(task, part, view)
                found[part.to(device)] = self.features(images, hooks)[: len(part)].float()
        return processes.sum_of(found)

    def state_dict(self) -> Tensors:
        """The statistics; those of the classifier that answers without a prefix."""
        (first, *others) = self.statistics.values()
        state = first.state_dict()
        for number, known in enumerate(others):
            state |= prefixed(f"{_OTHERS}{number}.", known.state_dict())
        return state

    def answering_state(self) -> Tensors:
        """The state without what only classifiers that are compared need of the statistics."""
        state = {name: value for name, value in self.state_dict().items() if not name.startswith(_OTHERS)}
        answering, classifier = next(iter(self.classifiers.items()))
        known, needed = self.known(answering), classifier.statistics(self.vit.width)
        if isinstance(known, ClassStatistics) and isinstance(needed, ClassStatistics):
            rest = {name: value for name, value in state.items() if name not in known.state_dict()}
            state = known.reduced_to(needed).state_dict() | rest
        return state

    def load_state_dict(self, state: Tensors) -> None:
        """Take the statistics back."""
        for number, (kind, known) in enumerate(self.statistics.items()):
            part = part_of(f"{_OTHERS}{number - 1}.", state) if number else state
            self.statistics[kind] = known.restored(part).to(self.runtime.device)
        self._scorers = {}


def _seen(task: Task, part: Tensor, view: int) -> Tensor:
    """Some images of a task and padding: as they are, or cropped as the number of the view decides."""
    rows = pad_rows(task.rows[part])
    if not view:
        return task.images.plain(rows)
    crops = seeds.generator(task.seed, task.index, f"view {view}/{int(part[0])}")
    return next(iter(task.images.augmented_batches(rows, len(rows), VIEW_AREA, crops)))
