# SPDX-License-Identifier: Apache-2.0
"""The contract of class-incremental methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from onea.errors import OneaError
from onea.learner.tasks import StreamPlan, Task
from onea.runtime import Runtime
from onea.tensors import Tensors, to_float64
from onea.vit.batching import EVALUATION_BATCH, pad_rows
from onea.vit.frozen import FrozenViT
from onea.vit.heads import class_sums
from onea.vit.hooks import NO_HOOKS, BlockHooks


@dataclass(frozen=True)
class NoOptions:
    """The options of a method that has none."""


class Method(ABC):
    """Learns tasks one after the other and scores images against every class seen so far, without a task id.

    A method keeps all that it knows in ``state_dict()`` and rebuilds the rest per task, so that a run can stop and
    resume at any task boundary.

    >>> class Chance(Method):
    ...     title, paper, trains, stores = "Chance", "", "nothing", "a number"
    ...     seen = 0
    ...
    ...     def learn(self, task):
    ...         self.seen = task.classes.stop
    ...         return {}
    ...
    ...     def scores(self, images):
    ...         return torch.rand(len(images), self.seen)
    ...
    ...     def state_dict(self):
    ...         return {"seen": torch.tensor(self.seen)}
    ...
    ...     def load_state_dict(self, state):
    ...         self.seen = int(state["seen"])
    >>> Chance.passes(Chance.Options(), tasks=10)
    1

    Attributes:
        title: the method's name as papers write it.
        paper: link to its paper.
        trains: what is trained, in a few words.
        stores: what is kept between tasks, in a few words.
        in_paper: whether the One-A paper reports it.
        trains_network: whether something takes part in the network's passes; a method without such fits any network.
        Options: dataclass of the method's own options.
        base_learning_rate: learning rate of the preset ``auto``, for any dataset; None is that of the options.
        auto_preset: further options of the preset ``auto``, where they differ from those of other methods.
        paper_presets: options that the authors published, by dataset: the presets ``paper/NAME``. The key ``""`` is for
            any other dataset.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    trains: ClassVar[str]
    stores: ClassVar[str]
    in_paper: ClassVar[bool] = True
    trains_network: ClassVar[bool] = True
    Options: ClassVar[type] = NoOptions
    base_learning_rate: ClassVar[float | None] = None
    auto_preset: ClassVar[Mapping[str, Any]] = {}
    paper_presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(self, vit: FrozenViT, options: Any, runtime: Runtime, plan: StreamPlan | None = None):
        self.check_fits(vit.name, vit.frozen_only)
        self.vit, self.options, self.runtime, self.plan = vit, options, runtime, plan

    @classmethod
    def check_fits(cls, backbone: str, frozen_only: str) -> None:
        """Refuse a network that nothing can take part in, for the reason that is given."""
        if frozen_only and cls.trains_network:
            from onea.vit.backbones import nearest_with_hooks

            raise OneaError(
                f"{cls.title} trains {cls.trains}, which backbone '{backbone}' has no place for: {frozen_only}; choose "
                f"simplecil, slda or ranpac, or a backbone such as {nearest_with_hooks(backbone)}."
            )

    @abstractmethod
    def learn(self, task: Task) -> dict[str, Any]:
        """Learn a task and return what is worth recording about it, as JSON-able values."""

    @abstractmethod
    def state_dict(self) -> Tensors:
        """Everything that must survive between tasks."""

    @abstractmethod
    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a state that this method gave earlier."""

    def answering_state(self) -> Tensors:
        """The part of the state that answers and later tasks need; what a run only compares with is left out."""
        return self.state_dict()

    def scores(self, images: Tensor) -> Tensor:
        """Scores ``[B, classes seen]`` of a batch of network inputs; the largest is the answer.

        By default from the features of the cacheable modules; a method without any overrides this.
        """
        return self.scores_from_features(
            {name: self.features(images, hooks) for name, hooks in self.cacheable_modules().items()}
        )

    def cacheable_modules(self) -> Mapping[str, BlockHooks]:
        """Modules whose features alone decide the scores, by name; frozen, so that their features can be cached.

        A name stands for the same weights for ever: a run passes every test image through each module only once.
        A method with modules that change from task to task names none.
        """
        return {}

    def scores_from_features(self, features: Mapping[str, Tensor]) -> Tensor:
        """Scores from the features ``[B, width]`` of every cacheable module."""
        raise OneaError(
            f"{type(self).__name__} cannot answer; define scores, or cacheable_modules and scores_from_features."
        )

    def batch_sizes(self) -> set[int]:
        """The sizes that training steps may have, for a compiled network."""
        return {getattr(self.options, "batch_size", EVALUATION_BATCH)}

    @classmethod
    def passes(cls, options: Any, tasks: int) -> float:
        """The most passes through the network that an image takes after so many tasks, with these options."""
        return 1

    @classmethod
    def adapters_used(cls, options: Any, tasks: int) -> int:
        """The most adapters (or sets of updates or prompts) that answers draw on after so many tasks."""
        return 1

    @classmethod
    def epochs(cls, options: Any, sizes: Sequence[int]) -> list[int]:
        """Epochs that each task of a stream is trained for; ``sizes`` are the classes of its tasks."""
        if not hasattr(options, "epochs_for"):  # those of a method of somebody's own, or of none that trains
            return [getattr(options, "epochs", 0)] * len(sizes)
        plan = StreamPlan(sum(sizes), len(sizes))
        return [options.epochs_for(classes, plan) for classes in sizes]

    def epochs_for(self, task: Task) -> int:
        """Epochs that a task is trained for."""
        return int(self.options.epochs_for(len(task.classes), self.plan))

    def features(self, images: Tensor, hooks: BlockHooks = NO_HOOKS) -> Tensor:
        """Features of network inputs for inference, ``[B, width]``."""
        with torch.no_grad(), self.runtime.autocast():
            features: Tensor = self.vit(images, hooks)
            return features

    def prototypes_of(self, task: Task, hooks: BlockHooks = NO_HOOKS) -> Tensor:
        """Mean feature of each class of a task over its un-augmented images, ``[classes of the task, width]``."""
        return self.prototypes_under(task, [hooks])[0]

    def prototypes_under(self, task: Task, all_hooks: Sequence[BlockHooks]) -> Tensor:
        """Mean features under several hooks, ``[hooks, classes of the task, width]``; every image is loaded once."""
        processes, device = self.runtime.processes, self.runtime.device
        sums = to_float64(torch.zeros(len(all_hooks), len(task.classes), self.vit.width, device=device))
        for number, part in enumerate(torch.arange(len(task)).split(EVALUATION_BATCH)):
            if number % processes.count == processes.rank:
                images, labels = task.images.plain(pad_rows(task.rows[part])), task.labels[part]
                for total, hooks in zip(sums, all_hooks, strict=True):
                    total += class_sums(self.features(images, hooks)[: len(part)], labels, task.classes)
        counts = torch.bincount(task.labels - task.classes.start, minlength=len(task.classes)).to(sums.device)
        return (processes.sum_of(sums) / counts[:, None]).float().to(device)
