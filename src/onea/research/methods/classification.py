# SPDX-License-Identifier: Apache-2.0
"""Methods with one feature extractor, on whose features any classifier can be fitted.

SimpleCIL, SLDA and RanPAC fit one to the features of the frozen pretrained network, without any training.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onea import seeds
from onea.classifiers import make_classifier
from onea.classifiers.base import Classifier, Scorer, Statistics
from onea.classifiers.statistics import ClassStatistics
from onea.data.transforms import VIEW_AREA
from onea.errors import OneaError
from onea.learner.fixed_views import FixedViews
from onea.learner.options import ClassifierOptions
from onea.learner.tasks import Task
from onea.learner.update import add_images
from onea.options import parse_pairs
from onea.research.methods.contract import Method
from onea.schema import Count
from onea.tensors import Tensors, add_prefix, select_prefix
from onea.vit.batching import EVALUATION_BATCH, pad_rows
from onea.vit.hooks import NO_HOOKS, BlockHooks

_COMPARED = "statistics."


@dataclass(frozen=True)
class RandomFeatureOptions(ClassifierOptions):
    """Options of RanPAC and LoRanPAC.

    Attributes:
        random_features: number of random features M. RanPAC stores two matrices of M x M, 200 MB for 5,000.
    """

    classifier: str = "ranpac"
    random_features: Count = 5000

    def classifiers(self) -> dict[str, Classifier]:
        """The chosen classifiers; ``random_features`` applies to those with random features."""
        classifiers = super().classifiers()
        for name in [name for name in ("ranpac", "loranpac") if name in classifiers]:
            overrides = self.classifier_options if self.classifier == name else ""
            options: dict[str, Any] = {"features": self.random_features} | parse_pairs(overrides, "classifier_options")
            classifiers[name] = make_classifier(name, **options)
        return classifiers


class FeatureClassification(Method):
    """A method whose features have the network's width and take one forward pass, under any classifier.

    Attributes:
        classifiers: classifiers by name; the first one predicts, the others are compared with it.
        statistics: statistics of the features of each class, by kind. Several classifiers may share those of a kind.
        kinds: the kind of the statistics of each classifier, by its name.
    """

    options: Any

    def setup(self) -> None:
        """Create the classifiers, and statistics without classes."""
        self.classifiers: dict[str, Classifier] = self.options.classifiers()
        self.statistics: dict[Hashable, Statistics] = {}
        self.kinds: dict[str, Hashable] = {}
        for name, classifier in self.classifiers.items():
            required = classifier.statistics(self.vit.width)
            self.kinds[name] = required.kind
            shared = self.statistics.get(required.kind)
            if shared is None or shared.detail < required.detail:
                self.statistics[required.kind] = required
        self._scorers: dict[str, Scorer] = {}

    @property
    def prototypes(self) -> Tensor:
        """The mean feature of each class, ``[classes, width]``, if a classifier stores them."""
        for statistics in self.statistics.values():
            if isinstance(statistics, ClassStatistics):
                return statistics.means
        raise OneaError(f"The classifier {next(iter(self.classifiers))} stores no prototypes; choose another one.")

    @property
    def num_classes(self) -> int:
        """The number of classes in the statistics."""
        return next(iter(self.statistics.values())).classes

    @abstractmethod
    def hooks(self) -> BlockHooks:
        """The modules that the network currently runs with."""

    def scores(self, images: Tensor) -> Tensor:
        """Scores of the first classifier."""
        return self.scorer()(self.features(images, self.hooks()))

    def scores_from_features(self, features: Mapping[str, Tensor]) -> Tensor:
        """Scores of the first classifier, from the features of the only cacheable module."""
        (module_features,) = features.values()
        return self.scorer()(module_features)

    def scores_by_classifier(self, features: Tensor) -> dict[str, Tensor]:
        """Scores of every classifier, in their order."""
        return {name: self.scorer(name)(features) for name in self.classifiers}

    def scorer(self, name: str | None = None) -> Scorer:
        """A classifier fitted to the current statistics; by default the first one."""
        name = name or next(iter(self.classifiers))
        if name not in self._scorers:
            self._scorers[name] = self.classifiers[name].fit(self.statistics_for(name)).to(self.runtime.device)
        return self._scorers[name]

    def statistics_for(self, name: str) -> Statistics:
        """The statistics that a classifier is fitted to."""
        return self.statistics[self.kinds[name]]

    def num_views(self, task: Task) -> tuple[int, int]:
        """The number of views of each image that are computed, and how often each image counts in the statistics."""
        return self.options.num_views(len(task), len(task.classes)), self.options.views

    def update_statistics(self, task: Task) -> None:
        """Add the features of a task's images to the statistics."""
        num_views, views = self.num_views(task)
        features = torch.stack([self.task_features(task, self.hooks(), view) for view in range(num_views)])
        self.set_statistics(add_images(self.statistics, features.expand(views, -1, -1), task.labels))

    def set_statistics(self, statistics: Mapping[Hashable, Statistics]) -> None:
        """Replace the statistics by others of the same kinds, and fit the classifiers to them."""
        self.statistics = dict(statistics)
        self._scorers = {}
        for name in self.classifiers:  # eagerly, so that the first prediction is as fast as later ones
            self.scorer(name)

    def task_features(self, task: Task, hooks: BlockHooks, view: int = 0, views: FixedViews | None = None) -> Tensor:
        """Features of all images of a task, ``[N, width]`` in float32.

        Args:
            task: the images.
            hooks: the modules that the network runs with.
            view: 0 is the whole image, other numbers are random crops.
            views: fixed views of the same images, used instead of new crops.
        """
        if views is not None:
            return views.features(view, hooks)
        processes, device = self.runtime.processes, self.runtime.device
        features = torch.zeros(len(task), self.vit.width, device=device)
        for number, batch in enumerate(torch.arange(len(task)).split(EVALUATION_BATCH)):
            if number % processes.count == processes.rank:
                images = _view_of(task, batch, view)
                features[batch.to(device)] = self.features(images, hooks)[: len(batch)].float()
        return processes.sum(features)

    def state_dict(self) -> Tensors:
        """The statistics; those of the first classifier without a prefix."""
        (first, *others) = self.statistics.values()
        state = first.state_dict()
        for number, statistics in enumerate(others):
            state |= add_prefix(f"{_COMPARED}{number}.", statistics.state_dict())
        return state

    def inference_state(self) -> Tensors:
        """The state without the statistics that only the compared classifiers need."""
        state = {name: value for name, value in self.state_dict().items() if not name.startswith(_COMPARED)}
        name, classifier = next(iter(self.classifiers.items()))
        shared, required = self.statistics_for(name), classifier.statistics(self.vit.width)
        if isinstance(shared, ClassStatistics) and isinstance(required, ClassStatistics):
            others = {key: value for key, value in state.items() if key not in shared.state_dict()}
            state = shared.reduce_to(required).state_dict() | others
        return state

    def load_state_dict(self, state: Tensors) -> None:
        """Restore the statistics."""
        for number, (kind, statistics) in enumerate(self.statistics.items()):
            part = select_prefix(f"{_COMPARED}{number - 1}.", state) if number else state
            self.statistics[kind] = statistics.from_state_dict(part).to(self.runtime.device)
        self._scorers = {}


