# SPDX-License-Identifier: Apache-2.0
"""Training of a head on features that are sampled from Gaussians of classes, in place of old images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import schedules, seeds
from onea.classifiers.base import Classifier, Scorer, Statistics
from onea.classifiers.linear import LinearScores
from onea.classifiers.samples import draw_features
from onea.classifiers.statistics import ClassStatistics
from onea.errors import OneaError
from onea.schema import Count, NotNegative, Positive
from onea.tensors import to_float64
from onea.vit.heads import symmetric_cross_entropy

Draw = Callable[[], tuple[Tensor, Tensor]]
"""Samples features ``[N, width]`` and their classes."""


def align_classifier(
    head: nn.Module,
    draw: Draw,
    *,
    optimiser: torch.optim.Optimizer,
    epochs: int,
    batch_size: int,
    generator: torch.Generator,
    schedule: Callable[[int, int], float] = schedules.cosine,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    rate_option: str = "",
) -> list[float]:
    """Train a head on sampled features, with all classes as candidates.

    Args:
        head: maps features to logits.
        draw: called before each epoch, for its samples.
        optimiser: of the head's parameters.
        epochs: number of passes over the samples.
        batch_size: samples per step.
        generator: of the order of the samples.
        schedule: factor on the learning rate, given the epoch and the number of epochs.
        loss: of logits and classes.
        rate_option: option of the learning rate, for the error message.

    Returns:
        The mean loss of each epoch.

    Raises:
        OneaError: a loss is not finite.
    """
    (group,) = optimiser.param_groups
    rate, mean_losses = group["lr"], []
    for epoch in range(epochs):
        group["lr"] = rate * schedule(epoch, epochs)
        features, labels = draw()
        batch_losses = []
        for rows in torch.randperm(len(labels), generator=generator).to(labels.device).split(batch_size):
            value = loss(head(features[rows]), labels[rows])
            optimiser.zero_grad(set_to_none=True)
            value.backward()
            optimiser.step()
            batch_losses.append(value.detach())
        mean = to_float64(torch.stack(batch_losses)).mean()
        if not torch.isfinite(mean):
            raise OneaError(
                f"The loss of the classifier alignment became {float(mean)} in epoch {epoch + 1}; "
                f"lower its learning rate{rate_option and f' ({rate_option})'}."
            )
        mean_losses.append(float(mean))
    return mean_losses


class ScaledHead(nn.Module):
    """A linear head without bias, with a learned scale for each class. Its weights are initialised with zeros."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(classes, width))
        self.scale = nn.Parameter(torch.ones(classes))

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        logits: Tensor = self.scale * F.linear(features, self.weight)
        return logits


@dataclass(frozen=True)
class SampledHead(Classifier):
    """The head of SLDC: trained with all classes on samples from their Gaussians.

    It depends on the statistics alone: the published head continues from the rows that the tasks trained.

    Attributes:
        samples: samples of each class, drawn once.
        epochs: passes over the samples.
        learning_rate: peak learning rate of Adam; the last is a tenth of it.
        weight_decay: weight decay of Adam.
        batch_share: samples per step, in multiples of the number of classes.
        ridge: variance added to every direction of every class.
        seed: seed of the samples and their order.
    """

    title: ClassVar[str] = "Head on samples (SLDC)"
    paper: ClassVar[str] = "https://arxiv.org/abs/2511.09926"
    stores: ClassVar[str] = "a mean and a matrix per class"

    samples: Count = 1024
    epochs: Count = 6
    learning_rate: NotNegative = 5e-4
    weight_decay: NotNegative = 1e-4
    batch_share: Positive = 3.2
    ridge: NotNegative = 0.01
    seed: int = 0

    def statistics(self, width: int) -> ClassStatistics:
        """Means and full scatter matrices."""
        return ClassStatistics.empty(width, directions=width)

    def fit(self, statistics: Statistics) -> Scorer:
        """Draw samples and train the head on them."""
        assert isinstance(statistics, ClassStatistics)
        generator = seeds.generator(self.seed, statistics.classes, "head on samples")
        features, labels = draw_features(statistics, [self.samples] * statistics.classes, generator, self.ridge)
        head = ScaledHead(statistics.width, statistics.classes).to(features.device)
        adam = torch.optim.Adam(head.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        with torch.enable_grad():
            align_classifier(
                head,
                lambda: (features, labels),
                optimiser=adam,
                epochs=self.epochs if len(labels) else 0,
                batch_size=max(1, int(self.batch_share * statistics.classes)),
                generator=generator,
                schedule=schedules.cosine_to(0.1),
                loss=symmetric_cross_entropy,
            )
        weight = to_float64(head.scale.detach()[:, None] * head.weight.detach())
        return LinearScores(weight, weight.new_zeros(len(weight)))
