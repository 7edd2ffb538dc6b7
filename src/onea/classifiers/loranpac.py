# SPDX-License-Identifier: Apache-2.0
"""LoRanPAC: least squares on many random features, truncated to the leading singular vectors of all images so far.

Paper: "LoRanPAC: Low-rank Random Features and Pre-trained Models for Bridging Theory and Practice in Continual
Learning" (arXiv 2410.00645).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from onea import seeds
from onea.classifiers.base import Classifier, Scorer, Statistics
from onea.classifiers.ranpac import RandomFeatureScores
from onea.schema import Count, Fraction
from onea.tensors import Tensors, svd, to_float64

_MAX_BLOCK = 10_000  # images that are added at once
_ROUNDING = 1e-6  # of float32; singular values below this share of the largest one are rounding errors


@dataclass(frozen=True)
class TruncatedFeatures:
    """A truncated singular value decomposition ``U diag(s) V^T`` of ``H^T``, for random features ``H``, and ``H^T Y``.

    Attributes:
        projection: projection of features to random features, ``[width, E]``.
        basis: left singular vectors ``U``, ``[E, rank]``.
        values: singular values ``s``, descending, ``[rank]``.
        hits: ``H^T Y`` with one-hot labels ``Y``, ``[E, C]``.
        counts: number of images of each class, ``[C]``.
        energy: the sum of squares of ``H``, in float64; ``values`` have a part of it.
        seed: seed of the projection.
        kept: rank that is kept, relative to the number of images and to that of random features.
        max_rank: upper bound of the rank.
    """

    projection: Tensor
    basis: Tensor
    values: Tensor
    hits: Tensor
    counts: Tensor
    energy: Tensor
    seed: int
    kept: float
    max_rank: int

    @property
    def kind(self) -> Hashable:
        """The random features and the truncation."""
        return "truncated random features", self.projection.shape[1], self.seed, self.kept, self.max_rank

    @property
    def detail(self) -> int:
        """There is only one level of detail."""
        return 0

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.counts)

    @property
    def energy_kept(self) -> float:
        """The share of the sum of squares of all random features that the truncation has kept."""
        total = float(self.energy)
        return float((to_float64(self.values) ** 2).sum()) / total if total else 1.0

    def add(self, features: Tensor, labels: Tensor) -> Self:
        """The decomposition with more images, block by block."""
        new, classes = self.to(features.device), max(self.classes, int(labels.max()) + 1 if len(labels) else 0)
        missing = classes - new.classes
        new = replace(new, hits=F.pad(new.hits, (0, missing)), counts=F.pad(new.counts, (0, missing)))
        for rows, block in zip(labels.split(_MAX_BLOCK), features.split(_MAX_BLOCK), strict=True):
            new = new._add_block(F.relu(block.float() @ new.projection), rows.to(features.device))
        return new

    def _add_block(self, random: Tensor, labels: Tensor) -> Self:
        """The decomposition of ``[U diag(s), H^T]``, from that of a small matrix (Brand, 2002)."""
        targets = F.one_hot(labels, self.classes)
        counts = self.counts + targets.sum(0)
        inside = self.basis.T @ random.T
        outside, triangle = torch.linalg.qr(random.T - self.basis @ inside)
        small = torch.cat(
            [
                torch.cat([torch.diag(self.values), inside], dim=1),
                torch.cat([triangle.new_zeros(len(triangle), len(self.values)), triangle], dim=1),
            ]
        )
        left, values, _ = svd(small)
        ranks = round(self.kept * int(counts.sum())), int(self.kept * len(self.hits)), self.max_rank
        rank = min(max(1, min(ranks)), int((values > _ROUNDING * values[0]).sum()))
        basis = torch.cat([self.basis, outside], dim=1) @ left[:, :rank]
        basis, signs = torch.linalg.qr(basis)  # rounding errors make it less orthogonal with each block
        return replace(
            self,
            basis=basis * signs.diagonal().sign(),
            values=values[:rank],
            hits=self.hits + random.T @ targets.to(random),
            counts=counts,
            energy=self.energy + to_float64(random.square().sum(1)).sum().to(self.energy.device),
        )

    def apply_drift_map(self, drift_map: Tensor) -> Self:
        """Unchanged: random features are nonlinear, so a linear map of the features does not map them linearly."""
        return self

    def select_classes(self, classes: Tensor) -> Self:
        """The sums of these classes; the decomposition remains that of all images."""
        return replace(self, hits=self.hits[:, classes], counts=self.counts[classes])

    def to(self, device: torch.device) -> Self:
        """The tensors on another device; the energy stays on the CPU."""
        parts = {name: value.to(device) for name, value in self.state_dict().items() if name != "energy"}
        return self.from_state_dict(parts | {"energy": self.energy})

    def state_dict(self) -> Tensors:
        """All tensors by name."""
        names = ("projection", "basis", "values", "hits", "counts", "energy")
        return {name: getattr(self, name).contiguous() for name in names}

    def from_state_dict(self, state: Tensors) -> Self:
        """Statistics from named tensors."""
        parts: dict[str, Any] = {name: state[name] for name in self.state_dict()}
        return replace(self, **parts | {"energy": state["energy"].cpu()})


@dataclass(frozen=True)
class LoRanPAC(Classifier):
    """Truncated least squares of one-hot labels on random features, without a ridge.

        W = U diag(s)^(-2) U^T H^T Y,   H = relu(X R),   H^T ~ U diag(s) V^T

    The truncation is the same for all images, so small tasks, whose singular values are small, lose most.

    Attributes:
        features: number of random features (E); 100,000 as published. For the rank ``k`` they take 4 E k bytes.
        kept: rank that is kept, relative to the number of images.
        max_rank: upper bound of the rank.
        seed: seed of the random features.
    """

    title: ClassVar[str] = "LoRanPAC"
    paper: ClassVar[str] = "https://arxiv.org/abs/2410.00645"
    stores: ClassVar[str] = "singular vectors of random features"
    follows_drift: ClassVar[bool] = False

    features: Count = 20_000
    kept: Fraction = 0.75
    max_rank: Count = 10_000
    seed: int = 0

    def statistics(self, width: int) -> TruncatedFeatures:
        """A decomposition of rank zero."""
        size, empty = self.features, torch.empty(0)
        return TruncatedFeatures(
            torch.randn(width, size, generator=seeds.generator(self.seed, 0, "random features")),
            torch.zeros(size, 0),
            empty,
            torch.zeros(size, 0),
            empty.long(),
            torch.zeros((), dtype=torch.float64),
            self.seed,
            self.kept,
            self.max_rank,
        )

    def fit(self, statistics: Statistics) -> Scorer:
        """Solve for the weights."""
        assert isinstance(statistics, TruncatedFeatures)
        inner = (statistics.basis.T @ statistics.hits) / statistics.values[:, None] ** 2
        return RandomFeatureScores(projection=statistics.projection, weight=statistics.basis @ inner)