def _view_of(task: Task, batch: Tensor, view: int) -> Tensor:
    """A padded batch of images: whole for view 0, else random crops that the number of the view determines."""
    rows = pad_rows(task.rows[batch])
    if not view:
        return task.images.test_views(rows)
    crops = seeds.generator(task.seed, task.index, f"view {view}/{int(batch[0])}")
    return next(iter(task.images.train_batches(rows, len(rows), VIEW_AREA, crops)))


class SimpleCIL(FeatureClassification):
    """Nearest class mean, by cosine, in the pretrained feature space."""

    title = "SimpleCIL"
    paper = "https://arxiv.org/abs/2303.07338"
    trains = "nothing"
    stores = "a prototype per class"
    inserts_modules = False
    Options = ClassifierOptions

    def learn(self, task: Task) -> dict[str, Any]:
        """Add the task's images to the statistics."""
        self.update_statistics(task)
        return {}

    def hooks(self) -> BlockHooks:
        """None: the pretrained network."""
        return NO_HOOKS

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The pretrained network."""
        return {"plain": NO_HOOKS}


@dataclass(frozen=True)
class SLDAOptions(ClassifierOptions):
    """Options of streaming LDA."""

    classifier: str = "slda"


class SLDA(SimpleCIL):
    """Streaming linear discriminant analysis in the pretrained feature space."""

    title = "SLDA"
    paper = "https://arxiv.org/abs/1909.01520"
    stores = "a mean per class and one matrix"
    in_paper = False
    Options = SLDAOptions


class RanPACFrozen(SimpleCIL):
    """Ridge regression on random features of the pretrained network."""

    title = "RanPAC (frozen)"
    paper = "https://arxiv.org/abs/2307.02251"
    stores = "two random-feature matrices (200 MB for 5,000 features)"
    in_paper = False
    Options = RandomFeatureOptions
