# SPDX-License-Identifier: Apache-2.0
"""Methods that train an adapter per task and merge all of them into one; they differ in the merging operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from onea.learner.adapter_training import Start
from onea.learner.fixed_views import FixedViews
from onea.learner.held_out import held_out_mask
from onea.learner.memory import PENDING, Waiting
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
from onea.research.methods.image_memory import ImageMemory
from onea.runtime import Runtime
from onea.schema import ZeroToOne
from onea.tensors import Tensors, add_prefix, select_prefix
from onea.vit.frozen import FrozenViT
from onea.vit.hooks import BlockHooks

# Prefixes of state keys.
_ADAPTER, _OPERATOR, _START, _ORIGIN, _MEMORY = "adapter.", "operator.", "start.", "origin.", "memory."


class AdapterMerging(FeatureClassification):
    """One merged adapter and statistics of each class. Inference takes one forward pass after any number of tasks.

    Attributes:
        merged: the merged adapter with the state of the merging operator.
        adapter: the merged adapter as a module.
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
        self.learner = self.new_learner(adapter_cache)
        self.adapter = self.learner.new_adapters().requires_grad_(False).eval().to(runtime.device)
        self.merged = MergedAdapter(_cloned(self.adapter.state_dict()))
        policy, self.trigger = options.memory_and_trigger()
        self.memory = ImageMemory(policy=policy) if policy else None

    def new_learner(self, adapter_cache: AdapterCache | None) -> AdapterLearner:
        """What trains and merges adapters."""
        return AdapterLearner(self.vit, self.options, self.runtime, self.plan, adapter_cache)

    @classmethod
    def epochs_per_task(cls, options: MergingOptions, sizes: Sequence[int]) -> list[int]:
        """More epochs for larger tasks, and none for tasks that train no adapter."""
        plan, merged, waiting, known, epochs = StreamPlan(sum(sizes), len(sizes)), 0, 0, 0, []
        memory, trigger = options.memory_and_trigger()
        for classes in sizes:
            known, waiting = known + classes, waiting + classes
            is_trained = options.should_train(classes, classes / (classes + merged))
            trained = classes
            if memory:
                is_trained = is_trained or Waiting(waiting, known).is_due(trigger)
                trained = waiting if memory == PENDING else known
            epochs.append(options.epochs_for(trained, plan) if is_trained else 0)
            merged = min(known, merged + trained) if is_trained else merged
            waiting = 0 if is_trained else waiting
        return epochs

    def learn(self, task: Task) -> dict[str, Any]:
        """Train an adapter, merge it and add the task's images to the statistics of their classes.

        With memory, images of earlier classes take part in the training.
        """
        is_trained = self.options.should_train(len(task.classes), self.merged.sizes_with(task).new_share)
        images, labels, sizes, memory = task, task.labels, None, self.memory
        if memory is not None:
            is_trained = is_trained or memory.waiting(task).is_due(self.trigger)
            if is_trained:
                images, labels = memory.extend(task), memory.labels_with(task)
        held_out, views = torch.zeros(len(images), dtype=torch.bool), None
        if is_trained and self.options.guard:
            held_out = held_out_mask(images, self.options.guard)
        if is_trained and memory is not None:
            sizes = memory.sizes(task, ~held_out)
        if is_trained and self.options.training_views:
            count = self.options.num_fixed_views(len(task), len(task.classes))
            views = FixedViews.sample(self.vit, self.runtime, images, count, self.options.crop_scale, self.adapter)

        def train_and_merge(merged: MergedAdapter) -> tuple[MergedAdapter, dict[str, Any]]:
            result = self.learner.train_and_merge(
                merged, images.subset(~held_out), sizes, views=views, held_out=images.subset(held_out)
            )
            self.runtime.progress.start_phase("prototypes")
            return result

        def features(view: int, merged: MergedAdapter) -> Tensor:
            self._set_adapter(merged)
            return self.task_features(images, self.adapter, view, views)

        name, classifier = next(iter(self.classifiers.items()))
        update = learn_update(
            LearnerState(self.merged, self.statistics),
            NewImages(labels, features, held_out, *self.num_views(task), counted=torch.arange(len(images)) < len(task)),
            train_and_merge if is_trained else None,
            kind=self.kinds[name],
            classifier=classifier,
            compensation=self.options.compensation() if self.num_classes else None,
        )
        self._set_adapter(update.state.adapter)
        self.set_statistics(update.state.statistics)
        if memory is not None:
            self.memory = memory.after(task, ~held_out if update.report["trained"] else None)
            update.report["memory"] = {"images": len(self.memory), "replayed": len(images) - len(task)}
        return update.report

    def hooks(self) -> BlockHooks:
        """The merged adapter."""
        return self.adapter

    def state_dict(self) -> Tensors:
        """The adapter, the statistics, the operator's state, and the numbers of merged classes and images."""
        merged = self.merged
        return {
            **super().state_dict(),
            **add_prefix(_ADAPTER, self.adapter.state_dict()),
            **add_prefix(_OPERATOR, merged.operator_state),
            **add_prefix(_START, merged.start),
            **add_prefix(_ORIGIN, merged.origin),
            "merged": torch.tensor([merged.classes, merged.samples]),
            **add_prefix(_MEMORY, self.memory.state_dict() if self.memory is not None else {}),
        }

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state."""
        super().load_state_dict(state)
        adapter, operator_state, start, origin = (
            select_prefix(prefix, state) for prefix in (_ADAPTER, _OPERATOR, _START, _ORIGIN)
        )
        classes, samples = state["merged"].tolist()
        self.adapter.load_state_dict(adapter)
        # Tensors in the order of the module, which may differ from that of the file.
        tensors = _cloned(self.adapter.state_dict())
        self.merged = MergedAdapter(tensors, classes, samples, operator_state, start, origin)
        if self.memory is not None:
            self.memory = self.memory.load(select_prefix(_MEMORY, state))

    def _set_adapter(self, merged: MergedAdapter) -> None:
        """Load the weights of a merged adapter."""
        if merged is not self.merged:
            self.adapter.load_state_dict(merged.tensors)
            self.merged = merged


def _cloned(tensors: Tensors) -> Tensors:
    return {name: value.clone() for name, value in tensors.items()}


class MergedAdapterMethod(AdapterMerging):
    """One adapter, merged by any operator: ``onea run adapter --merge ties``."""

    title = "Merged adapter"
    paper = "https://arxiv.org/abs/2603.10237"
    trains = "an adapter per task"
    stores = "one adapter, a prototype per class and the state of the operator"
    in_paper = False
    Options = MergedAdapterOptions
    base_learning_rate = 0.07


@dataclass(frozen=True)
class RunningMeanOptions(MergingOptions):
    """Options of the running mean."""

    def operator(self) -> RunningMean:
        """The unweighted mean."""
        return RunningMean()


class RunningMeanOfAdapters(AdapterMerging):
    """One adapter, the mean of the adapters of all tasks.

    Adapters trained from different random weights have their hidden units in different orders, so the mean of their
    down-projections tends to zero. ``RunningMeanSharedStart`` trains all of them from the same weights.
    """

    title = "Running mean"
    paper = "https://arxiv.org/abs/2203.05482"
    trains = "an adapter per task"
    stores = "one adapter and a prototype per class"
    in_paper = False
    Options = RunningMeanOptions
    base_learning_rate = 0.013
    auto_preset: ClassVar = {"single_class": "skip"}


@dataclass(frozen=True)
class SharedStartOptions(RunningMeanOptions):
    """Options of the running mean with shared initial weights."""

    start: Start = "shared"


class RunningMeanSharedStart(RunningMeanOfAdapters):
    """The mean of the adapters of all tasks, each trained from the same random weights."""

    title = "Running mean, shared start"
    trains = "an adapter per task, all from the same random weights"
    Options = SharedStartOptions
    base_learning_rate = 0.014


@dataclass(frozen=True)
class FirstTaskOptions(RunningMeanOptions):
    """Options of an adapter of the first task. With a single adapter, the operator is not used."""

    single_class: Literal["train", "skip"] = "skip"
    min_share: ZeroToOne = 1.0


class FirstTask(AdapterMerging):
    """One adapter, trained on the first task that has two classes or more."""

    title = "First task"
    paper = "https://arxiv.org/abs/2303.07338"
    trains = "an adapter on the first task"
    stores = "one adapter and a prototype per class"
    in_paper = False
    Options = FirstTaskOptions
    base_learning_rate = 0.039

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The adapter, which does not change after its task."""
        return {f"adapter of {self.merged.classes} classes": self.adapter}


@dataclass(frozen=True)
class RanPACFirstOptions(RandomFeatureOptions, FirstTaskOptions):
    """Options of RanPAC on an adapter of the first task."""


class RanPACFirst(FirstTask):
    """RanPAC as published: ridge regression on random features of a network adapted to the first task."""

    title = "RanPAC (first task)"
    paper = "https://arxiv.org/abs/2307.02251"
    stores = "one adapter and two random-feature matrices (200 MB for 5,000 features)"
    Options = RanPACFirstOptions
    base_learning_rate = 0.03
