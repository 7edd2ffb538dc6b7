# SPDX-License-Identifier: Apache-2.0
"""Classifiers that need only the class means, or the means and the pooled covariance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.classifiers.base import Classifier, Scorer, Statistics
from onea.classifiers.statistics import ClassStatistics
from onea.schema import Positive, ZeroToOne
from onea.tensors import to_float64


@dataclass(frozen=True)
class NearestMean(Classifier):
    """Nearest class mean by cosine similarity: the prototypes of SimpleCIL and of the One-A paper."""

    title: ClassVar[str] = "Nearest mean (cosine)"
    paper: ClassVar[str] = "https://arxiv.org/abs/2303.07338"
    stores: ClassVar[str] = "a mean per class"

    def statistics(self, width: int) -> ClassStatistics:
        """Means only."""
        return ClassStatistics.empty(width, scatter=False)

    def fit(self, statistics: Statistics) -> Scorer:
        """Normalise the means."""
        assert isinstance(statistics, ClassStatistics)
        return CosineScores(statistics.means)


class _PooledCovariance(Classifier):
    """Base of classifiers that need the means and the pooled scatter."""

    stores: ClassVar[str] = "a mean per class and one matrix"

    def statistics(self, width: int) -> ClassStatistics:
        """Means and the pooled scatter."""
        return ClassStatistics.empty(width)


@dataclass(frozen=True)
class StreamingLDA(_PooledCovariance):
    """Streaming linear discriminant analysis (Hayes and Kanan, 2020) with equal priors.

        score_c(x) = (mean_c^T P x - 1/2 mean_c^T P mean_c) / width,   P = pooled covariance^(-1)

    Scores are divided by the number of features, so that their size does not depend on the network.

    Attributes:
        shrinkage: weight of the identity in the covariance, 1e-4 as published; 0 is the oracle approximating shrinkage
            towards the mean variance.
    """

    title: ClassVar[str] = "Streaming LDA"
    paper: ClassVar[str] = "https://arxiv.org/abs/1909.01520"

    shrinkage: ZeroToOne = 0.0

    def fit(self, statistics: Statistics) -> Scorer:
        """Solve for the weights of each class."""
        assert isinstance(statistics, ClassStatistics)
        means = to_float64(statistics.means)
        weight = torch.linalg.solve(self._covariance(statistics), means.T).T
        bias = -0.5 * (weight * means).sum(1)
        return LinearScores(weight / statistics.width, bias / statistics.width)

    def _covariance(self, statistics: ClassStatistics) -> Tensor:
        assert statistics.scatter is not None
        if not self.shrinkage:
            return statistics.covariance()
        identity = torch.eye(statistics.width, dtype=torch.float64, device=statistics.scatter.device)
        degrees_of_freedom = max(statistics.degrees_of_freedom, 1)
        return (1 - self.shrinkage) * statistics.scatter / degrees_of_freedom + self.shrinkage * identity


@dataclass(frozen=True)
class WhitenedCosine(_PooledCovariance):
    """Cosine similarity to the class means after whitening by the pooled covariance.

    Attributes:
        centred: subtract the mean of the class means first.
    """

    title: ClassVar[str] = "Whitened cosine"
    paper: ClassVar[str] = "https://arxiv.org/abs/2303.07338"

    centred: bool = True

    def fit(self, statistics: Statistics) -> Scorer:
        """Whiten and normalise the means."""
        assert isinstance(statistics, ClassStatistics)
        whitening = statistics.whitening()
        means = to_float64(statistics.means)
        origin = means.mean(0) if self.centred and statistics.classes else means.new_zeros(statistics.width)
        # The cosine does not depend on a common factor; this one keeps float32 away from its limits.
        whitening = whitening / whitening.diagonal().mean()
        return CosineScores((means - origin) @ whitening, whitening, origin @ whitening)


@dataclass(frozen=True)
class RidgeClassifier(_PooledCovariance):
    """Ridge regression of one-hot labels on features, with weights of length one: the classifier of DPCR.

        W = (sum_c G_c + strength I)^(-1) [n_c mean_c],   each column divided by its length

    ``G_c`` is the uncentred second moment of a class. Only the sum is needed, which is the pooled scatter plus
    ``n_c mean_c mean_c^T`` of every class.

    Attributes:
        strength: the ridge, 200 as published for CIFAR-100 and CUB-200, 2000 for Tiny-ImageNet.
    """

    title: ClassVar[str] = "Ridge regression (DPCR)"
    paper: ClassVar[str] = "https://arxiv.org/abs/2503.05423"

    strength: Positive = 200.0

    def fit(self, statistics: Statistics) -> Scorer:
        """Solve for the weights of each class."""
        assert isinstance(statistics, ClassStatistics)
        assert statistics.scatter is not None
        means = to_float64(statistics.means)
        sums = means * statistics.counts[:, None]
        identity = torch.eye(statistics.width, dtype=torch.float64, device=means.device)
        weight = torch.linalg.solve(statistics.scatter + sums.T @ means + self.strength * identity, sums.T).T
        return LinearScores(F.normalize(weight, dim=1), means.new_zeros(len(means)))


class CosineScores(Scorer):
    """Cosine similarity to each target, of the features or of ``features @ metric - shift``."""

    def __init__(self, targets: Tensor, metric: Tensor | None = None, shift: Tensor | None = None):
        affine = {} if metric is None or shift is None else {"metric": metric, "shift": shift}
        super().__init__(targets=F.normalize(targets.float(), dim=1).T.contiguous(), **affine)

    def forward(self, features: Tensor) -> Tensor:
        """Cosine similarities."""
        buffers = dict(self.named_buffers())
        if "metric" in buffers:
            features = features @ buffers["metric"] - buffers["shift"]
        return F.normalize(features, dim=1) @ buffers["targets"]


class LinearScores(Scorer):
    """Scores that are linear in the features; the mean over the classes is subtracted, so that float32 suffices."""

    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__(weight=weight - weight.mean(0), bias=bias - bias.mean())

    def forward(self, features: Tensor) -> Tensor:
        """Weighted sums of the features."""
        return F.linear(features, self.get_buffer("weight"), self.get_buffer("bias"))
