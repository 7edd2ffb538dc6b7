# SPDX-License-Identifier: Apache-2.0
"""Methods that train an adapter per task and merge it into the one that is kept; they differ in the operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from onea.learner.adapter_training import Start
from onea.learner.fixed_views import FixedViews
from onea.learner.held_out import held_out_of_task
from onea.learner.merged_adapter import (
    AdapterCache,
    AdapterLearner,
    MergedAdapter,
    MergedAdapterOptions,
    MergingOptions,
)
from onea.learner.one_a import PUBLISHED
from onea.learner.tasks import StreamPlan, Task
from onea.learner.update import LearnerState, NewImages, learn_update
from onea.merging.average import RunningMean
from onea.research.methods.classification import FeatureClassification, RandomFeatureOptions
from onea.runtime import Runtime
from onea.schema import ZeroToOne
from onea.tensors import Tensors, add_prefix, select_prefix
from onea.vit.frozen import FrozenViT
from onea.vit.hooks import BlockHooks

_KEPT, _MEMORY, _START, _ORIGIN = "adapter.", "operator.", "start.", "origin."


class AdapterMerging(FeatureClassification):
    """One adapter, merged task by task, and statistics of each class. Inference is one pass, for ever.

    The options name the operator.

    Attributes:
        merged: the kept adapter, as a value.
        kept: the same as a module that the network is run with.
    """

    options: MergingOptions
    paper_presets: ClassVar = PUBLISHED

    def __init__(
        self,
        vit: FrozenViT,
        options: MergingOptions,
        runtime: Runtime,
        plan: StreamPlan | None = None,
        adapter_cache: AdapterCache | None = None,
    ):
        super().__init__(vit, options, runtime, plan)
        self.learner = AdapterLearner(vit, options, runtime, plan, adapter_cache)
        self.adapter = self.learner.new_adapters().requires_grad_(False).eval().to(runtime.device)
        self.merged = MergedAdapter(_copied(self.adapter.state_dict()))

    @classmethod
    def epochs_per_task(cls, options: MergingOptions, sizes: Sequence[int]) -> list[int]:
        """More for larger tasks, none for those that are not trained on."""
        plan, merged, epochs = StreamPlan(sum(sizes), len(sizes)), 0, []
        for classes in sizes:
            trained = options.should_train(classes, classes / (classes + merged))
            epochs.append(options.epochs_for(classes, plan) if trained else 0)
            merged += classes * trained
        return epochs

    def learn(self, task: Task) -> dict[str, Any]:
        """Train an adapter, merge it into the kept one and add the task's images to what is known of its classes."""
        trains = self.options.should_train(len(task.classes), self.merged.sizes_with(task).new_share)
        held_out, views = torch.zeros(len(task), dtype=torch.bool), None
        if trains and self.options.guard:
            held_out = held_out_of_task(task, self.options.guard)
        if trains and self.options.training_views:
            count = self.options.num_fixed_views(len(task), len(task.classes))
            views = FixedViews.sample(self.vit, self.runtime, task, count, self.options.crop_scale, self.adapter)

        def train_and_merge(merged: MergedAdapter) -> tuple[MergedAdapter, dict[str, Any]]:
            result = self.learner.train_and_merge(
                merged, task.only(~held_out), views=views, held_out=task.only(held_out)
            )
            self.runtime.progress.note("prototypes")
            return result

        def features(view: int, merged: MergedAdapter) -> Tensor:
            self._use(merged)
            return self.task_features(task, self.adapter, view, views)

        name, classifier = next(iter(self.classifiers.items()))
        update = learn_update(
            LearnerState(self.merged, self.statistics),
            NewImages(task.labels, features, held_out, *self.num_views(task)),
            train_and_merge if trains else None,
            kind=self.statistics_kind(name),
            classifier=classifier,
            compensate_drift=self.options.carry and self.num_classes > 0,
        )
        self._use(update.state.adapter)
        self.set_statistics(update.state.statistics)
        return update.report

    @property
    def num_classes(self) -> int:
        """The number of classes in the statistics."""
        return next(iter(self.statistics.values())).classes

    def hooks(self) -> BlockHooks:
        """The kept adapter."""
        return self.adapter

    def state_dict(self) -> Tensors:
        """The kept adapter, the statistics, the counts of what was merged, the operator's state, next start, origin."""
        merged = self.merged
        return {
            **super().state_dict(),
            **add_prefix(_KEPT, self.adapter.state_dict()),
            **add_prefix(_MEMORY, merged.operator_state),
            **add_prefix(_START, merged.start),
            **add_prefix(_ORIGIN, merged.origin),
            "merged": torch.tensor([merged.classes, merged.samples]),
        }

    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a saved state."""
        super().load_state_dict(state)
        adapter, memory, start, origin = (select_prefix(prefix, state) for prefix in (_KEPT, _MEMORY, _START, _ORIGIN))
        classes, samples = state["merged"].tolist()
        self.adapter.load_state_dict(adapter)
        # In the order of the module, not of the file.
        self.merged = MergedAdapter(_copied(self.adapter.state_dict()), classes, samples, memory, start, origin)

    def _use(self, merged: MergedAdapter) -> None:
        """Run the network with this adapter from now on."""
        if merged is not self.merged:
            self.adapter.load_state_dict(merged.tensors)
            self.merged = merged


def _copied(tensors: Tensors) -> Tensors:
    return {name: value.clone() for name, value in tensors.items()}


class MergedAdapterMethod(AdapterMerging):
    """One adapter, merged by the operator of your choice."""

    title = "Merged adapter"
    paper = "https://arxiv.org/abs/2603.10237"
    trains = "an adapter per task"
    stores = "one adapter, a prototype per class, what the operator remembers"
    in_paper = False
    Options = MergedAdapterOptions
    base_learning_rate = 0.17


@dataclass(frozen=True)
class RunningMeanOptions(MergingOptions):
    """Options of the running mean: those of the training."""

    def operator(self) -> RunningMean:
        """The plain mean."""
        return RunningMean()


class RunningMeanOfAdapters(AdapterMerging):
    """One adapter, the plain mean of all task adapters."""

    title = "Running mean"
    paper = "https://arxiv.org/abs/2203.05482"
    trains = "an adapter per task"
    stores = "one adapter, a prototype per class"
    in_paper = False
    Options = RunningMeanOptions
    base_learning_rate = 0.042
    auto_preset: ClassVar = {"single_class": "skip"}


@dataclass(frozen=True)
class SharedStartOptions(RunningMeanOptions):
    """Options of the running mean with a shared start."""

    start: Start = "shared"


class RunningMeanSharedStart(RunningMeanOfAdapters):
    """The plain mean of all task adapters, each trained from the same random weights."""

    title = "Running mean, shared start"
    trains = "an adapter per task, all from the same random weights"
    Options = SharedStartOptions
    base_learning_rate = 0.042


@dataclass(frozen=True)
class FirstTaskOptions(MergingOptions):
    """Options of an adapter of the first task: those of the training."""

    single_class: Literal["train", "skip"] = "skip"
    min_share: ZeroToOne = 1.0

    def operator(self) -> RunningMean:
        """Never asked for more than the first adapter."""
        return RunningMean()


class FirstTask(AdapterMerging):
    """One adapter, trained on the first task that has two classes or more."""

    title = "First task"
    paper = "https://arxiv.org/abs/2303.07338"
    trains = "an adapter on the first task"
    stores = "one adapter, a prototype per class"
    in_paper = False
    Options = FirstTaskOptions
    base_learning_rate = 0.21

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The adapter, which stands still after its task."""
        return {f"adapter of {self.merged.classes} classes": self.adapter}


@dataclass(frozen=True)
class RanPACFirstOptions(RandomFeatureOptions, FirstTaskOptions):
    """Options of RanPAC on an adapter of the first task."""


class RanPACFirst(FirstTask):
    """Ridge regression on random features of a network adapted to the first task, as published."""

    title = "RanPAC (first task)"
    paper = "https://arxiv.org/abs/2307.02251"
    stores = "one adapter, two matrices of random features: 200 MB for 5,000"
    Options = RanPACFirstOptions
    base_learning_rate = 0.18
