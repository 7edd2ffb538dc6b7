# SPDX-License-Identifier: Apache-2.0
"""Methods that keep images of each class and train on them again: experience replay, GDumb and iCaRL.

The papers share a memory of constant size among all classes. Here it is a number of images of each class, as for One-A+
with ``memory``, so that it does not depend on the number of classes to come.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.learner.options import TrainingOptions
from onea.learner.tasks import Task
from onea.research.methods.bounds import Joint, JointOptions, Sequential, SequentialOptions
from onea.research.methods.contract import Method
from onea.research.methods.image_memory import KeptImages, sample_positions
from onea.schema import Count
from onea.tensors import Tensors, add_prefix, select_prefix, to_float64
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.heads import class_means, cosine_scores

_MEMORY = "memory."


@dataclass(frozen=True)
class RehearsalOptions(TrainingOptions):
    """Options of a method that keeps images.

    Attributes:
        memory: number of images of each class that are kept and take part in later trainings.
    """

    memory: Count = 10


class Rehearsal(Method):
    """A method that keeps images of each class and trains on images of all classes in every task."""

    in_paper = False
    trains_on_all_classes = True
    options: RehearsalOptions

    def setup(self) -> None:
        """Start without images."""
        super().setup()
        self.memory = KeptImages()

    def keep(self, task: Task, positions: Tensor) -> dict[str, Any]:
        """Keep the images at these positions of a task; returns the numbers of images for the report."""
        replayed = len(self.memory)
        self.memory = self.memory.add(task, positions)
        return {"memory": {"images": len(self.memory), "replayed": replayed}}

    def state_dict(self) -> Tensors:
        """The state of the method, and the rows and labels of the kept images."""
        return super().state_dict() | add_prefix(_MEMORY, self.memory.state_dict())

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state."""
        super().load_state_dict(state)
        self.memory = self.memory.load(select_prefix(_MEMORY, state))


@dataclass(frozen=True)
class ReplayOptions(RehearsalOptions, SequentialOptions):
    """Options of fine-tuning with kept images."""


class Replay(Rehearsal, Sequential):
    """Fine-tune one adapter and one linear head on the images of each task and random images of earlier classes.

    The paper makes a single pass and draws as many kept images as new ones for each batch. Here an epoch has each image
    once, and a task several epochs, as with the other methods.
    """

    title = "Experience replay"
    paper = "https://arxiv.org/abs/1902.10486"
    stores = "one adapter, a linear head and images of each class"
    Options = ReplayOptions
    base_learning_rate = 0.02
    options: ReplayOptions

    def learn(self, task: Task) -> dict[str, Any]:
        """Add rows to the head, continue to train adapter and head, and keep images of the new classes."""
        self.add_classes(task)
        report = self.fine_tune(self.memory.extend(task), self.cross_entropy)
        return report | self.keep(task, sample_positions(task, self.options.memory))


@dataclass(frozen=True)
class GDumbOptions(RehearsalOptions, JointOptions):
    """Options of GDumb."""


class GDumb(Rehearsal, Joint):
    """Greedy sampler and dumb learner: in every task, train a new adapter and head on the kept images alone.

    As many images of each class are kept as of any other. Those of a new class are kept before the training, which sees
    no other images of that class.
    """

    title = "GDumb"
    paper = "https://doi.org/10.1007/978-3-030-58536-5_31"
    trains = "a new adapter and head on the kept images, in every task"
    stores = "one adapter, a head over all classes and images of each class"
    Options = GDumbOptions
    base_learning_rate = 0.065
    options: GDumbOptions

    def learn(self, task: Task) -> dict[str, Any]:
        """Keep images of the new classes and train from scratch on all kept images."""
        kept = self.keep(task, sample_positions(task, self.options.memory))
        return self.train_from_scratch(self.memory.as_task(task)) | kept


