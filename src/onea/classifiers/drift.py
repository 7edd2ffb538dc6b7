# SPDX-License-Identifier: Apache-2.0
"""Compensation of semantic drift: a map of features from before to after a change of the adapter.

Statistics of earlier classes become outdated when the adapter changes, and their images are gone. The new images have
features under both adapters, from which the drift is estimated (Yu et al., "Semantic Drift Compensation for
Class-Incremental Learning", arXiv 2004.00440). Ours is a linear map (Gomez-Villa et al., "Exemplar-free Continual
Representation Learning via Learnable Drift Compensation", arXiv 2407.08536), here in closed form by ridge regression.
Published maps are in ``onea.classifiers.published_drift``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onea.classifiers.base import Statistics
from onea.classifiers.samples import move_gaussians, standard_noise
from onea.classifiers.statistics import ClassStatistics, Gaussian
from onea.options import Validated
from onea.tensors import eigh, to_float64

_ROUNDING = 1e-9  # smaller relative improvements over the identity are rounding errors
_STRENGTHS = torch.logspace(-4, 4, 33, dtype=torch.float64)  # relative to the mean squared singular value


class Drift(Protocol):
    """A map of features that was fitted to a change of the adapter."""

    def move_features(self, features: Tensor) -> Tensor:
        """Features ``[..., width]`` after the change, from those before."""

    def move_statistics(self, statistics: Statistics) -> Statistics:
        """Statistics after the change; unchanged where the map is undefined."""


class DriftCompensation(Validated, ABC):
    """A way to estimate drift. Subclasses are dataclasses with their options as fields."""

    @abstractmethod
    def fit(self, before: Tensor, after: Tensor) -> Drift:
        """Fit to the features of the same images before and after a change, row by row ``[N, width]``."""


@dataclass(frozen=True)
class LinearDrift:
    """Features times a matrix ``[width, width]`` from the right."""

    matrix: Tensor

    def move_features(self, features: Tensor) -> Tensor:
        """Products in the precision of the features."""
        return features @ self.matrix.to(features)

    def move_statistics(self, statistics: Statistics) -> Statistics:
        """The statistics of the mapped features, which follow from those before."""
        return statistics.apply_drift_map(self.matrix)


@dataclass(frozen=True)
class SampledDrift:
    """A non-linear map, of whose effect on a class nothing but samples from its Gaussian can be known.

    The mean and the covariance of a class become ``share`` of those of the mapped samples and ``1 - share`` of the old
    ones. All classes have the same noise, whose sample mean and covariance are exact. So a map that moves nothing
    changes nothing, a linear one changes statistics as a matrix would, and no sampling error accumulates over updates.

    Attributes:
        move: the map of features ``[N, width]``.
        samples: number of samples of each class; at least twice the number of directions of its covariance are taken.
        share: weight of the mapped samples.
    """

    move: Callable[[Tensor], Tensor]
    samples: int
    share: float = 1.0

    def move_features(self, features: Tensor) -> Tensor:
        """``share`` of the mapped features and ``1 - share`` of the old ones."""
        rows = features.flatten(0, -2)
        return rows.lerp(self.move(rows), self.share).reshape(features.shape)

    def move_statistics(self, statistics: Statistics) -> Statistics:
        """Means and covariances of the mapped samples; without covariances, the means are mapped."""
        if isinstance(statistics, ClassStatistics) and statistics.scatter is None:
            return statistics.shift_means(self.move_features(statistics.means) - statistics.means)
        return move_gaussians(statistics, self._move)

    def _move(self, gaussian: Gaussian) -> Gaussian:
        """The Gaussian of the mapped samples, which are linear in their noise up to a residual."""
        root, split = gaussian.root, len(gaussian.own)
        noise = standard_noise(max(self.samples, 2 * len(root)), len(root)).to(root)
        moved = to_float64(self.move((gaussian.mean + noise @ root).float()))
        mean, scale = moved.mean(0), (len(moved) - 1) ** -0.5
        linear = noise.T @ (moved - mean) * scale**2
        residual = (moved - mean - noise @ linear) * scale
        new, old = self.share**0.5, (1 - self.share) ** 0.5
        return Gaussian(
            gaussian.mean.lerp(mean, self.share),
            torch.cat([new * linear[:split], new * residual, old * gaussian.own]),
            torch.cat([new * linear[split:], old * gaussian.shared]),
        )


@dataclass(frozen=True)
class RidgeDrift(DriftCompensation):
    """Ridge regression towards the identity, whose strength has the smallest leave-one-out error."""

    def fit(self, before: Tensor, after: Tensor) -> LinearDrift:
        """The matrix of ``fit_drift_map``."""
        return LinearDrift(fit_drift_map(before, after))


def fit_drift_map(before: Tensor, after: Tensor) -> Tensor:
    """The matrix ``M = I + argmin_D ||F D - (F' - F)||^2 + l ||D||^2`` from features ``F`` before to ``F'`` after.

    The result is ``[width, width]`` float64; multiply features by it from the right. The strength ``l`` minimises the
    leave-one-out error, for which ridge regression has a closed form: the residual divided by one minus the leverage.
    The result is the identity if no strength has a smaller error.

    >>> features = torch.eye(3)
    >>> torch.equal(fit_drift_map(features, features), torch.eye(3, dtype=torch.float64))
    True
    """
    features = to_float64(before)
    change = to_float64(after) - features
    eigenvalues, basis = eigh(features.T @ features)
    eigenvalues = eigenvalues.clamp_min(0)
    rotated = features @ basis
    covariance = rotated.T @ change
    best, smallest_error = torch.zeros_like(eigenvalues), float((change**2).sum())  # of the identity
    for strength in (_STRENGTHS * eigenvalues[-len(features) :].mean().cpu()).tolist():
        weights = 1 / (eigenvalues + strength)
        residual = change - rotated @ (weights[:, None] * covariance)
        leverage = (rotated**2 * weights).sum(1)
        error = float(((residual / (1 - leverage).clamp_min(1e-6)[:, None]) ** 2).sum())
        if error < smallest_error * (1 - _ROUNDING):
            best, smallest_error = weights, error
    drift: Tensor = basis @ (best[:, None] * covariance)
    return torch.eye(features.shape[1], dtype=torch.float64, device=features.device) + drift
