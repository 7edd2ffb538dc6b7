# SPDX-License-Identifier: Apache-2.0
"""Options of One-A and One-A+."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from onea.classifiers.published_drift import Carry
from onea.learner.adapter_training import AdapterTraining, Start
from onea.learner.merged_adapter import MemoryOptions, MergedAdapterOptions
from onea.merging.average import WeightedMean
from onea.merging.one_a import OneAMerge, OneAMergeOptions
from onea.merging.operator import Operator
from onea.schedules import DatasetSize, training_defaults
from onea.schema import BelowOne, Fraction, NotNegative, Positive, Range, ZeroToOne

MIN_BATCH_SIZE = 64  # of One-A+; large tasks have twice that
_TRAINING = tuple(AdapterTraining.__dataclass_fields__)


def _recipe(rate: float, decay: float, batch: int, rank: int, epochs: tuple[int, int, int]) -> dict[str, Any]:
    bounds = dict(zip(("epochs", "min_epochs", "max_epochs"), epochs, strict=True))
    return {"learning_rate": rate, "weight_decay": decay, "batch_size": batch, "rank": rank, **bounds}


# The hyper-parameters of One-A's paper, with the epoch bounds of its published configurations.
PUBLISHED: dict[str, dict[str, Any]] = {
    "cifar100": _recipe(0.01, 5e-4, 128, 128, (25, 20, 40)),
    "cub200": _recipe(0.07, 5e-4, 16, 128, (10, 5, 20)),
    "imagenet-a": _recipe(0.08, 3e-3, 64, 128, (40, 20, 50)),
    "imagenet-r": _recipe(0.03, 5e-3, 24, 64, (30, 30, 50)),
    "": _recipe(0.01, 5e-4, 128, 128, (25, 20, 40)),
}


@dataclass(frozen=True)
class OneAOptions(OneAMergeOptions, MemoryOptions):
    """Options of One-A: those of the training, and every part of the merge."""

    def operator(self) -> OneAMerge:
        """The operator of the paper, with these switches."""
        return OneAMerge(**{field.name: getattr(self, field.name) for field in fields(OneAMergeOptions)})


@dataclass(frozen=True)
class OneAPlusOptions(MergedAdapterOptions):
    """Options of One-A+.

    Attributes:
        epochs: number of epochs for a task of average size; 0 chooses by images per class, from 10 (500 or more) to
            20 (30 or fewer).
        min_epochs: number of epochs for the smallest tasks; 0 is half of ``epochs``.
        max_epochs: number of epochs for the largest tasks; 0 is one and a half times ``epochs``.
        batch_size: images per training step; 0 is 64, and 128 for a task of 2,500 images or more.
        new_votes: weight of a class of the task in the weighted mean, relative to an old class.
    """

    learning_rate: NotNegative = 0.2
    batch_size: Annotated[int, Range(ge=0)] = 0
    crop_scale: Fraction = 0.3
    epochs: Annotated[int, Range(ge=0)] = 0
    min_epochs: Annotated[int, Range(ge=0)] = 0
    max_epochs: Annotated[int, Range(ge=0)] = 0
    head: Literal["linear", "cosine"] = "cosine"
    head_scale: float = 16.0
    start: Start = "merged"
    single_class: Literal["train", "skip"] = "skip"
    min_share: ZeroToOne = 0.25
    carry: Carry = "ridge"
    guard: BelowOne = 0.1
    classifier: str = "rgda"
    merge: str = "weighted-mean"
    new_votes: Positive = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.training_options(1, 1)  # refuse invalid numbers of epochs now, not at the first task

    def operator(self) -> Operator:
        """The operator of these options; ``new_votes`` is an option of the weighted mean."""
        if self.merge == "weighted-mean" and not self.merge_options:
            return WeightedMean(boost=self.new_votes)
        return super().operator()

    def check_epochs(self) -> None:
        """Not checked here: zeros are replaced for each task."""

    def training_options(self, classes: int, images: int) -> AdapterTraining:
        """Options of the training of a task with this number of classes and images, without zeros."""
        defaults = training_defaults(DatasetSize(images, classes, tasks=1), self.epochs or None)
        values = {name: getattr(self, name) for name in _TRAINING}
        values["epochs"] = defaults["epochs"]
        # A given bound takes precedence over a default.
        values["max_epochs"] = self.max_epochs or max(self.min_epochs, defaults["max_epochs"])
        values["min_epochs"] = self.min_epochs or min(values["max_epochs"], defaults["min_epochs"])
        values["batch_size"] = self.batch_size or max(MIN_BATCH_SIZE, defaults["batch_size"])
        return AdapterTraining(**values)
