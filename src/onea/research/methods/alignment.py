# SPDX-License-Identifier: Apache-2.0
"""Classifier alignment: a classifier retrained on features sampled from Gaussians of the classes seen."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from onea import schedules
from onea.classifiers.alignment import align_classifier
from onea.errors import OneaError
from onea.learner.optimisation import Schedule
from onea.vit.heads import class_means

Covariance = Literal["full", "diagonal"]


class Gaussians:
    """A Gaussian of the features of each class, from which features can be sampled in place of old images.

    A full covariance is stored as the lower triangle of its Cholesky factor, a diagonal one as standard deviations.
    ``jitter`` is added to every variance, so that the covariance of a class with fewer images than dimensions is
    positive definite. The covariance of a single image is zero; with ``borrows`` it is the mean of those of the other
    classes.
    """

    def __init__(
        self,
        width: int,
        covariance: Covariance = "full",
        *,
        jitter: float = 1e-4,
        borrows: bool = False,
        device: torch.device | None = None,
    ):
        self.width, self.covariance, self.jitter, self.device = width, covariance, jitter, device
        self.borrows = borrows
        self._rows, self._columns = torch.tril_indices(width, width, device=device)
        size = width if covariance == "diagonal" else len(self._rows)
        self.means = torch.empty(0, width, device=device)
        self.factors = torch.empty(0, size, device=device)

    def __len__(self) -> int:
        return len(self.means)

    def add(self, features: Tensor, labels: Tensor, classes: range) -> None:
        """Add new classes, with features ``[N, width]`` and the unbiased covariance."""
        # In float64 on the CPU: in float32 the factorisation may fail with a jitter of 1e-4.
        features, labels = features.detach().cpu().double(), labels.cpu()
        if not torch.isfinite(features).all():
            raise OneaError("The features contain NaN or infinity; lower the learning rate (--learning-rate).")
        means = class_means(features, labels, classes)
        centred = [features[labels == position] - mean for position, mean in zip(classes, means, strict=True)]
        factors = [self._factor(self._spread(rows)) for rows in centred]
        if self.borrows and min(map(len, centred)) == 1:
            factors = self._lend(factors, [len(rows) for rows in centred])
        self.means = torch.cat([self.means, means.float().to(self.device)])
        self.factors = torch.cat([self.factors, torch.stack(factors).float().to(self.device)])

    def factor_of(self, position: int) -> Tensor:
        """The Cholesky factor ``[width, width]`` of the covariance of a class."""
        stored = self.factors[position]
        return torch.diag(stored) if self.covariance == "diagonal" else self._triangle(stored)

    def scale_means(self, scales: Tensor) -> Gaussians:
        """The same Gaussians with the mean of each class multiplied by a number; they share their covariances."""
        scaled = copy.copy(self)
        scaled.means = self.means * scales[:, None]
        return scaled

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample ``count`` features of each class, with their labels."""
        samples = []
        for position, mean in enumerate(self.means):
            noise = torch.randn(count, self.width, generator=generator).to(self.device)
            diagonal = self.covariance == "diagonal"
            spread = noise * self.factors[position] if diagonal else noise @ self.factor_of(position).T
            samples.append(mean + spread)
        return torch.cat(samples), torch.arange(len(self), device=self.device).repeat_interleave(count)

    def state_dict(self) -> dict[str, Tensor]:
        """Means and factors of all classes."""
        return {"means": self.means, "factors": self.factors}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a saved state of any number of classes."""
        self.means, self.factors = state["means"].to(self.device), state["factors"].to(self.device)

    def _spread(self, centred: Tensor) -> Tensor:
        """The covariance of centred features, or their variances, with jitter."""
        degrees_of_freedom = max(len(centred) - 1, 1)
        if self.covariance == "diagonal":
            return centred.square().sum(0) / degrees_of_freedom + self.jitter
        return centred.T @ centred / degrees_of_freedom + self.jitter * torch.eye(self.width, dtype=centred.dtype)

    def _factor(self, spread: Tensor) -> Tensor:
        """A covariance as it is stored."""
        if self.covariance == "diagonal":
            return spread.sqrt()
        factor: Tensor = torch.linalg.cholesky(spread)
        return factor[self._rows.cpu(), self._columns.cpu()]

    def _lend(self, factors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Covariances of new classes; a class of one image gets the mean of those of the other classes, if any."""
        pairs = list(zip(factors, counts, strict=True))
        known = [*self.factors.cpu().double(), *(factor for factor, count in pairs if count > 1)]
        mean = self._mean_factor(known) if known else None
        return [factor if mean is None or count > 1 else mean for factor, count in pairs]

    def _mean_factor(self, stored: Sequence[Tensor]) -> Tensor:
        """The mean of stored covariances, as it is stored."""
        if self.covariance == "diagonal":
            return self._factor(torch.stack([deviations.square() for deviations in stored]).mean(0))
        total = stored[0].new_zeros(self.width, self.width)
        for factor in map(self._triangle, stored):
            total += factor @ factor.T
        return self._factor(total / len(stored))

    def _triangle(self, stored: Tensor) -> Tensor:
        factor = stored.new_zeros(self.width, self.width)
        factor[self._rows.to(stored.device), self._columns.to(stored.device)] = stored
        return factor


def align_head(
    head: nn.Module,
    gaussians: Gaussians,
    *,
    epochs: int,
    learning_rate: float,
    weight_decay: float,
    batch_size: int,
    generator: torch.Generator,
    schedule: Schedule = schedules.cosine,
) -> list[float]:
    """Retrain a head by SGD on features sampled from Gaussians, with all classes as candidates.

    Each epoch samples ``batch_size`` features per class and takes one step of this batch size per class.

    Returns:
        The mean loss of each epoch.

    Raises:
        OneaError: a loss is not finite.
    """
    return align_classifier(
        head,
        partial(gaussians.sample, batch_size, generator),
        optimiser=torch.optim.SGD(head.parameters(), lr=learning_rate, momentum=0.9, weight_decay=weight_decay),
        epochs=epochs,
        batch_size=batch_size,
        generator=generator,
        schedule=schedule,
        rate_option="--alignment-learning-rate",
    )
