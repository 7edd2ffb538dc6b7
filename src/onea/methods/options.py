"""Options that methods share, so that the same thing has the same name and meaning everywhere."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from onea import schedules
from onea.errors import OneaError
from onea.training import Optimiser, Recipe, Schedule


@dataclass(frozen=True)
class TrainingOptions:
    """How a task is trained.

    Attributes:
        learning_rate: of the optimiser.
        weight_decay: of the optimiser.
        batch_size: images per step.
        crop_scale: smallest share of an image's area that a random training crop covers.
        epochs: passes over a task's images.
    """

    learning_rate: float = 0.01
    weight_decay: float = 5e-4
    batch_size: int = 48
    crop_scale: float = 0.05
    epochs: int = 20

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise OneaError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        rates = [item.name for item in dataclasses.fields(self) if item.name.endswith("_rate")]
        for name in (*rates, "weight_decay"):
            if getattr(self, name) < 0:
                raise OneaError(f"{name} is {getattr(self, name)}; it must not be negative.")
        if not 0 < self.crop_scale <= 1:
            raise OneaError(f"crop_scale is {self.crop_scale}; it must lie in (0, 1].")

    def recipe(
        self,
        optimiser: Optimiser = "sgd",
        schedule: Schedule = schedules.cosine,
        epochs: int | None = None,
    ) -> Recipe:
        """How to optimise by these options."""
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
    """How an adapter is built and trained with a local head.

    Attributes:
        rank: width of the adapter's bottleneck.
        scale: factor on the adapter's output.
        dropout: inside the adapter, while training.
        head: ``linear`` or ``cosine`` local head, discarded after the task.
        head_scale: initial scale of a cosine head.
    """

    rank: int = 64
    scale: float = 0.1
    dropout: float = 0.1
    head: Literal["linear", "cosine"] = "cosine"
    head_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise OneaError(f"rank is {self.rank}; it must be at least 1.")
        if not 0 <= self.dropout < 1:
            raise OneaError(f"dropout is {self.dropout}; it must lie in [0, 1).")
