# SPDX-License-Identifier: Apache-2.0
"""Options that methods share, so that the same thing has the same name and meaning everywhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from onea import schedules
from onea.options import BelowOne, Count, NotNegative, Range, Share, Validated
from onea.schedules import task_epochs
from onea.tasks import StreamPlan
from onea.training import Optimiser, Recipe, Schedule

_UNPLANNED_CLASSES = 10.0  # classes of a middling task when the stream's length is not known


@dataclass(frozen=True)
class TrainingOptions(Validated):
    """Options of the training of a task.

    Attributes:
        learning_rate: of the optimiser.
        weight_decay: of the optimiser.
        batch_size: images per step.
        crop_scale: smallest share of an image's area that a random training crop covers.
        epochs: passes over a task's images; over those of a task of average size where ``epoch_growth`` is not 0.
        min_epochs: the fewest for any task then; 0 is no bound.
        max_epochs: the most for any task then; 0 is no bound.
        epoch_growth: exponent with which epochs grow with the number of classes of a task, relative to the average; 0
            trains every task equally long.
    """

    learning_rate: NotNegative = 0.01
    weight_decay: NotNegative = 5e-4
    batch_size: Count = 48
    crop_scale: Share = 0.05
    epochs: Count = 20
    min_epochs: Annotated[int, Range(ge=0)] = 0
    max_epochs: Annotated[int, Range(ge=0)] = 0
    epoch_growth: float = 0.0

    def epochs_for(self, classes: int, plan: StreamPlan | None) -> int:
        """Epochs for a task of this many classes."""
        if not self.epoch_growth:
            return self.epochs
        average = plan.classes / plan.tasks if plan else _UNPLANNED_CLASSES
        most = self.max_epochs or sys.maxsize
        return task_epochs(classes, self.epochs, average, max(self.min_epochs, 1), most, self.epoch_growth)

    def recipe(
        self,
        optimiser: Optimiser = "sgd",
        schedule: Schedule = schedules.cosine,
        epochs: int | None = None,
    ) -> Recipe:
        """The recipe of the optimiser; ``epochs`` are those of the task at hand, where they differ from the average."""
        return Recipe(
            self.learning_rate,
            self.weight_decay,
            self.batch_size,
            epochs or self.epochs,
            self.crop_scale,
            optimiser,
            schedule,
        )


def tuned(cifar100: float, others: float, **everywhere: Any) -> dict[str, dict[str, Any]]:
    """The ``small`` presets: the learning rate for CIFAR-100, that for any other dataset, and options for all of them.

    Rates come from trials with ``vit_small_patch14_112`` on held-out training images, those for other datasets on
    CUB-200 (benchmarks/small-preset-trials.csv). Nothing takes them unless they are asked for by name.
    """
    return {"cifar100": {"learning_rate": cifar100, **everywhere}, "": {"learning_rate": others, **everywhere}}


@dataclass(frozen=True)
class AdapterOptions(TrainingOptions):
    """Options of an adapter and of its training with a local head.

    Attributes:
        rank: width of the adapter's bottleneck.
        scale: factor on the adapter's output.
        dropout: inside the adapter, while training.
        head: ``linear`` or ``cosine`` local head, discarded after the task.
        head_scale: initial scale of a cosine head.
    """

    rank: Count = 64
    scale: float = 0.1
    dropout: BelowOne = 0.1
    head: Literal["linear", "cosine"] = "cosine"
    head_scale: float = 1.0
