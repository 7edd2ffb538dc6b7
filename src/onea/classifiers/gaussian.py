# SPDX-License-Identifier: Apache-2.0
"""Classifiers with a covariance matrix for each class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.classifiers.base import Classifier, Scorer, Statistics
from onea.classifiers.samples import class_gaussians
from onea.classifiers.statistics import ClassStatistics, inverse_sqrt, truncate_factor, used_rows
from onea.schema import Count, NotNegative, Positive
from onea.tensors import eigh, row_blocks, to_float64

MANY_CLASSES = 512  # with more classes, each image is scored by the covariances of a shortlist of classes alone
_SHORTLIST = 16
_MAX_ELEMENTS = 2**26  # of intermediate results; larger batches are scored in parts

Covariances = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The axes and variances of the covariances of some classes."""


@dataclass(frozen=True)
class RegularisedGaussian(Classifier):
    """Regularised discriminant analysis (Friedman, 1989): Gaussian classes with shrunk covariance matrices.

    With ``W`` the inverse square root of the pooled covariance, features are whitened, ``z = (x - mean_c) W``. There
    the covariance of class ``c`` has its leading eigenvectors ``u_j`` with variances ``s_j^2``, which are shrunk
    towards one, the variance of the pooled covariance:

        lambda_j = w s_j^2 + 1 - w,   w = n_c / (n_c + prior_images)
        score_c(x) = (-1/2 (|z|^2 - sum_j (1 - 1/lambda_j) (u_j^T z)^2) - 1/2 sum_j log lambda_j) / width

    The score is the log-likelihood with equal priors, up to a constant, divided by the number of features, so that its
    size does not depend on the network. For few images per class, this is linear discriminant analysis.

    With more than ``MANY_CLASSES`` classes, only the nearest ones of each image are scored like this, and the others
    with the pooled covariance alone; see ``ShortlistScores``.

    Attributes:
        directions: number of eigenvectors of the covariance of each class that are stored.
        prior_images: number of images for which the class's covariance and the pooled one have the same weight.
    """

    title: ClassVar[str] = "Regularised Gaussian"
    paper: ClassVar[str] = "https://www.jstor.org/stable/2289860"
    stores: ClassVar[str] = "a mean and a few directions per class, and one matrix"

    directions: Count = 32
    prior_images: Positive = 800.0

    def statistics(self, width: int) -> ClassStatistics:
        """Means, pooled scatter, and the leading directions of each class."""
        return ClassStatistics.empty(width, directions=min(self.directions, width))

    def fit(self, statistics: Statistics) -> Scorer:
        """Fit to statistics; if they have no directions of classes, each class has the pooled covariance."""
        assert isinstance(statistics, ClassStatistics)
        whitening, means = statistics.whitening(), to_float64(statistics.means)
        origin = means.mean(0) if statistics.classes else means.new_zeros(statistics.width)
        centred = (means - origin) @ whitening
        if statistics.factors is None:
            no_axes = means.new_empty(statistics.classes, 0, statistics.width)
            return GaussianScores(whitening, origin, centred, no_axes, no_axes[:, :, 0])
        if statistics.classes > MANY_CLASSES:
            covariances = partial(self._covariances, statistics.factors, statistics.counts, whitening.float())
            return ShortlistScores(whitening, origin, centred, covariances)
        rows = torch.arange(statistics.classes, device=means.device)
        axes, variances = self._covariances(statistics.factors, statistics.counts, whitening, rows)
        return GaussianScores(whitening, origin, centred, axes, variances)

    def _covariances(
        self, factors: Tensor, counts: Tensor, whitening: Tensor, classes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The axes ``[K, r, width]`` and shrunk variances ``[K, r]`` of some classes, in the whitened space."""
        classes = classes.to(factors.device)
        exact = counts[classes].to(whitening.dtype)
        # factor^T factor is the covariance of a class in the whitened space.
        chosen, scale = factors[classes].to(whitening.dtype), (exact - 1).clamp_min(1).sqrt()[:, None, None]
        chosen = chosen[:, : max(1, used_rows(chosen))]
        variances, axes = _leading_axes(chosen @ whitening / scale, self.directions)
        weight = (exact / (exact + self.prior_images))[:, None]
        return axes, torch.where(variances > 0, weight * variances + 1 - weight, 1.0)


@dataclass(frozen=True)
class FullRegularisedGaussian(RegularisedGaussian):
    """Regularised Gaussian with all eigenvectors of each class: hundreds of megabytes for a few hundred classes."""

    title: ClassVar[str] = "Regularised Gaussian, full"
    stores: ClassVar[str] = "a mean and a matrix per class, and one matrix"

    directions: Count = 4096


@dataclass(frozen=True)
class LowRankGaussian(Classifier):
    """LR-RGDA: Gaussian classes, whose covariance is a low-rank correction of a shared one.

    With ``S_c`` the covariance of a class, of which the leading ``rank`` directions are kept, and ``S`` the mean of the
    covariances of all classes, not weighted by their numbers of images, the covariance of class ``c`` is

        B + alpha1 S_c,   B = alpha2 S + alpha3 I

    The score is the log-likelihood with equal priors, up to a constant, divided by the number of features. It is
    computed in the space in which ``B`` is the identity, where the inverse of the correction is diagonal. Classes of a
    single image have no covariance, are left out of the mean, and have the covariance ``B``.

    Attributes:
        alpha1: factor of the covariance of the class; it does not depend on the number of images.
        alpha2: factor of the shared covariance.
        alpha3: variance added to every direction.
        rank: number of directions of the covariance of a class.
    """

    title: ClassVar[str] = "LR-RGDA"
    paper: ClassVar[str] = "https://arxiv.org/abs/2602.00144"
    stores: ClassVar[str] = "a mean and a matrix per class"

    alpha1: NotNegative = 0.2
    alpha2: NotNegative = 2.0
    alpha3: Positive = 0.5
    rank: Count = 64

    def statistics(self, width: int) -> ClassStatistics:
        """Means and full scatter matrices."""
        return ClassStatistics.empty(width, directions=width)

    def fit(self, statistics: Statistics) -> Scorer:
        """Fit to statistics; directions that they lack are shared by all classes."""
        assert isinstance(statistics, ClassStatistics)
        width, rank, means = statistics.width, min(self.rank, statistics.width), to_float64(statistics.means)
        shared, corrections = means.new_zeros(width, width), means.new_zeros(len(means), rank, width)
        several = statistics.counts > 1
        for row, gaussian in enumerate(class_gaussians(statistics)):
            if several[row]:
                shared += gaussian.root.T @ gaussian.root / int(several.sum())
                leading, _ = truncate_factor(gaussian.own[gaussian.own.any(1)], rank)
                corrections[row, : len(leading)] = leading * self.alpha1**0.5
        identity = torch.eye(width, dtype=torch.float64, device=means.device)
        whitening = inverse_sqrt(*eigh(self.alpha2 * shared + self.alpha3 * identity))
        variances, axes = _leading_axes(corrections @ whitening, rank)
        origin = means.mean(0) if len(means) else means.new_zeros(width)
        return GaussianScores(whitening, origin, (means - origin) @ whitening, axes, 1 + variances)


def _leading_axes(factors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The leading variances ``[C, K]``, ascending, and unit axes ``[C, K, width]`` of covariances ``factor^T factor``.

    Computed from the smaller matrices ``factor factor^T``. Axes that are missing have variance zero.
    """
    rank = min(count, factors.shape[1])
    variances, left = (part[..., -rank:] for part in eigh(factors @ factors.transpose(1, 2)))
    rounding = 1e-9 if factors.dtype == torch.float64 else 1e-5
    present = variances > variances.amax(1, keepdim=True) * rounding
    scale = torch.where(present, variances, torch.inf).rsqrt()[:, :, None]
    return torch.where(present, variances, 0.0), left.transpose(1, 2) @ factors * scale


class GaussianScores(Scorer):
    """Log-likelihoods per feature.

    All terms linear in a whitened feature ``z`` are computed by one matrix product: ``mean_c^T z``, and the projections
    on the axes of each class, ``u_j^T (z - mean_c)``.

    Args:
        whitening: ``[width, width]``.
        origin: origin of features, ``[width]``.
        means: means of each class in the whitened space, ``[C, width]``.
        axes: unit eigenvectors of the covariance of each class there, ``[C, r, width]``.
        variances: variances along these axes, ``[C, r]``; those along all others are one.
    """

    def __init__(self, whitening: Tensor, origin: Tensor, means: Tensor, axes: Tensor, variances: Tensor):
        projected_means = (axes @ means[:, :, None])[:, :, 0]
        constant = -0.5 * ((means**2).sum(1) + variances.log().sum(1))
        width = len(whitening)
        super().__init__(
            metric=whitening,
            shift=-origin @ whitening,
            linear=torch.cat([means / width, axes.flatten(0, 1)]).T,
            constant=torch.cat([constant / width, -projected_means.flatten()]),
            gains=(1 - 1 / variances) / (2 * width),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Log-likelihoods; large batches are scored in parts."""
        gains = self.get_buffer("gains")
        if torch.compiler.is_compiling() or len(features) * gains.numel() <= _MAX_ELEMENTS:
            return self._score(features)
        return torch.cat([self._score(part) for part in features.split(max(1, _MAX_ELEMENTS // gains.numel()))])

    def _score(self, features: Tensor) -> Tensor:
        gains = self.get_buffer("gains")
        whitened = torch.addmm(self.get_buffer("shift"), features, self.get_buffer("metric"))
        products = torch.addmm(self.get_buffer("constant"), whitened, self.get_buffer("linear"))
        by_mean, projections = products.tensor_split((len(gains),), dim=1)
        by_axes = (projections.square().unflatten(1, tuple(gains.shape)) * gains).sum(2)
        scores: Tensor = by_mean + by_axes - whitened.square().sum(1, keepdim=True) / (2 * features.shape[1])
        return scores


class ShortlistScores(Scorer):
    """Log-likelihoods per feature if there are very many classes: the time for covariances does not depend on them.

    Under the pooled covariance alone, all classes cost one matrix product. By that, the nearest classes of each image
    are found; their scores are those of ``GaussianScores``. The other classes keep their order under the pooled
    covariance. If the best of them would score higher than the shortlist, all of them are lowered by the difference.

    Args:
        whitening: ``[width, width]``.
        origin: origin of features, ``[width]``.
        means: means of each class in the whitened space, ``[C, width]``.
        covariances: axes and variances of given classes, as in ``GaussianScores``.
    """

    def __init__(self, whitening: Tensor, origin: Tensor, means: Tensor, covariances: Covariances):
        super().__init__(
            metric=whitening,
            shift=-origin @ whitening,
            means=means,
            constant=-0.5 * (means**2).sum(1),
        )
        self.covariances = covariances

    def exportable(self) -> Scorer:
        """All classes scored by their covariances."""
        means = self.get_buffer("means")
        metric = self.get_buffer("metric").double()
        origin = -torch.linalg.solve(metric.T, self.get_buffer("shift").double())
        return GaussianScores(metric, origin, means, *self.covariances(torch.arange(len(means))))

    def forward(self, features: Tensor) -> Tensor:
        """Log-likelihoods; large batches are scored in parts."""
        classes = len(self.get_buffer("means"))
        blocks = row_blocks(len(features), classes, _MAX_ELEMENTS)
        return torch.cat([features.new_empty(0, classes), *(self._score(features[rows]) for rows in blocks)])

    def _score(self, features: Tensor) -> Tensor:
        means, width = self.get_buffer("means"), features.shape[1]
        whitened = torch.addmm(self.get_buffer("shift"), features, self.get_buffer("metric"))
        scores = torch.addmm(self.get_buffer("constant"), whitened, means.T)
        scores -= whitened.square().sum(1, keepdim=True) / 2
        nearest = scores.topk(_SHORTLIST + 1)
        shortlists, best_other = nearest.indices[:, :-1], nearest.values[:, -1:]
        classes, position = shortlists.unique(return_inverse=True)
        axes, variances = (part.to(features) for part in self.covariances(classes))
        gains, constants = 1 - 1 / variances, variances.log().sum(1)
        exact = torch.empty_like(shortlists, dtype=scores.dtype)
        for rows in row_blocks(len(features), _SHORTLIST * axes[0].numel(), _MAX_ELEMENTS):
            chosen = position[rows]
            deviations = whitened[rows, None] - means[shortlists[rows]]
            projections = (axes[chosen] @ deviations[..., None])[..., 0]
            exact[rows] = ((projections.square() * gains[chosen]).sum(2) - constants[chosen]) / 2
        exact += scores.gather(1, shortlists)
        scores -= (best_other - exact.amin(1, keepdim=True)).clamp_min(0)
        return scores.scatter(1, shortlists, exact) / width


@dataclass(frozen=True)
class FeCAM(Classifier):
    """FeCAM (Goswami et al., 2023): Mahalanobis distance under the correlation matrix of each class.

    Features are normalised to length one, as in the authors' script for vision transformers.

    Attributes:
        shrinkage: multiple of the mean variance that is added to every variance, as published.
    """

    title: ClassVar[str] = "FeCAM"
    paper: ClassVar[str] = "https://arxiv.org/abs/2309.14062"
    stores: ClassVar[str] = "a mean and a matrix per class"
    follows_drift: ClassVar[bool] = False

    shrinkage: NotNegative = 1.0

    def statistics(self, width: int) -> ClassStatistics:
        """Means and full scatter matrices of normalised features."""
        return ClassStatistics.empty(width, directions=width, unit_length=True)

    def fit(self, statistics: Statistics) -> Scorer:
        """Invert the correlation matrix of each class."""
        assert isinstance(statistics, ClassStatistics)
        assert statistics.factors is not None
        inverses = []
        for factor, count in zip(statistics.factors, statistics.counts.tolist(), strict=True):
            rows = to_float64(factor)
            identity = torch.eye(statistics.width, dtype=rows.dtype, device=rows.device)
            covariance = rows.T @ rows / max(count - 1, 1)
            covariance = covariance + self.shrinkage * covariance.diagonal().mean() * identity
            std = covariance.diagonal().clamp_min(1e-30).sqrt()
            inverses.append(torch.linalg.pinv(covariance / std / std[:, None], hermitian=True).float())
        return MahalanobisScores(means=statistics.means, inverses=torch.stack(inverses))


class MahalanobisScores(Scorer):
    """The negative squared Mahalanobis distance of normalised features to each class."""

    def forward(self, features: Tensor) -> Tensor:
        """Negative squared distances, class by class."""
        unit, means, inverses = F.normalize(features, dim=1), self.get_buffer("means"), self.get_buffer("inverses")
        scores = []
        for mean, inverse in zip(means, inverses, strict=True):
            deviation = unit - mean
            scores.append(-((deviation @ inverse) * deviation).sum(1))
        return torch.stack(scores, dim=1)
