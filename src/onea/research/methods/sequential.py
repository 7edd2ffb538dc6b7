# SPDX-License-Identifier: Apache-2.0
"""The lower bound: one adapter and one head, fine-tuned task after task with nothing to keep them from forgetting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from onea import seeds
from onea.learner.local_head import new_adapters
from onea.learner.one_a import PUBLISHED
from onea.learner.options import AdapterOptions
from onea.learner.tasks import StreamPlan, Task
from onea.learner.training import Trained, train
from onea.research.methods.contract import Method
from onea.runtime import Runtime
from onea.tensors import Tensors, part_of, prefixed
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT
from onea.vit.heads import GrowingHead

_ADAPTER, _HEAD = "adapter.", "head."


@dataclass(frozen=True)
class SequentialOptions(AdapterOptions):
    """Options of sequential fine-tuning.

    Attributes:
        head: without effect; the one head that is kept is linear.
        head_scale: without effect.
    """


class Sequential(Method):
    """Plain fine-tuning: cross-entropy over all classes seen, on the images of the newest alone."""

    title: ClassVar[str] = "Sequential (lower bound)"
    paper: ClassVar[str] = ""
    trains: ClassVar[str] = "one adapter and a linear head, on and on"
    stores: ClassVar[str] = "one adapter, a linear head"
    in_paper: ClassVar[bool] = False
    Options: ClassVar[type] = SequentialOptions
    base_learning_rate: ClassVar[float | None] = 0.00067
    # A bound has no authors: One-A's hyper-parameters, so that the two differ only in how they guard what is known.
    paper_presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PUBLISHED
    options: SequentialOptions

    def __init__(self, vit: FrozenViT, options: SequentialOptions, runtime: Runtime, plan: StreamPlan | None = None):
        super().__init__(vit, options, runtime, plan)
        self.adapters: Adapters = new_adapters(vit, options, torch.Generator()).eval().to(runtime.device)
        self.head = GrowingHead(vit.width, "uniform").to(runtime.device)

    def learn(self, task: Task) -> dict[str, Any]:
        """Add rows to the head and train everything on from where it stands."""
        if len(self.head.weight) == 0:
            generator = seeds.generator(task.seed, task.index, "adapter")
            self.adapters = new_adapters(self.vit, self.options, generator).to(self.runtime.device)
        self.head.grow(len(task.classes), seeds.generator(task.seed, task.index, "head"))

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            # Old classes are in the softmax and never right, which pushes them down: the forgetting to measure.
            return F.cross_entropy(self.head(self.vit(images, self.adapters)).float(), labels)

        trained = [Trained(self.adapters), Trained(self.head)]
        recipe = self.options.recipe(epochs=self.epochs_for(task))
        return {"epochs": recipe.epochs, "losses": train(trained, loss, task, recipe, self.runtime)}

    def scores(self, images: Tensor) -> Tensor:
        """Logits of the head."""
        with torch.no_grad():
            logits: Tensor = self.head(self.features(images, self.adapters))
            return logits

    def state_dict(self) -> Tensors:
        """The adapter and the head as they stand."""
        return {
            **prefixed(_ADAPTER, self.adapters.state_dict()),
            **prefixed(_HEAD, self.head.state_dict()),
        }

    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a saved state."""
        kept = part_of(_ADAPTER, state)
        self.adapters.load_state_dict(kept)
        self.head.load_rows(state[_HEAD + "weight"], state[_HEAD + "bias"])
