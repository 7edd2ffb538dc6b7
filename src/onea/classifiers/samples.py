# SPDX-License-Identifier: Apache-2.0
"""The Gaussian of the features of each class, from its statistics, and samples from it in place of old images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from onea import seeds
from onea.classifiers.base import Statistics
from onea.classifiers.statistics import ClassStatistics, Gaussian
from onea.tensors import eigh, to_float64

_ROUNDING = 1e-6  # of float32 factors, relative to the largest eigenvalue


def class_gaussians(statistics: ClassStatistics) -> Iterator[Gaussian]:
    """The Gaussian of each class, of statistics with a scatter.

    The covariance of a class with scatter factor ``A`` of ``n`` images is ``A^T A / (n - 1) + R``. ``R`` is what the
    factors of all classes together lack of the pooled covariance, so that the mean of the covariances, weighted by
    ``n - 1``, is the pooled one. A class of a single image has the pooled covariance.
    """
    assert statistics.scatter is not None
    pooled, remainder = _root(statistics.scatter / max(statistics.degrees_of_freedom, 1)), _remainder(statistics)
    for row, (mean, count) in enumerate(zip(to_float64(statistics.means), statistics.counts.tolist(), strict=True)):
        own = pooled[:0]
        if count > 1 and statistics.factors is not None:
            own = to_float64(statistics.factors[row]) / (count - 1) ** 0.5
        yield Gaussian(mean, own, remainder if count > 1 else pooled)


def move_gaussians(statistics: Statistics, move: Callable[[Gaussian], Gaussian]) -> Statistics:
    """The statistics with another Gaussian of each class, a function of the one before.

    Statistics without a Gaussian of the features do not change: other sums, and those of normalised features.
    """
    if not isinstance(statistics, ClassStatistics) or statistics.unit_length or statistics.scatter is None:
        return statistics
    return statistics.replace_gaussians(map(move, class_gaussians(statistics)))


def draw_features(
    statistics: ClassStatistics, counts: Sequence[int], generator: torch.Generator, ridge: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Features drawn from the Gaussians of classes, ``counts[c]`` of class ``c``, and their classes.

    ``ridge`` is added to the variance of every direction.
    """
    drawn = [statistics.means[:0].float()]
    for gaussian, count in zip(class_gaussians(statistics), counts, strict=True):
        variance = ridge**0.5 * torch.eye(statistics.width if ridge else 0, statistics.width)
        root = torch.cat([gaussian.root, variance.to(gaussian.root)]).float()
        noise = torch.randn(count, len(root), generator=generator).to(root.device)
        drawn.append(gaussian.mean.float() + noise @ root)
    features = torch.cat(drawn)
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    return features, labels.to(features.device)


@lru_cache(maxsize=2)
def standard_noise(samples: int, width: int) -> Tensor:
    """Standard normal noise ``[samples, width]`` float64, always the same, with zero mean and identity covariance.

    There must be more samples than features.

    >>> noise = standard_noise(9, 2)
    >>> [round(abs(value), 9) for value in (*noise.mean(0).tolist(), *torch.cov(noise.T).flatten().tolist())]
    [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    """
    generator = seeds.generator(0, 0, "samples of classes")
    noise = torch.randn(samples, width, generator=generator, dtype=torch.float64)
    exact: Tensor = torch.linalg.qr(noise - noise.mean(0))[0] * (samples - 1) ** 0.5
    return exact


def _remainder(statistics: ClassStatistics) -> Tensor:
    """A root of what the factors lack of the pooled covariance; without rows if they lack only rounding errors."""
    assert statistics.scatter is not None
    rest, freedom = statistics.scatter.clone(), max(statistics.degrees_of_freedom, 1)
    for factor in () if statistics.factors is None else to_float64(statistics.factors):
        rest -= factor.T @ factor
    return _root(rest / freedom, _ROUNDING * float(torch.linalg.matrix_norm(statistics.scatter / freedom, 2)))


def _root(matrix: Tensor, floor: float = 0.0) -> Tensor:
    """A root of a positive semi-definite matrix without the directions whose variance is at most ``floor``."""
    values, vectors = eigh(matrix)
    kept = values > floor
    root: Tensor = (vectors[:, kept] * values[kept].sqrt()).T
    return root
