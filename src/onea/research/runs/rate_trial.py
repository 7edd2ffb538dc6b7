# SPDX-License-Identifier: Apache-2.0
"""A quick test of a few learning rates before a run, on held-out images of its first task.

The classes of the first task are learned in two halves, so that a learning rate that causes forgetting gets a low
accuracy. Test images are not used.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from onea.errors import OneaError
from onea.research.methods import method_class
from onea.research.runs.config import RunConfig
from onea.research.runs.evaluation import predict_tasks
from onea.research.runs.setup import ImageSubset, PreparedRun, prepare, sample_per_class
from onea.research.streams import Stream, balanced_sizes
from onea.runtime import Runtime

_FACTORS = (3.0, 1.0, 0.3, 0.1)  # of the default learning rate
_LOWER_FACTORS = (0.03, 0.01)  # tried as long as every learning rate is worse than the frozen network
_HELD_OUT, _MAX_IMAGES = 0.25, 100  # fraction of a class's images, and images per class
_MIN_CLASSES_FOR_TWO_TASKS = 4


@dataclass(frozen=True)
class LearningRateTrial:
    """Accuracies of a few learning rates.

    Attributes:
        accuracy: accuracy in percent on the held-out images, by learning rate; 0 where the training diverged.
        frozen_accuracy: accuracy of the frozen network with a nearest-class-mean classifier.
        default: the learning rate of the run's configuration.
    """

    accuracy: dict[float, float]
    frozen_accuracy: float
    default: float

    @property
    def best(self) -> float:
        """The learning rate with the highest accuracy; in a tie the closest to the default, then the smallest."""
        return max(sorted(self.accuracy), key=lambda rate: (self.accuracy[rate], -abs(math.log(rate / self.default))))


def try_rates(config: RunConfig, runtime: Runtime) -> LearningRateTrial:
    """Train the run's method on its first task with a few learning rates, for half of its epochs.

    Raises:
        OneaError: the method has no learning rate, or the first task has a single class.
    """
    prepared = prepare(config, runtime)
    options = prepared.method.options
    if not getattr(options, "learning_rate", 0):
        raise OneaError(f"Method '{config.method}' trains nothing, so it has no learning rate to try.")
    if prepared.stream.sizes[0] < 2:
        raise OneaError(
            "The first task has one class, which is too few to compare learning rates; set --learning-rate."
        )
    half = {"epochs": -(-options.epochs // 2)} if options.epochs else {}
    trial = _split_first_task(prepared)
    default, accuracy = options.learning_rate, dict[float, float]()
    frozen_accuracy = _accuracy(trial, "simplecil", method_class("simplecil").Options())
    for factor in _FACTORS + _LOWER_FACTORS:
        if factor in _LOWER_FACTORS and max(accuracy.values()) >= frozen_accuracy:
            break
        rate = float(f"{factor * default:.3g}")
        accuracy[rate] = _accuracy(trial, config.method, dataclasses.replace(options, learning_rate=rate, **half))
    return LearningRateTrial(accuracy, frozen_accuracy, default)


def _split_first_task(prepared: PreparedRun) -> PreparedRun:
    """A run on the first task only, with its classes in two tasks and some of its training images as test images."""
    classes, train = prepared.stream.sizes[0], prepared.train
    rows = sample_per_class(prepared.task(0).rows, train.labels, prepared.seed, "rate trial", lambda _, __: _MAX_IMAGES)
    held_out = sample_per_class(
        rows,
        train.labels,
        prepared.seed,
        "rate held out",
        lambda _, count: min(count - 1, -int(-_HELD_OUT * count // 1)),
    )
    if not len(held_out):
        raise OneaError("The first task has only one image per class, so none can be held out; set --learning-rate.")
    sizes = balanced_sizes(classes, 2) if classes >= _MIN_CLASSES_FOR_TWO_TASKS else (classes,)
    return dataclasses.replace(
        prepared,
        stream=Stream(tuple(range(classes)), sizes),
        train=ImageSubset(train.images, train.labels, rows[~torch.isin(rows, held_out)]),
        test=ImageSubset(train.images, train.labels, held_out),
    )


def _accuracy(trial: PreparedRun, method: str, options: object) -> float:
    """Accuracy after the last task of the trial."""
    learner = method_class(method)(trial.method.vit, options, trial.method.runtime, trial.method.plan)
    try:
        for index in range(trial.stream.tasks):
            learner.learn(trial.task(index))
    except OneaError:  # the loss is not finite
        return 0.0
    return predict_tasks(learner, trial.test, trial.class_ranges(trial.stream.tasks - 1), trial.seed).accuracy
