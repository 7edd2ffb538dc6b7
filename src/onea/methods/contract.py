# SPDX-License-Identifier: Apache-2.0
"""What every class-incremental method agrees on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from onea.errors import OneaError
from onea.runtime import Runtime
from onea.tasks import Plan, Task
from onea.tensors import Tensors, to_float64
from onea.vit.frozen import FrozenViT
from onea.vit.heads import class_sums
from onea.vit.plug import NOTHING, Plug

EVALUATION_BATCH = 256
GRID = 16  # batches over whole sets of images are filled up to a multiple of this


def filled_up(rows: Tensor) -> Tensor:
    """Rows filled up by the last one, so that a run meets few batch sizes; cut what comes of them again.

    A CPU keeps code and scratch memory for every batch size it has met, some 10 MB each in bf16, and a last batch that
    grows with the classes seen would meet a new one after every task.
    """
    return torch.cat([rows, rows[-1:].expand(-len(rows) % GRID)])


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
        small: options for small backbones, likewise; on top of those that all methods share (see ``presets``).
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    trains: ClassVar[str]
    stores: ClassVar[str]
    in_paper: ClassVar[bool] = True
    Options: ClassVar[type] = NoOptions
    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    small: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(self, vit: FrozenViT, options: Any, runtime: Runtime, plan: Plan | None = None):
        self.vit, self.options, self.runtime, self.plan = vit, options, runtime, plan

    @abstractmethod
    def learn(self, task: Task) -> dict[str, Any]:
        """Learn a task and return what is worth recording about it, as JSON-able values."""

    @abstractmethod
    def state_dict(self) -> Tensors:
        """Everything that must survive between tasks."""

    @abstractmethod
    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a state that this method gave earlier."""

    def scores(self, images: Tensor) -> Tensor:
        """Scores ``[B, classes seen]`` of a batch of network inputs; the largest is the answer.

        By default from the features of the frozen parts; a method that has none says how itself.
        """
        return self.scores_from({name: self.features(images, plug) for name, plug in self.parts().items()})

    def parts(self) -> Mapping[str, Plug]:
        """What the network is run with where its features alone decide the scores, and will not change any more.

        A name means the same weights for ever, so that a run can pass every image through every part only once. What
        changes from task to task is no such part; a method that has some of it names none.
        """
        return {}

    def scores_from(self, features: Mapping[str, Tensor]) -> Tensor:
        """Scores from the features ``[B, width]`` of every part."""
        raise OneaError(f"{type(self).__name__} cannot answer; let it define scores, or parts and scores_from.")

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
        return [getattr(options, "epochs", 0)] * len(sizes)

    def features(self, images: Tensor, plug: Plug = NOTHING) -> Tensor:
        """Features of network inputs for inference, ``[B, width]``."""
        with torch.no_grad(), self.runtime.autocast():
            features: Tensor = self.vit(images, plug)
            return features

    def prototypes_of(self, task: Task, plug: Plug = NOTHING) -> Tensor:
        """Mean feature of each class of a task over its un-augmented images, ``[classes of the task, width]``."""
        return self.prototypes_under(task, [plug])[0]

    def prototypes_under(self, task: Task, plugs: Sequence[Plug]) -> Tensor:
        """Mean features under several plugs, ``[plugs, classes of the task, width]``; every image is loaded once."""
        processes, device = self.runtime.processes, self.runtime.device
        sums = to_float64(torch.zeros(len(plugs), len(task.classes), self.vit.width, device=device))
        for number, part in enumerate(torch.arange(len(task)).split(EVALUATION_BATCH)):
            if number % processes.count == processes.rank:
                images, labels = task.images.plain(filled_up(task.rows[part])), task.labels[part]
                for total, plug in zip(sums, plugs, strict=True):
                    total += class_sums(self.features(images, plug)[: len(part)], labels, task.classes)
        counts = torch.bincount(task.labels - task.classes.start, minlength=len(task.classes)).to(sums.device)
        return (processes.sum_of(sums) / counts[:, None]).float().to(device)
