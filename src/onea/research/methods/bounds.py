# SPDX-License-Identifier: Apache-2.0
"""Bounds of class-incremental learning: joint training from above, sequential fine-tuning from below."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import seeds
from onea.errors import OneaError
from onea.learner.local_head import local_head, new_head, train_with_local_head
from onea.learner.one_a import PUBLISHED
from onea.learner.optimisation import ParamGroup, train
from onea.learner.options import AdapterOptions
from onea.learner.tasks import StreamPlan, Task
from onea.research.methods.contract import Method
from onea.tensors import Tensors
from onea.vit.heads import GrowingHead, cosine_scores

# Joint training has no paper: One-A's hyper-parameters and its linear head, so that only the training data differ.
_RECIPES: dict[str, dict[str, Any]] = {data: recipe | {"head": "linear"} for data, recipe in PUBLISHED.items()}


@dataclass(frozen=True)
class JointOptions(AdapterOptions):
    """Options of joint training.

    Attributes:
        head: ``linear`` or ``cosine`` head over all classes seen.
        classifier: classify by the ``head``, or by ``prototypes`` as the incremental methods do.
    """

    classifier: Literal["head", "prototypes"] = "head"


class Joint(Method):
    """Upper bound: train a new adapter and head on all images of all classes seen so far, in every task."""

    title = "Joint (upper bound)"
    paper = "https://arxiv.org/abs/2603.10237"
    trains = "an adapter on all images so far"
    stores = "every image, one adapter and a head over all classes"
    state = ("adapter", "head", "prototypes")
    in_paper = False
    Options = JointOptions
    base_learning_rate = 0.065
    paper_presets: ClassVar = _RECIPES
    options: JointOptions

    def setup(self) -> None:
        """Create the adapter, and a head without classes."""
        self.adapter = self.new_adapters()
        self.head = self._new_head(0)
        self.prototypes = torch.empty(0, self.vit.width, device=self.runtime.device)

    @classmethod
    def epochs_per_task(cls, options: JointOptions, sizes: Sequence[int]) -> list[int]:
        """The epochs of a task with all classes seen so far."""
        plan = StreamPlan(sum(sizes), len(sizes))
        return [options.epochs_for(classes, plan) for classes in accumulate(sizes)]

    def learn(self, task: Task) -> dict[str, Any]:
        """Train from scratch on all classes seen so far."""
        if task.cumulative_task is None:
            raise OneaError(
                "Method 'joint' trains on the images of all earlier tasks, which are not available here; "
                "use it with 'onea run' on a whole stream, or choose another method."
            )
        # The index seeds the random generators, so that every task has different ones, also after a run is resumed.
        cumulative = dataclasses.replace(task.cumulative_task(), index=task.index)
        self.adapter = self.new_adapters(task.seed, task.index)
        self.head = local_head(self.vit.width, cumulative, self.options.head, self.options.head_scale)
        recipe = self.recipe(cumulative)
        losses = train_with_local_head(self.vit, self.adapter, self.head, cumulative, recipe, self.runtime)
        if self.options.classifier == "prototypes":
            self.runtime.progress.start_phase("prototypes")
            self.prototypes = self.compute_prototypes(cumulative, self.adapter)
        return {"epochs": recipe.epochs, "losses": losses, "images": len(cumulative)}

    def scores(self, images: Tensor) -> Tensor:
        """Logits of the head, or cosines of the adapted features to the prototypes."""
        features = self.features(images, self.adapter)
        if self.options.classifier == "prototypes":
            return cosine_scores(features, self.prototypes)
        with torch.no_grad():
            logits: Tensor = self.head(features)
            return logits

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state, whose head has any number of classes."""
        self.head = self._new_head(len(state["head.weight"]))
        super().load_state_dict(state)

    def _new_head(self, classes: int) -> nn.Module:
        options = self.options
        head = new_head(self.vit.width, classes, options.head, options.head_scale, torch.Generator())
        return head.eval().to(self.runtime.device)


@dataclass(frozen=True)
class SequentialOptions(AdapterOptions):
    """Options of sequential fine-tuning.

    Attributes:
        head: ignored; the head is linear.
        head_scale: ignored.
    """


class Sequential(Method):
    """Lower bound: fine-tune one adapter and one linear head on each task, without protection against forgetting.

    The loss is cross-entropy over all classes seen so far, on the images of the newest task.
    """

    title = "Sequential (lower bound)"
    paper = ""
    trains = "one adapter and a linear head, in every task"
    stores = "one adapter and a linear head"
    state = ("adapter", "head")
    in_paper = False
    Options = SequentialOptions
    base_learning_rate = 0.00061
    # Sequential fine-tuning has no paper: One-A's hyper-parameters.
    paper_presets: ClassVar = PUBLISHED
    options: SequentialOptions

    def setup(self) -> None:
        """Create the adapter, and a head without classes."""
        self.adapter = self.new_adapters()
        self.head = GrowingHead(self.vit.width, "uniform").to(self.runtime.device)

    def learn(self, task: Task) -> dict[str, Any]:
        """Add rows to the head and continue to train adapter and head."""
        if len(self.head.weight) == 0:
            self.adapter = self.new_adapters(task.seed, task.index)
        self.head.grow(len(task.classes), seeds.generator(task.seed, task.index, "head"))

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            # Old classes are in the softmax but never the label, so their logits decrease: catastrophic forgetting.
            return F.cross_entropy(self.head(self.vit(images, self.adapter)).float(), labels)

        trained = [ParamGroup(self.adapter), ParamGroup(self.head)]
        recipe = self.recipe(task)
        return {"epochs": recipe.epochs, "losses": train(trained, loss, task, recipe, self.runtime)}

    def scores(self, images: Tensor) -> Tensor:
        """Logits of the head."""
        with torch.no_grad():
            logits: Tensor = self.head(self.features(images, self.adapter))
            return logits