class ICaRL(Rehearsal, Sequential):
    """Incremental classifier and representation learning: distillation, herding and the nearest mean of exemplars.

    Each class has a sigmoid output. Its target is 0 or 1 for a new class, and the output of the network before the task
    for an old class. The outputs only train the features. Answers are by the cosine to the mean of a class's exemplars,
    which are the kept images.
    """

    title = "iCaRL"
    paper = "https://arxiv.org/abs/1611.07725"
    stores = "one adapter, a linear head, and a mean and images of each class"
    state = (*Sequential.state, "means")
    Options = ReplayOptions
    base_learning_rate = 0.02
    options: ReplayOptions

    def setup(self) -> None:
        """Create the adapter, and a head and means without classes."""
        super().setup()
        self.means = torch.empty(0, self.vit.width, device=self.runtime.device)

    def learn(self, task: Task) -> dict[str, Any]:
        """Train with distillation, choose exemplars of the new classes, and compute the means of all classes again."""
        loss = partial(self.distillation_loss, self.frozen_outputs())
        self.add_classes(task)
        report = self.fine_tune(self.memory.extend(task), loss)
        self.runtime.progress.start_phase("exemplars")
        report |= self.keep(task, self._choose_exemplars(task))
        exemplars = self.memory.as_task(task)
        self.means = class_means(self._unit_features(exemplars), exemplars.labels, exemplars.classes)
        return report

    def frozen_outputs(self) -> Callable[[Tensor], Tensor]:
        """A function that computes the present network's outputs ``[B, classes seen]``, also after further training."""
        adapter, head = copy.deepcopy(self.adapter), copy.deepcopy(self.head)

        def outputs(images: Tensor) -> Tensor:
            if not len(head.weight):  # the first task
                return torch.empty(len(images), 0, device=images.device)
            with torch.no_grad():
                logits: Tensor = head(self.features(images, adapter))
                return logits.float().sigmoid()

        return outputs

    def distillation_loss(self, old_outputs: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> Tensor:
        """Binary cross-entropy, summed over the classes and averaged over the images."""
        logits = self.logits(images)
        targets = distillation_targets(labels, old_outputs(images), logits.shape[1])
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(logits)

    def scores(self, images: Tensor) -> Tensor:
        """Cosine of the features to the mean of each class's exemplars."""
        return cosine_scores(self.features(images, self.adapter), self.means)

    def _choose_exemplars(self, task: Task) -> Tensor:
        """Positions of the exemplars of each class of a task."""
        features = self._unit_features(task)
        positions = []
        for label in task.classes:
            of_class = (task.labels == label).nonzero()[:, 0]
            positions.append(of_class[herd(features[of_class.to(features.device)], self.options.memory)])
        return torch.cat(positions)

    def _unit_features(self, task: Task) -> Tensor:
        """Features of unit length of a task's whole images, ``[N, width]`` in float32."""
        batches = task.whole_image_batches(EVALUATION_BATCH)
        features = torch.cat([self.features(images, self.adapter).float() for images, _ in batches])
        return F.normalize(features, dim=1)


def distillation_targets(labels: Tensor, old_outputs: Tensor, classes: int) -> Tensor:
    """Targets of the outputs of all classes, ``[B, classes]``.

    Those of the old classes are the old network's outputs ``[B, old classes]``, also for images of old classes.

    >>> distillation_targets(torch.tensor([0, 2]), torch.tensor([[0.9, 0.2], [0.3, 0.1]]), 4)
    tensor([[0.9000, 0.2000, 0.0000, 0.0000],
            [0.3000, 0.1000, 1.0000, 0.0000]])
    """
    return torch.cat([old_outputs, F.one_hot(labels, classes)[:, old_outputs.shape[1] :].to(old_outputs)], 1)


def herd(features: Tensor, count: int) -> Tensor:
    """Positions of at most ``count`` images of a class, in the order in which iCaRL chooses them (its algorithm 4).

    Each next image moves the mean of those chosen as close as possible to the mean of all. As in the paper, means are
    scaled to unit length, as the features ``[N, width]`` are, so the closest mean is that with the largest cosine.

    >>> herd(torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]]), 2)
    tensor([1, 0])
    """
    exact = to_float64(features).cpu()
    mean, chosen_sum = exact.mean(0), torch.zeros(exact.shape[1], dtype=exact.dtype)
    is_free, chosen = torch.ones(len(exact), dtype=torch.bool), []
    for _ in range(min(count, len(exact))):
        cosines = F.normalize(chosen_sum + exact, dim=1) @ mean
        chosen.append(int(cosines.where(is_free, -torch.inf).argmax()))
        is_free[chosen[-1]] = False
        chosen_sum += exact[chosen[-1]]
    return torch.tensor(chosen)
