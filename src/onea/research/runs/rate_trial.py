# SPDX-License-Identifier: Apache-2.0
"""A short trial of a few learning rates before a run, on images that are held out of its first task.

The first task stands for a stream: its classes arrive in two halves, so that a rate at which later tasks spoil earlier
ones is found out. Test images are not looked at.
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
from onea.research.runs.setup import ImageSubset, PreparedRun, pick, prepare
from onea.research.streams import Stream, balanced
from onea.runtime import Runtime

_FACTORS = (3.0, 1.0, 0.3, 0.1)  # of the rate that the run would have
_LOWER = (0.03, 0.01)  # are tried too while every rate is worse than the network as it is
_HELD_OUT, _MOST_IMAGES = 0.25, 100  # share of a class's images, and images of a class in all
_TWO_HALVES = 4  # classes


@dataclass(frozen=True)
class LearningRateTrial:
    """What a trial found.

    Attributes:
        accuracy: percent of the held-out images that are answered right, by rate; 0 where the training diverged.
        frozen: the same of the network as it is, with the nearest class mean.
        usual: the rate that the run would have.
    """

    accuracy: dict[float, float]
    frozen: float
    usual: float

    @property
    def best(self) -> float:
        """The rate with the highest accuracy; of equal ones that which is nearest to the run's own, or smaller."""
        return max(sorted(self.accuracy), key=lambda rate: (self.accuracy[rate], -abs(math.log(rate / self.usual))))


def try_rates(config: RunConfig, runtime: Runtime) -> LearningRateTrial:
    """Train the run's method on its first task with a few rates, half as long as the run will.

    Raises:
        OneaError: the method has no rate, or the first task has a single class.
    """
    ready = prepare(config, runtime)
    options = ready.method.options
    if not getattr(options, "learning_rate", 0):
        raise OneaError(f"Method '{config.method}' trains nothing, so it has no learning rate to try.")
    if ready.stream.sizes[0] < 2:
        raise OneaError("The first task has one class, which tells nothing about rates; give --learning-rate yourself.")
    short = {"epochs": -(-options.epochs // 2)} if options.epochs else {}
    stand_in = _stand_in(ready)
    usual, accuracy = options.learning_rate, dict[float, float]()
    frozen = _accuracy(stand_in, "simplecil", method_class("simplecil").Options())
    for factor in _FACTORS + _LOWER:
        if factor in _LOWER and max(accuracy.values()) >= frozen:
            break
        rate = float(f"{factor * usual:.3g}")
        changed = dataclasses.replace(options, learning_rate=rate, **short)
        accuracy[rate] = _accuracy(stand_in, config.method, changed)
    return LearningRateTrial(accuracy, frozen, usual)


def _stand_in(ready: PreparedRun) -> PreparedRun:
    """A run whose stream is the first task of another, and whose test images are held out of its training images."""
    classes, train = ready.stream.sizes[0], ready.train
    rows = pick(ready.task(0).rows, train.labels, ready.seed, "rate trial", lambda _, __: _MOST_IMAGES)
    held = pick(
        rows, train.labels, ready.seed, "rate held out", lambda _, count: min(count - 1, -int(-_HELD_OUT * count // 1))
    )
    sizes = balanced(classes, 2) if classes >= _TWO_HALVES else (classes,)
    kept, tested = (
        ImageSubset(train.images, train.labels, rows[~torch.isin(rows, held)]),
        ImageSubset(train.images, train.labels, held),
    )
    if not len(held):
        raise OneaError("The first task has one image of each class, and none can be held out; give --learning-rate.")
    return dataclasses.replace(ready, stream=Stream(tuple(range(classes)), sizes), train=kept, test=tested)


def _accuracy(stand_in: PreparedRun, method: str, options: object) -> float:
    given = stand_in.method
    learner = method_class(method)(given.vit, options, given.runtime, given.plan)
    try:
        for index in range(stand_in.stream.tasks):
            learner.learn(stand_in.task(index))
    except OneaError:  # the loss is not finite
        return 0.0
    found = predict_tasks(learner, stand_in.test, stand_in.class_ranges(stand_in.stream.tasks - 1), stand_in.seed)
    return 100 * float((next(iter(found.answers.values())) == found.truth).double().mean())
