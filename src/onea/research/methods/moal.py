# SPDX-License-Identifier: Apache-2.0
"""MoAL: an adapter that moves as an average, least squares on random features, and rumination on shifted features."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import schedules, seeds
from onea.classifiers.base import Classifier, Statistics
from onea.classifiers.drift import DriftCompensation
from onea.classifiers.linear import NearestMean
from onea.classifiers.ranpac import RandomFeatureScores, RandomFeatureSums
from onea.classifiers.statistics import ClassStatistics
from onea.errors import OneaError
from onea.learner.optimisation import ParamGroup, train
from onea.learner.options import BottleneckOptions
from onea.learner.tasks import Task
from onea.research.methods.continued import ContinuedModule, SingleClass
from onea.research.methods.presets import published
from onea.schema import BelowOne, Count, Fraction, Positive
from onea.tensors import Tensors, add_prefix, select_prefix
from onea.vit.adapter import Adapters
from onea.vit.heads import GrowingCosineHead, cosine_scores, uniform_rows

_SUMS, _HEAD = "sums.", "head."
_MAP_BATCH, _MAP_DECAY, _MAP_PERIOD, _MAP_HELD_OUT = 32, 5e-4, 10, 0.1  # of the affine map, as published


@dataclass(frozen=True)
class AffineDrift:
    """Features times a matrix from the right, plus a shift."""

    matrix: Tensor
    shift: Tensor

    def move_features(self, features: Tensor) -> Tensor:
        """Mapped features, in their precision."""
        return features @ self.matrix.to(features) + self.shift.to(features)

    def move_statistics(self, statistics: Statistics) -> Statistics:
        """Mapped statistics; the shift only concerns means."""
        moved = statistics.apply_drift_map(self.matrix)
        if not isinstance(moved, ClassStatistics):
            return moved
        return moved.shift_means(self.shift.to(moved.means.device).expand(moved.classes, -1))


@dataclass(frozen=True)
class AffineMap(DriftCompensation):
    """A linear layer, trained by SGD with restarts; that of the epoch with the smallest error on held-out images.

    Attributes:
        epochs: epochs of the training.
        learning_rate: peak learning rate of each period of the schedule.
        seed: seed of the initial weights, the held-out images and the batches.
    """

    epochs: Count = 1000
    learning_rate: Positive = 0.01
    seed: int = 0

    def fit(self, before: Tensor, after: Tensor) -> AffineDrift:
        """Train on nine tenths of the rows."""
        generator, width = seeds.generator(self.seed, 0, "affine map"), before.shape[1]
        layer = nn.Linear(width, width).to(before.device)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(uniform_rows(math.prod(parameter.shape) // width, width, generator).view_as(parameter))
        order = torch.randperm(len(before), generator=generator)
        held_out, trained = order[: (count := max(1, int(_MAP_HELD_OUT * len(order))))], order[count:]
        trained = trained if len(trained) else held_out
        rate = self.learning_rate
        optimiser = torch.optim.SGD(layer.parameters(), lr=rate, momentum=0.9, weight_decay=_MAP_DECAY)
        best, smallest_error = None, math.inf
        for epoch in range(self.epochs):
            optimiser.param_groups[0]["lr"] = rate * schedules.cosine(epoch % (2 * _MAP_PERIOD), _MAP_PERIOD)
            for batch in trained[torch.randperm(len(trained), generator=generator)].split(_MAP_BATCH):
                optimiser.zero_grad()
                F.mse_loss(layer(before[batch]), after[batch]).backward()
                optimiser.step()
            error = float(F.mse_loss(layer(before[held_out]), after[held_out]).detach())
            if error < smallest_error:
                best, smallest_error = copy.deepcopy(layer), error
        if best is None:
            raise OneaError("The affine map of old means diverged; lower its learning rate (--map-learning-rate).")
        return AffineDrift(best.weight.detach().T, best.bias.detach())


@dataclass(frozen=True)
class MoALOptions(BottleneckOptions):
    """Options of MoAL.

    Attributes:
        random_features: number of random features M; matrices of M x M are stored.
        first_share: factor of the targets of the first task in the least squares, as published.
        momentum: weight of the old adapter in each average.
        moal_ema: when adapters are averaged: after each ``epoch`` as in the official code, or after each ``step``.
        moal_head: initial rows of new classes in the head that trains the adapter: random, beside the ``kept`` rows of
            old classes; or as in the ``official`` code: zeros, and after the first task random rows replace the
            trained ones.
        map_epochs: epochs of the training of the map of old means.
        map_learning_rate: learning rate of that training.
        single_class: how to handle a task of one class, whose loss only lowers the logits of old classes: ``train`` the
            adapter as published, or ``skip`` that.
    """

    batch_size: Count = 48
    random_features: Count = 5000
    first_share: Fraction = 0.9
    momentum: BelowOne = 0.999
    moal_ema: Literal["epoch", "step"] = "epoch"
    moal_head: Literal["kept", "official"] = "kept"
    map_epochs: Count = 1000
    map_learning_rate: Positive = 0.01
    single_class: SingleClass = "train"

    def classifiers(self) -> dict[str, Classifier]:
        """The statistics that are kept: means."""
        return {"ncm": NearestMean()}

    def num_views(self, images: int, classes: int) -> int:
        """The whole image."""
        return 1

    @property
    def views(self) -> int:
        """Each image counts once in the means."""
        return 1


class MoAL(ContinuedModule):
    """Momentum-based analytical learning with knowledge rumination.

    The classifier is ridge regression on random features, as in RanPAC, whose ridge is selected once. The recursive
    least squares of the paper equal the solution of the sums of all tasks, which are kept instead. The sums are never
    corrected for the drift of features. Rumination adds features of old classes to them: those of the nearest new
    class, shifted by the difference of the means, as far as they are misclassified.
    """

    title = "MoAL"
    paper = "https://github.com/Zi-Jian-Gao/Moal"
    trains = "one adapter and a head, in every task"
    stores = "one adapter, a head, a prototype per class and two random-feature matrices (200 MB for 5,000 features)"
    in_paper = False
    Options = MoALOptions
    base_learning_rate = 0.02
    paper_presets: ClassVar = {
        "cifar100": published(80, 0.01, 48, rank=64, random_features=5_000),
        "cub200": published(80, 0.01, 48, rank=64, random_features=15_000),
        "imagenet-a": published(80, 0.01, 48, rank=64, random_features=15_000),
        "imagenet-r": published(80, 0.01, 48, rank=64, random_features=20_000),
        "": published(80, 0.01, 48, rank=64, random_features=20_000),
    }
    options: MoALOptions

    def setup(self) -> None:
        """Create the adapter, a head without classes and empty sums."""
        super().setup()
        width, device = self.vit.width, self.runtime.device
        self.head = GrowingCosineHead(width, learn_scale=True).to(device)
        projection = uniform_rows(self.options.random_features, width, seeds.generator(0, 0, "random features")).T
        self.sums = RandomFeatureSums.empty(projection.contiguous(), 0).to(device)
        self.strength = torch.zeros((), dtype=torch.float64)  # 0 until it is selected
        self._regression: RandomFeatureScores | None = None

    def new_module(self) -> Adapters:
        """An adapter that does not change the output of the network."""
        return self.new_adapters()

    def compensation(self) -> DriftCompensation:
        """The affine map of old means."""
        return AffineMap(self.options.map_epochs, self.options.map_learning_rate)

    def learn(self, task: Task) -> dict[str, Any]:
        """Train and average the adapter, map old means, and update the least squares by images and by rumination."""
        old = self.num_classes
        if not old:
            self.module.load_state_dict(self.new_adapters(task.seed).state_dict())
        rows = uniform_rows(len(task.classes), self.vit.width, seeds.generator(task.seed, task.index, "head"))
        self.head.append_rows(rows if self.options.moal_head == "kept" or not old else torch.zeros_like(rows))
        update = self.update(task)
        features = update.features[0]
        self.runtime.progress.start_phase("least squares")
        sums = self.sums.add(features, task.labels)
        if not self.strength and sums.classes > 1:
            self.strength = torch.tensor(sums.select_strength(), dtype=torch.float64)
        self._set_sums(sums if old else replace(sums, hits=self.options.first_share * sums.hits))
        ruminated = self._ruminate(features, task.labels, range(old)) if old else 0
        return update.report | {"strength": float(self.strength), "ruminated": ruminated}

    def train_module(self, task: Task) -> dict[str, Any]:
        """Train the adapter with a head over all classes seen, and average it with the old one."""
        first, by_step = not self.num_classes, self.options.moal_ema == "step"
        average = copy.deepcopy(self.module).requires_grad_(False)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.vit(images, self.hooks())).float(), labels)

        def interpolate() -> None:
            for mean, parameter in zip(average.parameters(), self.module.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 1 - self.options.momentum)

        def end_epoch() -> bool:
            interpolate()
            return False

        recipe = self.recipe(task)
        losses = train(
            [ParamGroup(self.module), ParamGroup(self.head)],
            loss,
            task,
            recipe,
            self.runtime,
            after_step=interpolate if by_step and not first else None,
            should_stop=None if by_step or first else end_epoch,
        )
        if not first:
            self.module.load_state_dict(average.state_dict())
        elif self.options.moal_head == "official":
            generator = seeds.generator(task.seed, task.index, "new head")
            self.head = GrowingCosineHead(self.vit.width, learn_scale=True).to(self.runtime.device)
            self.head.append_rows(uniform_rows(len(task.classes), self.vit.width, generator))
        return {"epochs": recipe.epochs, "losses": losses}

    def scores(self, images: Tensor) -> Tensor:
        """Ridge regression on random features."""
        return self.regression()(self.features(images, self.hooks()))

    def state_dict(self) -> Tensors:
        """The adapter, the head, the means, the sums and the ridge."""
        parts = add_prefix(_SUMS, self.sums.state_dict()) | add_prefix(_HEAD, dict(self.head.state_dict()))
        return {**super().state_dict(), **parts, "strength": self.strength}

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state."""
        super().load_state_dict(state)
        self.head.load_state_dict(select_prefix(_HEAD, state))
        self._set_sums(self.sums.from_state_dict(select_prefix(_SUMS, state)).to(self.runtime.device))
        self.strength = state["strength"].cpu()

    def regression(self) -> RandomFeatureScores:
        """The classifier: ridge regression on random features."""
        if self._regression is None:
            weight = self.sums.ridge_weights(float(self.strength) or 1.0)  # of a single class, any ridge will do
            scorer = RandomFeatureScores(projection=self.sums.projection, weight=weight)
            self._regression = scorer.to(self.runtime.device)
        return self._regression

    def _set_sums(self, sums: RandomFeatureSums) -> None:
        self.sums, self._regression = sums, None

    def _ruminate(self, features: Tensor, labels: Tensor, old: range) -> int:
        """Add misclassified features of old classes to the sums; returns their number."""
        regression, means = self.regression(), self.prototypes.to(features.device)
        nearest = old.stop + cosine_scores(means[: old.stop], means[old.stop :]).argmax(1)
        labels, kept, kept_labels = labels.to(features.device), [features[:0]], [labels[:0].to(features.device)]
        for row in old:
            shifted = features[labels == nearest[row]] + means[row] - means[nearest[row]]
            wrong = shifted[regression(shifted).argmax(1) != row]
            kept.append(wrong)
            kept_labels.append(torch.full((len(wrong),), row, device=features.device))
        self._set_sums(self.sums.add(torch.cat(kept), torch.cat(kept_labels)))
        return sum(map(len, kept))
