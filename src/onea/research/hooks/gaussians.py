# SPDX-License-Identifier: Apache-2.0
"""A Gaussian per class in feature space: what can stand in for old images when a classifier is retrained."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import schedules
from onea.errors import OneaError
from onea.tensors import to_float64
from onea.vit.heads import class_means

Covariance = Literal["full", "diagonal"]


class Gaussians:
    """Mean and spread of the features of every class seen, to draw features from.

    A full covariance is kept as its Cholesky factor, and of that only the lower triangle (half of the memory; nothing
    to factorise again); a diagonal one as standard deviations. ``jitter`` is added to every variance, so that a class
    with fewer images than dimensions, even a single one, still has a proper Gaussian.
    """

    def __init__(
        self, width: int, covariance: Covariance = "full", *, jitter: float = 1e-4, device: torch.device | None = None
    ):
        self.width, self.covariance, self.jitter, self.device = width, covariance, jitter, device
        self._rows, self._columns = torch.tril_indices(width, width, device=device)
        size = width if covariance == "diagonal" else len(self._rows)
        self.means = torch.empty(0, width, device=device)
        self.factors = torch.empty(0, size, device=device)

    def __len__(self) -> int:
        return len(self.means)

    def add(self, features: Tensor, labels: Tensor, classes: range) -> None:
        """Take up new classes from their features ``[N, width]``; the unbiased covariance, zero for a single image."""
        # In float64 on the CPU: exact enough for a factorisation that float32 would lose to a jitter of 1e-4.
        features, labels = features.detach().cpu().double(), labels.cpu()
        if not torch.isfinite(features).all():
            raise OneaError("The features hold a NaN or infinity; lower the learning rate (--learning-rate).")
        means = class_means(features, labels, classes)
        factors = [
            self._factor(features[labels == position] - mean) for position, mean in zip(classes, means, strict=True)
        ]
        self.means = torch.cat([self.means, means.float().to(self.device)])
        self.factors = torch.cat([self.factors, torch.stack(factors).float().to(self.device)])

    def factor_of(self, position: int) -> Tensor:
        """The lower triangular ``[width, width]`` matrix whose product with its transpose is a class's covariance."""
        stored = self.factors[position]
        if self.covariance == "diagonal":
            return torch.diag(stored)
        factor = stored.new_zeros(self.width, self.width)
        factor[self._rows, self._columns] = stored
        return factor

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw ``count`` features of every class, class by class, with their labels."""
        drawn = []
        for position, mean in enumerate(self.means):
            noise = torch.randn(count, self.width, generator=generator).to(self.device)
            diagonal = self.covariance == "diagonal"
            spread = noise * self.factors[position] if diagonal else noise @ self.factor_of(position).T
            drawn.append(mean + spread)
        return torch.cat(drawn), torch.arange(len(self), device=self.device).repeat_interleave(count)

    def state_dict(self) -> dict[str, Tensor]:
        """Means and factors of all classes."""
        return {"means": self.means, "factors": self.factors}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take them back, however many they are."""
        self.means, self.factors = state["means"].to(self.device), state["factors"].to(self.device)

    def _factor(self, centred: Tensor) -> Tensor:
        freedom = max(len(centred) - 1, 1)
        if self.covariance == "diagonal":
            return (centred.square().sum(0) / freedom + self.jitter).sqrt()
        covariance = centred.T @ centred / freedom + self.jitter * torch.eye(self.width, dtype=centred.dtype)
        factor: Tensor = torch.linalg.cholesky(covariance)
        return factor[self._rows.cpu(), self._columns.cpu()]


def align(
    head: nn.Module,
    gaussians: Gaussians,
    *,
    epochs: int,
    learning_rate: float,
    weight_decay: float,
    batch_size: int,
    generator: torch.Generator,
) -> list[float]:
    """Retrain a classifier on drawn features alone, by plain cross-entropy over all classes seen.

    Every epoch draws ``batch_size`` features of each class and takes one step of that size for each class.

    Returns:
        The mean loss of each epoch.

    Raises:
        OneaError: a loss is not finite.
    """
    optimiser = torch.optim.SGD(head.parameters(), lr=learning_rate, momentum=0.9, weight_decay=weight_decay)
    means = []
    for epoch in range(epochs):
        optimiser.param_groups[0]["lr"] = learning_rate * schedules.cosine(epoch, epochs)
        features, labels = gaussians.sample(batch_size, generator)
        values = []
        for chosen in torch.randperm(len(labels), generator=generator).to(labels.device).split(batch_size):
            value = F.cross_entropy(head(features[chosen]), labels[chosen])
            optimiser.zero_grad(set_to_none=True)
            value.backward()
            optimiser.step()
            values.append(value.detach())
        mean = to_float64(torch.stack(values)).mean()
        if not torch.isfinite(mean):
            raise OneaError(
                f"The loss of the classifier alignment became {float(mean)} in epoch {epoch + 1}; "
                "lower its learning rate (--alignment-learning-rate)."
            )
        means.append(float(mean))
    return means
