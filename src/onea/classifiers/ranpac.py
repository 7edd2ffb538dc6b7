# SPDX-License-Identifier: Apache-2.0
"""RanPAC: ridge regression on random features, from Gram matrices that add up over tasks.

Paper: "RanPAC: Random Projections and Pre-trained Models for Continual Learning" (arXiv 2307.02251).
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
from onea.schema import Count
from onea.tensors import Tensors, eigh, rows_of_each, to_float64

_HOLD_OUT_EVERY = 5  # every fifth image of a class is held out to select the ridge parameter
_BATCH = 4096  # images whose random features are in memory at once
_ROUNDING = 1e-7  # of float32, relative to the largest eigenvalue
_STRENGTHS = tuple(10.0**power for power in range(-8, 9))  # as published


@dataclass(frozen=True)
class RandomFeatureSums:
    """The products ``H^T H`` and ``H^T Y`` of random features ``H`` and one-hot labels ``Y``.

    There are two of each: of the training images and of the held-out images. Which images are held out depends on their
    position in their class, so the sums do not depend on the order of tasks with different classes.

    Attributes:
        projection: projection of features to random features, ``[width, M]``.
        gram: ``H^T H`` of the training images and of the held-out ones, ``[2, M, M]``.
        hits: ``H^T Y``, ``[2, M, C]``.
        counts: images of each class, ``[2, C]``.
        seed: seed of the projection.
    """

    projection: Tensor
    gram: Tensor
    hits: Tensor
    counts: Tensor
    seed: int

    @classmethod
    def empty(cls, projection: Tensor, seed: int) -> Self:
        """Sums without images, for this projection."""
        size = projection.shape[1]
        counts = torch.zeros(2, 0, dtype=torch.int64)
        return cls(projection, torch.zeros(2, size, size), torch.zeros(2, size, 0), counts, seed)

    @property
    def kind(self) -> Hashable:
        """The random features."""
        return "random features", self.projection.shape[1], self.seed

    @property
    def detail(self) -> int:
        """There is only one level of detail."""
        return 0

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.counts.shape[1]

    def add(self, features: Tensor, labels: Tensor) -> Self:
        """The sums with more images."""
        if not len(labels):
            return self
        old = self.to(features.device)
        missing = max(int(labels.max()) + 1 - old.classes, 0)
        gram, hits, counts = old.gram.clone(), F.pad(old.hits, (0, missing)), F.pad(old.counts, (0, missing))
        labels = labels.to(features.device)
        position = torch.zeros_like(labels)
        for label, members in rows_of_each(labels):
            position[members] = torch.arange(len(members), device=labels.device) + counts[:, label].sum()
        held_out = (position % _HOLD_OUT_EVERY == 1).long()  # a class of two images has one in each split
        for split in (0, 1):
            for batch in (held_out == split).nonzero()[:, 0].split(_BATCH):
                random = F.relu(features[batch].float() @ old.projection)
                targets = F.one_hot(labels[batch], hits.shape[2])
                gram[split] += random.T @ random
                hits[split] += random.T @ targets.float()
                counts[split] += targets.sum(0)
        return replace(old, gram=gram, hits=hits, counts=counts)

    def apply_drift_map(self, drift_map: Tensor) -> Self:
        """Unchanged: random features are nonlinear, so a linear map of the features does not map them linearly."""
        return self

    def ridge_weights(self, strength: float) -> Tensor:
        """The weights ``(H^T H + l I)^(-1) H^T Y`` of all images, float64."""
        gram, hits = to_float64(self.gram).sum(0), to_float64(self.hits).sum(0)
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        weights: Tensor = torch.linalg.solve(gram + strength * identity, hits)
        return weights

    def select_strength(self) -> float:
        """The ridge parameter with the smallest squared error on held-out images.

        Up to a constant, the error is ``tr W^T (H^T H) W - 2 tr W^T (H^T Y)``, which is computed in the basis of the
        eigenvectors of the training images.
        """
        gram, hits = to_float64(self.gram), to_float64(self.hits)
        values, vectors = eigh(gram[0])
        projected = vectors.T @ hits[0]
        gram_held_out, hits_held_out = vectors.T @ gram[1] @ vectors, vectors.T @ hits[1]
        # A ridge parameter below the rounding errors of the float32 sums would fit noise.
        strengths = sorted({max(strength, float(values[-1]) * _ROUNDING) for strength in _STRENGTHS})
        errors = []
        for strength in strengths:
            weight = projected / (values.clamp_min(0) + strength)[:, None]
            errors.append(float((weight * (gram_held_out @ weight)).sum() - 2 * (weight * hits_held_out).sum()))
        return strengths[errors.index(min(errors))]

    def select_classes(self, classes: Tensor) -> Self:
        """The sums of these classes; the Gram matrices remain those of all classes."""
        return replace(self, hits=self.hits[:, :, classes], counts=self.counts[:, classes])

    def to(self, device: torch.device) -> Self:
        """The sums on another device."""
        return self.from_state_dict({name: value.to(device) for name, value in self.state_dict().items()})

    def state_dict(self) -> Tensors:
        """All sums as named tensors."""
        return {"projection": self.projection, "gram": self.gram, "hits": self.hits, "counts": self.counts}

    def from_state_dict(self, state: Tensors) -> Self:
        """Sums from named tensors."""
        parts: dict[str, Any] = {name: state[name] for name in self.state_dict()}
        return replace(self, **parts)


@dataclass(frozen=True)
class RanPAC(Classifier):
    """Ridge regression of one-hot labels on random features, ``W = (H^T H + l I)^(-1) H^T Y``, ``H = relu(X R)``.

    The ridge parameter ``l``, from 10^-8 to 10^8, is the one with the smallest error on held-out images of all tasks.
    The official code uses only those of the newest task, so its result depends on the order of tasks.

    Attributes:
        features: the number of random features (M). The sums take 8 M^2 bytes.
        seed: seed of the random features.
    """

    title: ClassVar[str] = "RanPAC"
    paper: ClassVar[str] = "https://arxiv.org/abs/2307.02251"
    stores: ClassVar[str] = "products of random features"
    follows_drift: ClassVar[bool] = False

    features: Count = 2000
    seed: int = 0

    def statistics(self, width: int) -> RandomFeatureSums:
        """Empty sums."""
        generator = seeds.generator(self.seed, 0, "random features")
        return RandomFeatureSums.empty(torch.randn(width, self.features, generator=generator), self.seed)

    def fit(self, statistics: Statistics) -> Scorer:
        """Select the ridge parameter and solve for the weights."""
        assert isinstance(statistics, RandomFeatureSums)
        weight = statistics.ridge_weights(statistics.select_strength())
        return RandomFeatureScores(projection=statistics.projection, weight=weight)


class RandomFeatureScores(Scorer):
    """Scores that are linear in random features."""

    def forward(self, features: Tensor) -> Tensor:
        """Weighted sums of the random features."""
        return F.relu(features @ self.get_buffer("projection")) @ self.get_buffer("weight")
