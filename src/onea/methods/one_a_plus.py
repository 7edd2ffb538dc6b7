# SPDX-License-Identifier: Apache-2.0
"""One-A+: one adapter and one pass like One-A, with three main changes, each of which can be switched off.

1. **Start.** A task's adapter starts from the merged one, not from random weights, and only tasks that bring a quarter
   of the classes or more train one. The merge is the mean of both adapters, in which a class of the task has two votes
   and an old one has one.
2. **Carry.** The merge moves the features of old classes, whose images are gone. The images of the task show how: their
   features before (rows of ``F0``) and after (``F1``) give the ridge map ``P = I + (F0'F0 + l I)^-1 F0'(F1 - F0)``,
   with the strength ``l`` that best predicts images left out. What is known of old classes is carried along: means
   ``m P``, scatters ``P'SP``, directions ``A P``.
3. **Classify.** A Gaussian per class answers, its covariance between that of the class and the one that all classes
   share (see ``onea.classifiers.gaussian``), instead of the nearest mean.

An adapter that makes held-out images of its own task worse is taken back. The number of images decides how long a task
is trained, never the name of a dataset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from onea.merging.average import WeightedMean
from onea.merging.operator import Operator
from onea.methods.adapter import MergedAdapterOptions
from onea.methods.adapter_merging import AdapterMerging, MergingOptions
from onea.methods.adapter_training import AdapterTraining, Start
from onea.methods.data_rule import DataShape, data_rule
from onea.options import BelowOne, NotNegative, Positive, Range, Share, ZeroToOne
from onea.tasks import Task
from onea.vit.hooks import BlockHooks

_BATCH = 64  # the smallest; large tasks have twice that
_TRAINING = tuple(AdapterTraining.__dataclass_fields__)


@dataclass(frozen=True)
class OneAPlusOptions(MergedAdapterOptions):
    """Options of One-A+.

    Attributes:
        epochs: for a task of average size; 0 lets the number of images of a class decide, from 10 (500 images or more)
            to 20 (30 or fewer).
        min_epochs: for the smallest tasks; 0 is half of ``epochs``.
        max_epochs: for the largest tasks; 0 is one and a half times ``epochs``.
        batch_size: images per step; 0 is 64, and 128 for a task of 2,500 images or more.
        new_votes: votes of each class of the task in the weighted mean, where an old class has one.
    """

    learning_rate: NotNegative = 0.2
    batch_size: Annotated[int, Range(ge=0)] = 0
    crop_scale: Share = 0.3
    epochs: Annotated[int, Range(ge=0)] = 0
    min_epochs: Annotated[int, Range(ge=0)] = 0
    max_epochs: Annotated[int, Range(ge=0)] = 0
    head: Literal["linear", "cosine"] = "cosine"
    head_scale: float = 16.0
    start: Start = "merged"
    single_class: Literal["train", "skip"] = "skip"
    min_share: ZeroToOne = 0.25
    carry: bool = True
    guard: BelowOne = 0.1
    classifier: str = "rgda"
    merge: str = "weighted-mean"
    new_votes: Positive = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.for_images(1, 1)  # refuses epochs that make no sense now, not at the first task

    @staticmethod
    def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
        """Options under their present names; the first records had idle bounds, and votes among those of the merge."""
        found = AdapterTraining.upgraded(values)
        if (found.get("epochs"), found.get("min_epochs"), found.get("max_epochs")) == (0, 20, 40):
            found |= {"min_epochs": 0, "max_epochs": 0}
        if found.get("merge_options") == "boost=2":
            found |= {"merge_options": "", "new_votes": 2.0}
        return found

    def operator(self) -> Operator:
        """The operator that these options name; the weighted mean with its votes, unless its own options say more."""
        if self.merge == "weighted-mean" and not self.merge_options:
            return WeightedMean(boost=self.new_votes)
        return super().operator()

    def check_epochs(self) -> None:
        """Nothing yet: what is 0 is filled in for each task."""

    def for_images(self, classes: int, images: int) -> AdapterTraining:
        """How a task of so many classes and images is trained: all that is 0 here has its value there."""
        rule = data_rule(DataShape(images, classes, tasks=1), self.epochs or None)
        # A bound that is given holds, and one that is not yields to it.
        most = self.max_epochs or max(self.min_epochs, rule["max_epochs"])
        least = self.min_epochs or min(most, rule["min_epochs"])
        batch = self.batch_size or max(_BATCH, rule["batch_size"])
        values = {"epochs": rule["epochs"], "min_epochs": least, "max_epochs": most, "batch_size": batch}
        return AdapterTraining(**{name: getattr(self, name) for name in _TRAINING} | values)


class OneAPlus(AdapterMerging):
    """One adapter that every task starts from, statistics that follow it, and a Gaussian per class."""

    title: ClassVar[str] = "One-A+"
    paper: ClassVar[str] = "https://arxiv.org/abs/2603.10237"
    trains: ClassVar[str] = "an adapter for each large task, from the merged one"
    stores: ClassVar[str] = "one adapter, a mean and some directions per class, one matrix"
    in_paper: ClassVar[bool] = False
    Options: ClassVar[type] = OneAPlusOptions
    base_rate: ClassVar[float | None] = 0.15
    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # Rates and epochs follow the images, whatever a dataset is called.
    small: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "": {"learning_rate": 0.2, "batch_size": 0, "epochs": 0, "min_epochs": 0, "max_epochs": 0}
    }
    options: OneAPlusOptions

    @classmethod
    def epochs(cls, options: MergingOptions, sizes: Sequence[int]) -> list[int]:
        """More for larger tasks, none for those that are not trained on; assumes 100 images of a class."""
        assert isinstance(options, OneAPlusOptions)
        training = options.for_images(1, 100)
        values = {name: getattr(training, name) for name in ("epochs", "min_epochs", "max_epochs")}
        return super().epochs(dataclasses.replace(options, **values), sizes)

    def batch_sizes(self) -> set[int]:
        """The sizes that steps may have."""
        return {self.options.batch_size} if self.options.batch_size else {_BATCH, 2 * _BATCH}

    def training_options(self, task: Task) -> AdapterTraining:
        """Those that suit the images of the task."""
        return self.options.for_images(len(task.classes), len(task))

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The adapter, which stands still while tasks teach it nothing."""
        return {f"adapter of {self.merged_classes} classes": self.kept}
