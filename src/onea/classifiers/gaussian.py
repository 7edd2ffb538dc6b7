# SPDX-License-Identifier: Apache-2.0
"""Classifiers with a covariance for every class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.classifiers.contract import Classifier, Scorer, Statistics
from onea.classifiers.statistics import ClassStatistics
from onea.schema import Count, NotNegative, Positive
from onea.tensors import eigh, to_float64

_ROOM = 2**26  # numbers of intermediate results


@dataclass(frozen=True)
class RegularisedGaussian(Classifier):
    """The likelihood of a Gaussian per class whose covariance lies between its own and the one that all classes share.

    In the space where the shared covariance is the identity, the covariance of class ``c`` keeps its leading directions
    ``u_j`` with variances ``s_j^2``, and each is drawn towards one: ``lambda_j = w s_j^2 + 1 - w``, with ``w = n / (n +
    prior_images)`` for a class of ``n`` images. The score of ``z = (x - mean) W`` is its log-likelihood with equal
    priors, ``-1/2 (|z|^2 - sum_j (1 - 1/lambda_j) (u_j' z)^2) - 1/2 sum_j log lambda_j``, divided by the number of
    features so that its size does not depend on the network. With few images it is linear discriminant analysis.

    Attributes:
        directions: kept of every class.
        prior_images: number of images at which a class's own covariance counts as much as the shared one.
    """

    title: ClassVar[str] = "Regularised Gaussian"
    paper: ClassVar[str] = "https://www.jstor.org/stable/2289860"
    keeps: ClassVar[str] = "a mean and some directions per class, one matrix"

    directions: Count = 32
    prior_images: Positive = 800.0

    def statistics(self, width: int) -> ClassStatistics:
        """Means, one scatter, and the leading directions of every class."""
        return ClassStatistics.empty(width, directions=min(self.directions, width))

    def fit(self, known: Statistics) -> Scorer:
        """The log-likelihood of every class per feature, up to a constant.

        Without directions of the classes in the statistics, the covariance that all classes share is that of each.
        """
        assert isinstance(known, ClassStatistics)
        root, means = known.whitening(), to_float64(known.means)
        origin = means.mean(0) if known.classes else means.new_zeros(known.width)
        if known.factors is None:
            none = means.new_empty(known.classes, 0, known.width)
            return GaussianScores(root, origin, (means - origin) @ root, none, none[:, :, 0])
        freedom = (known.counts - 1).clamp_min(1).double()
        rows = to_float64(known.factors) @ root / freedom.sqrt()[:, None, None]
        most = min(self.directions, rows.shape[1])
        values, left = (part[..., -most:] for part in eigh(rows @ rows.transpose(1, 2)))  # the largest come last
        present = values > values.amax(1, keepdim=True) * 1e-9
        unit = left.transpose(1, 2) @ rows * torch.where(present, values, torch.inf).rsqrt()[:, :, None]
        images = known.counts.double()
        share = (images / (images + self.prior_images))[:, None]
        variances = torch.where(present, share * values + 1 - share, 1.0)
        return GaussianScores(root, origin, (means - origin) @ root, unit, variances)


@dataclass(frozen=True)
class FullRegularisedGaussian(RegularisedGaussian):
    """The same with every direction of every class: hundreds of megabytes for some hundred classes."""

    title: ClassVar[str] = "Regularised Gaussian, full"
    keeps: ClassVar[str] = "a mean and a matrix per class, one matrix"

    directions: Count = 4096


class GaussianScores(Scorer):
    """Log-likelihoods per feature, from whitened means ``[C, width]``, unit directions ``[C, r, width]`` and variances
    ``[C, r]``.

    What is linear in a whitened feature is one matrix product: what each class's mean says of it, and its distances
    from the means along their directions. Sums of squares are left, each scaled beforehand.
    """

    def __init__(self, root: Tensor, origin: Tensor, means: Tensor, unit: Tensor, variances: Tensor):
        along = (unit @ means[:, :, None])[:, :, 0]
        constant = -0.5 * ((means**2).sum(1) + variances.log().sum(1))
        width = len(root)
        super().__init__(
            metric=root,
            shift=-origin @ root,
            linear=torch.cat([means / width, unit.flatten(0, 1)]).T,
            constant=torch.cat([constant / width, -along.flatten()]),
            gains=(1 - 1 / variances) / (2 * width),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Log-likelihoods, in parts that need little memory."""
        gains = self.get_buffer("gains")
        if torch.compiler.is_compiling() or len(features) * gains.numel() <= _ROOM:
            return self._some(features)
        return torch.cat([self._some(part) for part in features.split(max(1, _ROOM // gains.numel()))])

    def _some(self, features: Tensor) -> Tensor:
        gains = self.get_buffer("gains")
        space = torch.addmm(self.get_buffer("shift"), features, self.get_buffer("metric"))
        found = torch.addmm(self.get_buffer("constant"), space, self.get_buffer("linear"))
        towards, lengths = found.tensor_split((len(gains),), dim=1)
        own = (lengths.square().unflatten(1, tuple(gains.shape)) * gains).sum(2)
        scores: Tensor = towards + own - space.square().sum(1, keepdim=True) / (2 * features.shape[1])
        return scores


@dataclass(frozen=True)
class FeCAM(Classifier):
    """Mahalanobis distance under the correlation matrix of each class, on features of length one.

    It is the rule of the authors' script for vision transformers.

    Attributes:
        shrinkage: multiple of the mean variance that is added to every variance, as published.
    """

    title: ClassVar[str] = "FeCAM"
    paper: ClassVar[str] = "https://arxiv.org/abs/2309.14062"
    keeps: ClassVar[str] = "a mean and a matrix per class"
    carried: ClassVar[bool] = False

    shrinkage: NotNegative = 1.0

    def statistics(self, width: int) -> ClassStatistics:
        """Means and whole scatters of features of length one."""
        return ClassStatistics.empty(width, directions=width, unit_length=True)

    def fit(self, known: Statistics) -> Scorer:
        """The distance of each class, negative."""
        assert isinstance(known, ClassStatistics)
        assert known.factors is not None
        inverses = []
        for factor, count in zip(known.factors, known.counts.tolist(), strict=True):
            rows = to_float64(factor)
            one = torch.eye(known.width, dtype=rows.dtype, device=rows.device)
            covariance = rows.T @ rows / max(count - 1, 1)
            covariance = covariance + self.shrinkage * covariance.diagonal().mean() * one
            deviation = covariance.diagonal().clamp_min(1e-30).sqrt()
            inverses.append(torch.linalg.pinv(covariance / deviation / deviation[:, None], hermitian=True).float())
        return MahalanobisScores(means=known.means, inverses=torch.stack(inverses))


class MahalanobisScores(Scorer):
    """The distance of features of length one to each class under its matrix, negative."""

    def forward(self, features: Tensor) -> Tensor:
        """Negative squared distances, class by class."""
        unit, means, inverses = F.normalize(features, dim=1), self.get_buffer("means"), self.get_buffer("inverses")
        found = []
        for mean, inverse in zip(means, inverses, strict=True):
            away = unit - mean
            found.append(-((away @ inverse) * away).sum(1))
        return torch.stack(found, dim=1)
