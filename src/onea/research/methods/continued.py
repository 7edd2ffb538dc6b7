# SPDX-License-Identifier: Apache-2.0
"""Methods with one module that every task trains further, and statistics of old classes that follow it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from onea.classifiers.drift import DriftCompensation
from onea.learner.merged_adapter import MergedAdapter
from onea.learner.options import CarryOptions, ClassifierOptions, TrainingOptions
from onea.learner.tasks import Task
from onea.learner.update import LearnerState, NewImages, UpdateResult, learn_update
from onea.research.methods.classification import FeatureClassification
from onea.tensors import Tensors, add_prefix, select_prefix
from onea.vit.hooks import BlockHooks

SingleClass = Literal["skip", "train"]
_MODULE = "module."


@dataclass(frozen=True)
class ContinuedOptions(CarryOptions, ClassifierOptions, TrainingOptions):
    """Options of a module that every task trains further, with any classifier on its features.

    Attributes:
        single_class: how to handle a task of one class, whose loss is constant: ``skip`` the training, which leaves all
            statistics as they are, or ``train`` as published: weight decay changes the weights, and the map is fitted
            to that.
    """

    single_class: SingleClass = "skip"


class ContinuedModule(FeatureClassification):
    """One module that every task trains further, and statistics of old classes that follow it.

    A subclass implements ``new_module`` and ``train_module``.

    Attributes:
        module: the module, frozen between trainings.
    """

    options: Any

    def setup(self) -> None:
        """Create the module, and statistics without classes."""
        super().setup()
        self.module = self.new_module().requires_grad_(False).eval().to(self.runtime.device)

    @abstractmethod
    def new_module(self) -> nn.Module:
        """The initial module, which also implements ``BlockHooks``."""

    @abstractmethod
    def train_module(self, task: Task) -> dict[str, Any]:
        """Train the module on a task and return a report with its epochs and losses."""

    def compensation(self) -> DriftCompensation | None:
        """How the statistics of old classes follow the module."""
        compensation: DriftCompensation | None = self.options.compensation()
        return compensation

    def should_train(self, task: Task) -> bool:
        """Whether to train on a task; see ``single_class``."""
        return len(task.classes) > 1 or self.options.single_class == "train"

    @classmethod
    def epochs_per_task(cls, options: Any, sizes: Sequence[int]) -> list[int]:
        """None for tasks of one class, unless they are trained."""
        epochs = super().epochs_per_task(options, sizes)
        if options.single_class == "train":
            return epochs
        return [count * (classes > 1) for count, classes in zip(epochs, sizes, strict=True)]

    def hooks(self) -> BlockHooks:
        """The module."""
        assert isinstance(self.module, BlockHooks)
        return self.module

    def learn(self, task: Task) -> dict[str, Any]:
        """Train the module, move the statistics of old classes and add those of new ones."""
        return self.update(task).report

    def update(self, task: Task) -> UpdateResult:
        """``learn``, with the features of the images as well."""

        def train_module(_: MergedAdapter) -> tuple[MergedAdapter, dict[str, Any]]:
            self.module.requires_grad_(True)
            report = self.train_module(task)
            self.module.requires_grad_(False)
            self.runtime.progress.start_phase("prototypes")
            return MergedAdapter({}), report

        name, classifier = next(iter(self.classifiers.items()))
        # The module changes in place: the features before are computed before it is trained.
        update = learn_update(
            LearnerState(MergedAdapter({}), self.statistics),
            NewImages(
                task.labels,
                lambda view, _: self.task_features(task, self.hooks(), view),
                torch.zeros(len(task), dtype=torch.bool),
                *self.num_views(task),
            ),
            train_module if self.should_train(task) else None,
            kind=self.kinds[name],
            classifier=classifier,
            compensation=self.compensation() if self.num_classes else None,
        )
        self.set_statistics(update.state.statistics)
        return update

    def state_dict(self) -> Tensors:
        """The module and the statistics."""
        return {**super().state_dict(), **add_prefix(_MODULE, self.module.state_dict())}

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state."""
        super().load_state_dict(state)
        self.module.load_state_dict(select_prefix(_MODULE, state))
