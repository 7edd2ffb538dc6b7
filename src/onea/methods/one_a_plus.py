# SPDX-License-Identifier: Apache-2.0
"""One-A+: one adapter and one pass like One-A, with three changes, each of which can be switched off.

1. **Start.** A task's adapter starts from the merged one, not from random weights, and only tasks that bring a quarter
   of the classes or more train one. The merge is the mean of both adapters, in which a class of the task has two votes
   and an old one has one.
2. **Carry.** The merge moves the features of old classes, whose images are gone. The images of the task show how: their
   features before (rows of ``F0``) and after (``F1``) give the ridge map ``P = I + (F0'F0 + l I)^-1 F0'(F1 - F0)``,
   with the strength ``l`` that best predicts images left out. What is known of old classes is carried along: means
   ``m P``, scatters ``P'SP``, directions ``A P``.
3. **Classify.** A Gaussian per class answers, its covariance between that of the class and the one that all classes
   share (see ``onea.classifiers.gaussian``), instead of the nearest mean.

An adapter that would make held-out images of its own task worse is not merged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor

from onea.methods.adapter import MergedAdapterOptions
from onea.methods.adapter_merging import AdapterMerging, MergingOptions
from onea.methods.adapter_training import Start
from onea.options import BelowOne, NotNegative, Range, Share, ZeroToOne
from onea.tasks import Task
from onea.vit.hooks import BlockHooks

_MANY = 500  # images of a class from which on it is trained for the fewest epochs
_FEWEST, _MOST = 10, 20  # epochs for a task of average size
_LARGE = 2500  # images of a task from which on steps take twice as many
_BATCH = 64


@dataclass(frozen=True)
class OneAPlusOptions(MergedAdapterOptions):
    """Options of One-A+.

    Attributes:
        epochs: for a task of average size; 0 lets the number of images of a class decide, from 10 (500 images or more)
            to 20 (30 or fewer).
        batch_size: images per step; 0 is 64, and 128 for a task of 2,500 images or more.
    """

    learning_rate: NotNegative = 0.2
    batch_size: Annotated[int, Range(ge=0)] = 0
    crop_scale: Share = 0.3
    epochs: Annotated[int, Range(ge=0)] = 0
    head: Literal["linear", "cosine"] = "cosine"
    head_scale: float = 16.0
    start: Start = "merged"
    single_class: Literal["train", "skip"] = "skip"
    min_share: ZeroToOne = 0.25
    carry: bool = True
    guard: BelowOne = 0.1
    classifier: str = "rgda"
    merge: str = "weighted-mean"
    merge_options: str = "boost=2"

    def for_images(self, classes: int, images: int) -> OneAPlusOptions:
        """The same with the epochs and the batch size that suit a task of so many classes and images."""
        epochs, least, most = self.epochs, self.min_epochs, self.max_epochs
        if not epochs:
            epochs = min(max(round(_FEWEST * (_MANY * classes / images) ** 0.25), _FEWEST), _MOST)
            least, most = round(0.5 * epochs), round(1.5 * epochs)
        batch = self.batch_size or (_BATCH if images < _LARGE else 2 * _BATCH)
        return dataclasses.replace(self, epochs=epochs, min_epochs=least, max_epochs=most, batch_size=batch)


class OneAPlus(AdapterMerging):
    """One adapter that every task starts from, statistics that follow it, and a Gaussian per class."""

    title: ClassVar[str] = "One-A+"
    paper: ClassVar[str] = "https://arxiv.org/abs/2603.10237"
    trains: ClassVar[str] = "an adapter for each large task, from the merged one"
    stores: ClassVar[str] = "one adapter, a mean and some directions per class, one matrix"
    in_paper: ClassVar[bool] = False
    Options: ClassVar[type] = OneAPlusOptions
    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # Rates and epochs follow the images, whatever a dataset is called.
    small: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "": {"learning_rate": 0.2, "batch_size": 0, "epochs": 0, "min_epochs": 20, "max_epochs": 40}
    }
    options: OneAPlusOptions

    @classmethod
    def epochs(cls, options: MergingOptions, sizes: Sequence[int]) -> list[int]:
        """More for larger tasks, none for those that are not trained on; with 100 images of a class, if they decide."""
        assert isinstance(options, OneAPlusOptions)
        return super().epochs(options.for_images(1, 100), sizes)

    def batch_sizes(self) -> set[int]:
        """The sizes that steps may have."""
        return {self.options.batch_size} if self.options.batch_size else {_BATCH, 2 * _BATCH}

    def training_options(self, task: Task) -> OneAPlusOptions:
        """Those that suit the images of the task."""
        return self.options.for_images(len(task.classes), len(task))

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The adapter, which stands still while tasks teach it nothing."""
        return {f"adapter of {self.merged_classes} classes": self.kept}

    def scores_from_features(self, features: Mapping[str, Tensor]) -> Tensor:
        """Scores of the classifier that answers."""
        (adapted,) = features.values()
        return self.scorer()(adapted)
