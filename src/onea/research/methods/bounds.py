# SPDX-License-Identifier: Apache-2.0
"""Bounds of class-incremental learning: joint training from above, sequential fine-tuning from below."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import seeds
from onea.errors import OneaError
from onea.learner.local_head import local_head, new_head, train_with_local_head
from onea.learner.one_a import PUBLISHED
from onea.learner.optimisation import Loss, ParamGroup, train
from onea.learner.options import AdapterOptions
from onea.learner.tasks import Task
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
    trains_on_all_classes = True
    Options = JointOptions
    base_learning_rate = 0.065
    paper_presets: ClassVar = _RECIPES
    options: JointOptions

    def setup(self) -> None:
        """Create the adapter, and a head without classes."""
        self.adapter = self.new_adapters()
        self.head = self._new_head(0)
        self.prototypes = torch.empty(0, self.vit.width, device=self.runtime.device)

    def learn(self, task: Task) -> dict[str, Any]:
        """Train from scratch on all classes seen so far."""
        if task.cumulative_task is None:
            raise OneaError(
                "Method 'joint' trains on the images of all earlier tasks, which are not available here; "
                "use it with 'onea run' on a whole stream, or choose another method."
            )
        # The index seeds the random generators, so that every task has different ones, also after a run is resumed.
        return self.train_from_scratch(dataclasses.replace(task.cumulative_task(), index=task.index))

    def train_from_scratch(self, task: Task) -> dict[str, Any]:
        """Train a new adapter and a new head on a task with images of all classes seen so far."""
        self.adapter = self.new_adapters(task.seed, task.index)
        self.head = local_head(self.vit.width, task, self.options.head, self.options.head_scale)
        recipe = self.recipe(task)
        losses = train_with_local_head(self.vit, self.adapter, self.head, task, recipe, self.runtime)
        if self.options.classifier == "prototypes":
            self.runtime.progress.start_phase("prototypes")
            self.prototypes = self.compute_prototypes(task, self.adapter)
        return {"epochs": recipe.epochs, "losses": losses, "images": len(task)}

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
    state: ClassVar[tuple[str, ...]] = ("adapter", "head")
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
        self.add_classes(task)
        # Old classes are in the softmax but never the label, so their logits decrease: catastrophic forgetting.
        return self.fine_tune(task, self.cross_entropy)

    def add_classes(self, task: Task) -> None:
        """Add rows for the classes of a task to the head; the first task also initialises the adapter."""
        if len(self.head.weight) == 0:
            self.adapter = self.new_adapters(task.seed, task.index)
        self.head.grow(len(task.classes), seeds.generator(task.seed, task.index, "head"))

    def fine_tune(self, task: Task, loss: Loss) -> dict[str, Any]:
        """Continue to train adapter and head; returns epochs and losses for the report."""
        trained = [ParamGroup(self.adapter), ParamGroup(self.head)]
        recipe = self.recipe(task)
        return {"epochs": recipe.epochs, "losses": train(trained, loss, task, recipe, self.runtime)}

    def logits(self, images: Tensor) -> Tensor:
        """Logits ``[B, classes seen]`` of a batch in training, in float32."""
        logits: Tensor = self.head(self.vit(images, self.adapter))
        return logits.float()

    def cross_entropy(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over all classes seen so far."""
        return F.cross_entropy(self.logits(images), labels)

    def scores(self, images: Tensor) -> Tensor:
        """Logits of the head."""
        with torch.no_grad():
            logits: Tensor = self.head(self.features(images, self.adapter))
            return logits
