# SPDX-License-Identifier: Apache-2.0
"""Classifiers that compare an image with the class means, plainly or where all classes are equally wide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.classifiers.contract import Classifier, Scorer, Statistics
from onea.classifiers.statistics import ClassStatistics, shrunk_covariance
from onea.schema import ZeroToOne
from onea.tensors import to_float64


@dataclass(frozen=True)
class NearestMean(Classifier):
    """The class whose mean feature has the smallest angle to the image's: the prototypes of the paper."""

    title: ClassVar[str] = "Nearest mean (cosine)"
    paper: ClassVar[str] = "https://arxiv.org/abs/2303.07338"
    keeps: ClassVar[str] = "a mean per class"

    def statistics(self, width: int) -> ClassStatistics:
        """Means alone."""
        return ClassStatistics.empty(width, scatter=False)

    def fit(self, known: Statistics) -> Scorer:
        """Cosine to every mean."""
        assert isinstance(known, ClassStatistics)
        return CosineScores(known.means)


class _Pooled(Classifier):
    """Classifiers that keep means and the scatter that all classes share."""

    keeps: ClassVar[str] = "a mean per class, one matrix"

    def statistics(self, width: int) -> ClassStatistics:
        """Means and one scatter."""
        return ClassStatistics.empty(width)


@dataclass(frozen=True)
class StreamingLDA(_Pooled):
    """Linear discriminant analysis with equal priors, on sums that grow with every image.

    Scores are log-likelihoods divided by the number of features, so that their size does not depend on the network.

    Attributes:
        shrinkage: share of the identity in the covariance, as published (1e-4); 0 chooses the share from the data, by
            the oracle approximating shrinkage towards the mean variance.
    """

    title: ClassVar[str] = "Streaming LDA"
    paper: ClassVar[str] = "https://arxiv.org/abs/1909.01520"

    shrinkage: ZeroToOne = 0.0

    def fit(self, known: Statistics) -> Scorer:
        """One linear map."""
        assert isinstance(known, ClassStatistics)
        means = to_float64(known.means)
        weight = torch.linalg.solve(self._covariance(known), means.T).T
        bias = -0.5 * (weight * means).sum(1)
        return LinearScores(weight / known.width, bias / known.width)

    def _covariance(self, known: ClassStatistics) -> Tensor:
        assert known.scatter is not None
        if not self.shrinkage:
            return shrunk_covariance(known.scatter, known.freedom)
        one = torch.eye(known.width, dtype=torch.float64, device=known.scatter.device)
        return (1 - self.shrinkage) * known.scatter / max(known.freedom, 1) + self.shrinkage * one


@dataclass(frozen=True)
class WhitenedCosine(_Pooled):
    """Cosine to the class means in the space where deviations are equally wide in all directions.

    Attributes:
        centred: take the mean of the class means for the origin.
    """

    title: ClassVar[str] = "Whitened cosine"
    paper: ClassVar[str] = "https://arxiv.org/abs/2303.07338"

    centred: bool = True

    def fit(self, known: Statistics) -> Scorer:
        """One linear map and a cosine."""
        assert isinstance(known, ClassStatistics)
        root = known.whitening()
        means = to_float64(known.means)
        origin = means.mean(0) if self.centred and known.classes else means.new_zeros(known.width)
        # A common factor does not matter to a cosine; this one keeps float32 away from its limits.
        root = root / root.diagonal().mean()
        return CosineScores((means - origin) @ root, root, origin @ root)


class CosineScores(Scorer):
    """Cosine to each target, of the features themselves or of ``features @ metric - shift``."""

    def __init__(self, targets: Tensor, metric: Tensor | None = None, shift: Tensor | None = None):
        more = {} if metric is None or shift is None else {"metric": metric, "shift": shift}
        super().__init__(targets=F.normalize(targets.float(), dim=1).T.contiguous(), **more)

    def forward(self, features: Tensor) -> Tensor:
        """Cosines."""
        buffers = dict(self.named_buffers())
        if "metric" in buffers:
            features = features @ buffers["metric"] - buffers["shift"]
        return F.normalize(features, dim=1) @ buffers["targets"]


class LinearScores(Scorer):
    """Scores that are linear in the features; less those of the mean class, so that float32 suffices."""

    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__(weight=weight - weight.mean(0), bias=bias - bias.mean())

    def forward(self, features: Tensor) -> Tensor:
        """Weighted sums of the features."""
        return F.linear(features, self.get_buffer("weight"), self.get_buffer("bias"))
