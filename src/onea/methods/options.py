# SPDX-License-Identifier: Apache-2.0
"""Options that methods share, so that the same thing has the same name and meaning everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from onea import schedules
from onea.options import BelowOne, Count, NotNegative, Share, Validated
from onea.training import Optimiser, Recipe, Schedule


@dataclass(frozen=True)
class TrainingOptions(Validated):
    """Options of the training of a task.

    Attributes:
        learning_rate: of the optimiser.
        weight_decay: of the optimiser.
        batch_size: images per step.
        crop_scale: smallest share of an image's area that a random training crop covers.
        epochs: passes over a task's images.
    """

    learning_rate: NotNegative = 0.01
    weight_decay: NotNegative = 5e-4
    batch_size: Count = 48
    crop_scale: Share = 0.05
    epochs: Count = 20

    def recipe(
        self,
        optimiser: Optimiser = "sgd",
        schedule: Schedule = schedules.cosine,
        epochs: int | None = None,
    ) -> Recipe:
        """The recipe of the optimiser."""
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
    """A ``small`` preset: the learning rate for CIFAR-100, that for any other dataset, and options for all of them.

    Rates come from trials with ``vit_small_patch14_112`` on held-out training images, those for other datasets on
    CUB-200 (benchmarks/small-preset-trials.csv).
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
