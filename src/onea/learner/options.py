# SPDX-License-Identifier: Apache-2.0
"""Options that methods and models share, so that the same thing has the same name and meaning everywhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from onea import schedules
from onea.classifiers import make_classifier
from onea.classifiers.contract import Classifier
from onea.learner.tasks import StreamPlan
from onea.learner.training import Optimiser, Recipe, Schedule
from onea.options import Validated, parse_pairs
from onea.schedules import task_epochs
from onea.schema import BelowOne, Count, Fraction, NotNegative, Range

_UNPLANNED_CLASSES = 10.0  # classes of a middling task when the stream's length is not known
_COMPACT = ("ncm", "slda", "whitened", "rgda", "ranpac")


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
    crop_scale: Fraction = 0.05
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


@dataclass(frozen=True)
class ClassifierOptions(Validated):
    """How images are answered from their features.

    Attributes:
        classifier: ``ncm`` (nearest class mean by cosine, the paper), slda, whitened, rgda, rgda-full, ranpac, fecam,
            or one that an installed package adds.
        classifier_options: options of the classifier, such as directions=16,prior_images=400.
        compare_classifiers: further classifiers that are scored in the same run, such as slda,rgda; ``all`` is all that
            keep less than 100 MB for 100 classes. The first one alone decides what the guard does.
        views: how often an image enters the statistics: as it is (1, the paper), then in random crops, mirrored half of
            the time, each counted as one more image.
        enough_images: where the classes of a task have so many images on average, no crops are looked at, and each
            image counts in their place: crops help classes of few images. Nor does training look at any then, where it
            takes fixed views. 0 always looks at crops.
    """

    classifier: str = "ncm"
    classifier_options: str = ""
    compare_classifiers: str = ""
    views: Annotated[int, Range(ge=1, le=100)] = 1
    enough_images: Annotated[int, Range(ge=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classifiers()  # refuses what makes no sense now, not after the first task

    def looks(self, images: int, classes: int) -> int:
        """How many views of each image are looked at in a task of so many images and classes.

        >>> options = ClassifierOptions(views=2, enough_images=50)
        >>> options.looks(490, 10), options.looks(500, 10)
        (2, 1)
        """
        return 1 if self.enough(images, classes) else self.views

    def enough(self, images: int, classes: int) -> bool:
        """Whether so many images of so many classes need no crops."""
        return 0 < self.enough_images * classes <= images

    def classifiers(self) -> dict[str, Classifier]:
        """The classifier that answers, then those that are compared with it, by name."""
        chosen = make_classifier(self.classifier, **parse_pairs(self.classifier_options, "classifier_options"))
        names = filter(None, (word.strip() for word in self.compare_classifiers.split(",")))
        more = [every for name in names for every in (_COMPACT if name == "all" else (name,))]
        return {self.classifier: chosen} | {name: make_classifier(name) for name in more if name != self.classifier}
