# SPDX-License-Identifier: Apache-2.0
"""Published ways to compensate drift, from features ``F`` of new images before and ``F'`` after a change.

- DPCR: "Semantic Shift Estimation via Dual-Projection and Classifier Reconstruction" (arXiv 2503.05423).
- SLDC: "Compensating Distribution Drifts in Class-incremental Learning" (arXiv 2511.09926).
- HopDC: the attention over anchors in "Low-Rank Regularised Gaussian Discriminant Analysis" (arXiv 2602.00144).

Each follows its authors' code; what differs is an option, whose other value is theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import schedules, seeds
from onea.classifiers.base import Statistics
from onea.classifiers.drift import Drift, DriftCompensation, LinearDrift, RidgeDrift, SampledDrift
from onea.classifiers.samples import move_gaussians
from onea.classifiers.statistics import ClassStatistics, Gaussian
from onea.errors import OneaError
from onea.options import make_options
from onea.schema import Count, NotNegative, Positive, ZeroToOne
from onea.tensors import eigh, row_blocks, svd, to_float64

Carry = Literal["none", "ridge", "dpcr", "sldc", "hopdc"]
"""The ways to carry statistics of old classes along when the adapter changes."""
_MAP_RATE, _MAP_SCHEDULE, _MAP_BATCH = 1e-3, schedules.cosine_to(0.5), 32  # of SLDC's non-linear map, as published
_RCOND = 1e-12  # of second moments; directions below this share of the largest one have no images


@dataclass(frozen=True)
class DPCR(DriftCompensation):
    """DPCR: least squares, then each class is projected onto the span of its old features.

    The map of class ``c`` is ``P V_c V_c^T`` with ``P = (F^T F + e I)^-1 F^T F'`` and ``V_c`` the directions of its
    uncentred second moment before. The projection needs statistics with all directions of a class.

    Attributes:
        strength: ridge ``e`` of the least squares, which only keeps them solvable.
        rank_tolerance: directions of a class whose second moment is at most this share of the largest one are not in
            its span. 0 projects nothing: the official code keeps every positive singular value, and rounding errors
            make all of them positive.
        small_tasks: the map of a task with fewer images than features, in directions without images: ``keep`` old
            features there (ours, a ridge towards the identity), or erase them, as the ``official`` code does.
    """

    strength: Positive = 1e-9
    rank_tolerance: ZeroToOne = 1e-6
    small_tasks: Literal["keep", "official"] = "keep"

    def fit(self, before: Tensor, after: Tensor) -> Drift:
        """The least-squares matrix, and the projection of each class."""
        keeps = self.small_tasks == "keep" and len(before) < before.shape[1]
        matrix = ridge_map(before, after, self.strength, towards_identity=keeps)
        return ProjectedDrift(matrix, self.rank_tolerance) if self.rank_tolerance else LinearDrift(matrix)


@dataclass(frozen=True)
class ProjectedDrift(LinearDrift):
    """A matrix, after which each class is projected onto the span of its features before.

    Attributes:
        rank_tolerance: smallest second moment of a direction in the span, relative to the largest one.
    """

    rank_tolerance: float

    def move_statistics(self, statistics: Statistics) -> Statistics:
        """Statistics of single classes are mapped and projected, others are only mapped."""
        if isinstance(statistics, ClassStatistics) and statistics.factors is not None:
            return move_gaussians(statistics, self._move)
        return super().move_statistics(statistics)

    def _move(self, gaussian: Gaussian) -> Gaussian:
        _, values, axes = svd(torch.cat([gaussian.mean[None], gaussian.root]))
        span = axes[values**2 > self.rank_tolerance * values[:1] ** 2]
        projection = self.matrix.to(span) @ span.T @ span
        return Gaussian(gaussian.mean @ projection, gaussian.own @ projection, gaussian.shared @ projection)


@dataclass(frozen=True)
class SLDC(DriftCompensation):
    """SLDC: regression of unit vectors, linear and blended with the identity, or weakly non-linear.

    The linear map is ``(1 - w) (X^T X + g I)^-1 X^T Y + w I`` with normalised features ``X`` before and ``Y`` after,
    and ``w = exp(-n / (alpha width))`` for ``n`` images. The other one is ``x -> |x| g(x / |x|)`` with
    ``g(x) = a_0 x + a_1 x W + a_2 MLP(x)``, whose weights ``a`` are a softmax; it moves samples of each class.

    Attributes:
        kind: ``linear`` (alpha_1 in the paper) or ``nonlinear`` (alpha_2).
        alpha: number of images, relative to the features, at which the weight of the identity is 1/e.
        strength: ridge ``g`` towards zero.
        ridge: variance added to every direction of every class at each change, where it accumulates. The official code
            adds 0.01 (linear) or 0.001 (nonlinear); here the classifier adds its own to what it draws.
        steps: steps of the training of the non-linear map.
        samples: features that it moves, for each class.
        weak_share: weight of the loss ``(a_0 + a_1 - 1)^2``, which keeps the MLP small.
        weak_gradient: whether that loss is back-propagated; in the official code of the paper it is not.
        seed: seed of the MLP and of its batches.
    """

    kind: Literal["linear", "nonlinear"] = "linear"
    alpha: Positive = 1.0
    strength: Positive = 1e-4
    ridge: NotNegative = 0.0
    steps: Count = 5000
    samples: Count = 7680
    weak_share: NotNegative = 0.5
    weak_gradient: bool = True
    seed: int = 0

    def fit(self, before: Tensor, after: Tensor) -> Drift:
        """The blended matrix, or the trained map."""
        old, new = (F.normalize(to_float64(features), dim=1) for features in (before, after))
        drift: Drift
        if self.kind == "linear":
            count, width = old.shape
            identity = torch.eye(width, dtype=old.dtype, device=old.device)
            drift = LinearDrift(
                ridge_map(old, new, self.strength).lerp(identity, math.exp(-count / self.alpha / width))
            )
        else:
            drift = SampledDrift(self._train(old.float(), new.float()), self.samples)
        return RidgedDrift(drift, self.ridge) if self.ridge else drift

    def _train(self, old: Tensor, new: Tensor) -> WeaklyNonlinearMap:
        with torch.random.fork_rng([]):
            torch.manual_seed(seeds.derive(self.seed, 0, "weakly non-linear map"))
            network = WeaklyNonlinearMap(old.shape[1]).to(old.device)
        batches = seeds.generator(self.seed, 0, "weakly non-linear batches")
        optimiser = torch.optim.Adam(network.parameters(), lr=_MAP_RATE)
        for step in range(self.steps):
            optimiser.param_groups[0]["lr"] = _MAP_RATE * _MAP_SCHEDULE(step, self.steps)
            rows = torch.randint(len(old), (_MAP_BATCH,), generator=batches)
            loss = F.mse_loss(network.unit(old[rows]), new[rows])
            if self.weak_gradient:
                loss = loss + self.weak_share * (network.shares()[:2].sum() - 1) ** 2
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return network.requires_grad_(False)


class WeaklyNonlinearMap(nn.Module):
    """``x -> |x| g(x / |x|)`` with ``g(x) = a_0 x + a_1 x W + a_2 MLP(x)`` and a softmax ``a``."""

    def __init__(self, width: int):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([1.0, 0.0, 0.0]))
        self.linear = nn.Parameter(torch.eye(width))
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def shares(self) -> Tensor:
        """The weights of the three parts."""
        return self.logits.softmax(0)

    def unit(self, x: Tensor) -> Tensor:
        """The map of unit vectors."""
        identity, linear, nonlinear = self.shares()
        output: Tensor = identity * x + linear * (x @ self.linear) + nonlinear * self.mlp(x)
        return output

    def forward(self, features: Tensor) -> Tensor:
        """The map of features, whose lengths are scaled alike."""
        rows = features.to(self.linear)
        mapped: Tensor = rows.norm(dim=1, keepdim=True) * self.unit(F.normalize(rows, dim=1))
        return mapped.to(features)


@dataclass(frozen=True)
class RidgedDrift:
    """A map, after which a variance is added to every direction of every class."""

    drift: Drift
    ridge: float

    def move_features(self, features: Tensor) -> Tensor:
        """Only mapped."""
        return self.drift.move_features(features)

    def move_statistics(self, statistics: Statistics) -> Statistics:
        """Mapped, with larger covariances; means alone have none."""
        return move_gaussians(self.drift.move_statistics(statistics), self._widen)

    def _widen(self, gaussian: Gaussian) -> Gaussian:
        variance = self.ridge**0.5 * torch.eye(len(gaussian.mean)).to(gaussian.mean)
        return replace(gaussian, own=torch.cat([gaussian.own, variance]))


@dataclass(frozen=True)
class HopDC(DriftCompensation):
    """Hopfield drift compensation: each sample of a class moves as the new images do that it resembles.

    ``h(x) = x + sum_i a_i (F' - F)_i`` with ``a = softmax(cos(x, F_i) / temperature)`` over the nearest images.

    Attributes:
        temperature: temperature of the attention.
        neighbours: number of images with the largest cosines that it takes into account.
        samples: samples of each class, from whose new positions its mean and covariance are computed.
        share: weight of these in the new mean and covariance; the rest are the old ones.
    """

    temperature: Positive = 0.05
    neighbours: Count = 400
    samples: Count = 2000
    share: ZeroToOne = 0.9

    def fit(self, before: Tensor, after: Tensor) -> SampledDrift:
        """The attention over these images."""
        attention = AnchorAttention(before.float(), after.float(), self.temperature, self.neighbours)
        return SampledDrift(attention.move, self.samples, self.share)


@dataclass(frozen=True)
class AnchorAttention:
    """Features move as anchors do that they resemble.

    Attributes:
        before: features of the anchors before, ``[N, width]`` float32.
        after: and after.
        temperature: temperature of the softmax of cosines.
        neighbours: number of anchors in the softmax.
    """

    before: Tensor
    after: Tensor
    temperature: float
    neighbours: int

    def move(self, features: Tensor) -> Tensor:
        """Features ``[M, width]`` after the change."""
        moved, keys, change = features.to(self.before), F.normalize(self.before, dim=1), self.after - self.before
        parts = [self._shifts(moved[rows], keys, change) for rows in row_blocks(len(moved), len(keys))]
        return features + torch.cat([moved[:0], *parts]).to(features)

    def _shifts(self, features: Tensor, keys: Tensor, change: Tensor) -> Tensor:
        scores = F.normalize(features, dim=1) @ keys.T / self.temperature
        nearest = scores.topk(min(self.neighbours, len(keys)), dim=1)
        weights = torch.zeros_like(scores).scatter(1, nearest.indices, nearest.values.softmax(1))
        return weights @ change


def ridge_map(before: Tensor, after: Tensor, strength: float, *, towards_identity: bool = False) -> Tensor:
    """The matrix ``argmin_P |F P - F'|^2 + l |P|^2``, or with ``|P - I|^2``, ``[width, width]`` float64.

    >>> features = torch.tensor([[1.0, 0.0]])
    >>> ridge_map(features, 3 * features, 1e-9).diagonal().tolist()[1]
    0.0
    >>> ridge_map(features, 3 * features, 1e-9, towards_identity=True).diagonal().tolist()[1]
    1.0
    """
    old, new = to_float64(before), to_float64(after)
    identity = torch.eye(old.shape[1], dtype=old.dtype, device=old.device)
    target = identity if towards_identity else torch.zeros_like(identity)
    values, vectors = eigh(old.T @ old)
    present = values > _RCOND * values[-1]
    values, vectors = values[present], vectors[:, present]
    weights = vectors.T @ old.T @ (new - old @ target) / (values + strength)[:, None]
    found: Tensor = target + vectors @ weights
    return found


_COMPENSATIONS: dict[str, type[DriftCompensation]] = {"ridge": RidgeDrift, "dpcr": DPCR, "sldc": SLDC, "hopdc": HopDC}


def make_compensation(name: Carry, **options: Any) -> DriftCompensation | None:
    """The compensation of this name, None for ``none``; options may be text, as a command line gives them.

    >>> make_compensation("hopdc", neighbours="200").neighbours
    200
    """
    if name != "none":
        return make_options(_COMPENSATIONS[name], options)
    if options:
        raise OneaError(f"'{next(iter(options))}' is an option of a drift map, but there is none; choose one as carry.")
    return None
