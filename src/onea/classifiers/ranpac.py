# SPDX-License-Identifier: Apache-2.0
"""RanPAC: ridge regression on random features, from sums that add up over tasks."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from onea import seeds
from onea.classifiers.contract import Classifier, Scorer, Statistics
from onea.schema import Count
from onea.tensors import Tensors, eigh, to_float64

_EVERY = 5  # of so many images of a class one is held out, to choose the strength
_PART = 4096  # images whose random features are in memory at once
_ROUNDING = 1e-7  # of float32, relative to the largest eigenvalue
_STRENGTHS = tuple(10.0**power for power in range(-8, 9))  # as published


@dataclass(frozen=True)
class RandomFeatureSums:
    """Products of random features with each other and with labels, of images that train and of those held out.

    Which images of a class are held out depends on their place in it, so the sums of tasks with different classes are
    the same in any order, and tasks of one class add up like all others.

    Attributes:
        projection: of features to random features, ``[width, M]``.
        gram: ``[2, M, M]``: of the images that train and of those held out.
        hits: random features summed by class, ``[2, M, C]``.
        counts: images of each class, ``[2, C]``.
        seed: of the projection.
    """

    projection: Tensor
    gram: Tensor
    hits: Tensor
    counts: Tensor
    seed: int

    @property
    def kind(self) -> Hashable:
        """Sums of the same random features."""
        return "random features", self.projection.shape[1], self.seed

    @property
    def richness(self) -> int:
        """Always the same."""
        return 0

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.counts.shape[1]

    def add(self, features: Tensor, rows: Tensor) -> Self:
        """The sums with these images."""
        if not len(rows):
            return self
        here = self.to(features.device)
        more = max(int(rows.max()) + 1 - here.classes, 0)
        gram, hits, counts = here.gram.clone(), F.pad(here.hits, (0, more)), F.pad(here.counts, (0, more))
        rows = rows.to(features.device)
        place = torch.zeros_like(rows)
        for row in rows.unique():
            own = (rows == row).nonzero()[:, 0]
            place[own] = torch.arange(len(own), device=rows.device) + counts[:, row].sum()
        held_out = (place % _EVERY == 1).long()  # a class of two images has one on each side
        for side in (0, 1):
            for chosen in (held_out == side).nonzero()[:, 0].split(_PART):
                random = F.relu(features[chosen].float() @ here.projection)
                wanted = F.one_hot(rows[chosen], hits.shape[2])
                gram[side] += random.T @ random
                hits[side] += random.T @ wanted.float()
                counts[side] += wanted.sum(0)
        return replace(here, gram=gram, hits=hits, counts=counts)

    def carry(self, by: Tensor) -> Self:
        """The same: nothing is known of random features after a map of the features."""
        return self

    def keep(self, rows: Tensor) -> Self:
        """The sums of these classes; the products of random features stay those of all."""
        return replace(self, hits=self.hits[:, :, rows], counts=self.counts[:, rows])

    def to(self, device: torch.device) -> Self:
        """The sums on another device."""
        return self.restored({name: value.to(device) for name, value in self.state_dict().items()})

    def state_dict(self) -> Tensors:
        """All of it."""
        return {"projection": self.projection, "gram": self.gram, "hits": self.hits, "counts": self.counts}

    def restored(self, state: Tensors) -> Self:
        """Sums from named tensors."""
        return replace(
            self, projection=state["projection"], gram=state["gram"], hits=state["hits"], counts=state["counts"]
        )


@dataclass(frozen=True)
class RanPAC(Classifier):
    """Ridge regression of one-hot labels on random features.

    The strength is the one of 10^-8 ... 10^8 that predicts held-out images best. Official code measures that on the
    newest task alone; here it is measured on sums of all tasks, so that their order does not matter.

    Attributes:
        features: the number of random features (M). The sums take 8 M^2 bytes.
        seed: of the random features.
    """

    title: ClassVar[str] = "RanPAC"
    paper: ClassVar[str] = "https://arxiv.org/abs/2307.02251"
    keeps: ClassVar[str] = "products of random features"
    carried: ClassVar[bool] = False

    features: Count = 2000
    seed: int = 0

    def statistics(self, width: int) -> RandomFeatureSums:
        """Empty sums."""
        size = self.features
        projection = torch.randn(width, size, generator=seeds.generator(self.seed, 0, "random features"))
        empty = torch.zeros(2, 0, dtype=torch.int64)
        return RandomFeatureSums(projection, torch.zeros(2, size, size), torch.zeros(2, size, 0), empty, self.seed)

    def fit(self, known: Statistics) -> Scorer:
        """One linear map of random features."""
        assert isinstance(known, RandomFeatureSums)
        gram, hits = to_float64(known.gram), to_float64(known.hits)
        strength = _strength(gram, hits)
        one = torch.eye(len(gram[0]), dtype=torch.float64, device=gram.device)
        weight = torch.linalg.solve(gram.sum(0) + strength * one, hits.sum(0))
        return RandomFeatureScores(projection=known.projection, weight=weight)


class RandomFeatureScores(Scorer):
    """Scores that are linear in random features."""

    def forward(self, features: Tensor) -> Tensor:
        """Weighted sums of the random features."""
        return F.relu(features @ self.get_buffer("projection")) @ self.get_buffer("weight")


def _strength(gram: Tensor, hits: Tensor) -> float:
    """The strength with the least squared error on the held-out images: ``tr W'G W - 2 tr W'H`` up to a constant."""
    values, vectors = eigh(gram[0])
    inside = vectors.T @ hits[0]
    turned, target = vectors.T @ gram[1] @ vectors, vectors.T @ hits[1]
    # The sums are kept in float32: what is smaller than their rounding would fit noise.
    strengths = sorted({max(strength, float(values[-1]) * _ROUNDING) for strength in _STRENGTHS})
    errors = []
    for strength in strengths:
        weight = inside / (values.clamp_min(0) + strength)[:, None]
        errors.append(float((weight * (turned @ weight)).sum() - 2 * (weight * target).sum()))
    return strengths[errors.index(min(errors))]
