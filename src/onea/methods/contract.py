"""What every class-incremental method agrees on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from onea.merging.operator import Tensors
from onea.runtime import Runtime
from onea.tasks import Plan, Task
from onea.vit.frozen import FrozenViT
from onea.vit.heads import class_means
from onea.vit.plug import NOTHING, Plug

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class NoOptions:
    """Of a method that has nothing to set."""


class Method(ABC):
    """Learns tasks one after the other and scores images against every class seen so far, without a task id.

    A method keeps all that it knows in ``state_dict()`` and rebuilds the rest per task, so that a run can stop and
    resume at any task boundary.

    Attributes:
        title: the method's name as papers write it.
        paper: link to its paper.
        trains: what is trained, in a few words.
        stores: what is kept between tasks, in a few words.
        in_paper: whether the One-A paper reports it.
        Options: dataclass of the method's own options.
        published: options that its authors publish, by dataset; ``""`` is for any other dataset.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    trains: ClassVar[str]
    stores: ClassVar[str]
    in_paper: ClassVar[bool] = True
    Options: ClassVar[type] = NoOptions
    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(self, vit: FrozenViT, options: Any, runtime: Runtime, plan: Plan | None = None):
        self.vit, self.options, self.runtime, self.plan = vit, options, runtime, plan

    @abstractmethod
    def learn(self, task: Task) -> dict[str, Any]:
        """Learn a task and return what is worth recording about it, as JSON-able values."""

    @abstractmethod
    def scores(self, images: Tensor) -> Tensor:
        """Scores ``[B, classes seen]`` of a batch of network inputs; the largest is the answer."""

    @abstractmethod
    def state_dict(self) -> Tensors:
        """Everything that must survive between tasks."""

    @abstractmethod
    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a state that this method gave earlier."""

    @staticmethod
    def passes(tasks: int) -> float:
        """Passes through the network per image after so many tasks."""
        return 1

    def features(self, images: Tensor, plug: Plug = NOTHING) -> Tensor:
        """Features of network inputs for inference, ``[B, width]``."""
        with torch.no_grad(), self.runtime.autocast():
            features: Tensor = self.vit(images, plug)
            return features

    def prototypes_of(self, task: Task, plug: Plug = NOTHING) -> Tensor:
        """Mean feature of each class of a task over its un-augmented images, ``[classes of the task, width]``."""
        processes = self.runtime.processes
        features = torch.zeros(len(task), self.vit.width, device=self.runtime.device)
        for number, part in enumerate(torch.arange(len(task)).split(EVALUATION_BATCH)):
            if number % processes.count == processes.rank:
                features[part] = self.features(task.images.plain(task.rows[part]), plug)
        return class_means(processes.sum_of(features), task.labels, task.classes)
