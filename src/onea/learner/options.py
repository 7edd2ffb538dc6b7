# SPDX-License-Identifier: Apache-2.0
"""Options of training and classification that methods and models share, under the same names everywhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from onea import schedules
from onea.classifiers import make_classifier
from onea.classifiers.base import Classifier
from onea.classifiers.drift import DriftCompensation
from onea.classifiers.published_drift import Carry, make_compensation
from onea.learner.optimisation import Optimiser, Recipe, Schedule
from onea.learner.tasks import StreamPlan
from onea.options import Validated, parse_pairs
from onea.schedules import task_epochs
from onea.schema import BelowOne, Count, Fraction, NotNegative, Range

_DEFAULT_CLASSES = 10.0  # of an average task, if the stream is not known in advance
_COMPACT = ("ncm", "slda", "whitened", "ridge", "rgda", "ranpac")


@dataclass(frozen=True)
class TrainingOptions(Validated):
    """Options of the training of a task.

    Attributes:
        learning_rate: peak learning rate of the schedule.
        weight_decay: weight decay of the optimiser.
        batch_size: images per training step.
        crop_scale: smallest share of an image's area that a random training crop covers.
        epochs: number of epochs per task; if ``epoch_growth`` is not 0, for a task of average size.
        min_epochs: minimum number of epochs, if ``epoch_growth`` is not 0; 0 sets no minimum.
        max_epochs: maximum number of epochs, if ``epoch_growth`` is not 0; 0 sets no maximum.
        epoch_growth: a task has ``epochs (classes / average)^growth`` epochs; 0 is the same number for all tasks.
    """

    learning_rate: NotNegative = 0.01
    weight_decay: NotNegative = 5e-4
    batch_size: Count = 48
    crop_scale: Fraction = 0.05
    epochs: Count = 20
    min_epochs: Annotated[int, Range(ge=0)] = 0
    max_epochs: Annotated[int, Range(ge=0)] = 0
    epoch_growth: float = 0.0

    def epochs_for(self, classes: int, plan: StreamPlan | None) -> int:
        """The number of epochs of a task with this number of classes."""
        if not self.epoch_growth:
            return self.epochs
        average = plan.classes / plan.tasks if plan else _DEFAULT_CLASSES
        min_epochs, max_epochs = max(self.min_epochs, 1), self.max_epochs or sys.maxsize
        return task_epochs(classes, self.epochs, average, min_epochs, max_epochs, self.epoch_growth)

    def recipe(
        self, optimiser: Optimiser = "sgd", schedule: Schedule = schedules.cosine, epochs: int | None = None
    ) -> Recipe:
        """The hyper-parameters for a task; ``epochs`` replaces the number for a task of average size."""
        rate, decay = self.learning_rate, self.weight_decay
        return Recipe(rate, decay, self.batch_size, epochs or self.epochs, self.crop_scale, optimiser, schedule)


@dataclass(frozen=True)
class BottleneckOptions(TrainingOptions):
    """Options of an adapter and of its training.

    Attributes:
        rank: width of the adapter's bottleneck.
        scale: factor on the adapter's output.
        dropout: dropout rate inside the adapter during training.
    """

    rank: Count = 64
    scale: float = 0.1
    dropout: BelowOne = 0.1


@dataclass(frozen=True)
class LocalHeadOptions(TrainingOptions):
    """Options of a training with a local head.

    Attributes:
        head: ``linear`` or ``cosine`` local head, discarded after the task.
        head_scale: initial scale of a cosine head.
    """

    head: Literal["linear", "cosine"] = "cosine"
    head_scale: float = 1.0


@dataclass(frozen=True)
class AdapterOptions(LocalHeadOptions, BottleneckOptions):
    """Options of an adapter and of its training with a local head."""


@dataclass(frozen=True)
class ClassifierOptions(Validated):
    """Options of the classifier and its statistics.

    Attributes:
        classifier: ``ncm`` (nearest class mean by cosine, the paper), slda, whitened, ridge, rgda, rgda-full, lr-rgda,
            sampled-head, ranpac, loranpac, fecam, or one that an installed package adds.
        classifier_options: options of the classifier, such as directions=16,prior_images=400.
        compare_classifiers: further classifiers that are evaluated in the same run, such as slda,rgda; ``all`` selects
            those that need less than 100 MB for 100 classes. The guard uses only the first classifier.
        views: number of views of each image in the statistics: the whole image (1, the paper), then random crops,
            flipped half of the time, each counted as another image.
        enough_images: from this number of images per class (average of the task), the whole image is counted ``views``
            times in place of crops, and training with fixed views uses no crops either. 0 always uses crops.
    """

    classifier: str = "ncm"
    classifier_options: str = ""
    compare_classifiers: str = ""
    views: Annotated[int, Range(ge=1, le=100)] = 1
    enough_images: Annotated[int, Range(ge=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classifiers()  # refuse invalid options now, not after the first task

    def num_views(self, images: int, classes: int) -> int:
        """The number of views of each image that are computed for a task with this number of images and classes.

        >>> options = ClassifierOptions(views=2, enough_images=50)
        >>> options.num_views(490, 10), options.num_views(500, 10)
        (2, 1)
        """
        return 1 if self.skip_crops(images, classes) else self.views

    def skip_crops(self, images: int, classes: int) -> bool:
        """Whether a task with this number of images and classes uses no crops; see ``enough_images``."""
        return 0 < self.enough_images * classes <= images

    def classifiers(self) -> dict[str, Classifier]:
        """The classifier, then those to compare, by name."""
        first = make_classifier(self.classifier, **parse_pairs(self.classifier_options, "classifier_options"))
        requested = filter(None, (name.strip() for name in self.compare_classifiers.split(",")))
        others = [other for name in requested for other in (_COMPACT if name == "all" else (name,))]
        return {self.classifier: first} | {name: make_classifier(name) for name in others if name != self.classifier}


@dataclass(frozen=True)
class CarryOptions(Validated):
    """Options of the statistics of old classes when the adapter changes.

    Attributes:
        carry: how they follow the drift of features, which new images show: ``none`` (the paper: they stay), ``ridge``
            (One-A+: a linear map near the identity), or as published: ``dpcr``, ``sldc`` (linear maps), ``hopdc``
            (attention over the new images).
        carry_options: options of the map, such as kind=nonlinear for sldc or temperature=0.1 for hopdc.
    """

    carry: Carry = "none"
    carry_options: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compensation()  # refuse invalid options now, not after the first task

    def compensation(self) -> DriftCompensation | None:
        """The map of these options; None if statistics do not follow."""
        return make_compensation(self.carry, **parse_pairs(self.carry_options, "carry_options"))
