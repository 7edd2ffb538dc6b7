# SPDX-License-Identifier: Apache-2.0
"""Mean, count and covariance of the features of each class, which add up over updates without any stored image.

Under a fixed adapter, means, counts and scatter matrices are sufficient statistics: they add up exactly, in any order.
The covariance of each single class is kept as a low-rank factor with a bound on the truncation error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.tensors import Tensors, eigh, rows_of_each, to_float64
from onea.vit.heads import class_means

_RCOND = 1e-12  # eigenvalues below this share of the largest one are rounding errors


@dataclass(frozen=True)
class Gaussian:
    """The Gaussian of the features of a class, in float64. Its covariance is ``root^T root``.

    Attributes:
        mean: ``[width]``.
        own: rows of the root that belong to this class, ``[rows, width]``.
        shared: other rows of the root, which describe what is not known of single classes, ``[rows, width]``.
    """

    mean: Tensor
    own: Tensor
    shared: Tensor

    @property
    def root(self) -> Tensor:
        """All rows of the root."""
        return torch.cat([self.own, self.shared])


@dataclass(frozen=True)
class ClassStatistics:
    """Means, counts and covariances of the features of each class; class ``i`` has row ``i``.

    The scatter matrix is ``sum_i (x_i - mean_c(i)) (x_i - mean_c(i))^T`` over the images of all classes together. When
    a class is removed, its share of the matrix cannot be subtracted and stays as long as another class is left.

    Attributes:
        means: mean feature of each class, ``[C, width]`` float32.
        counts: number of images of each class, ``[C]``.
        scatter: pooled over all classes, ``[width, width]`` float64; None if it is not kept.
        degrees_of_freedom: those of the scatter: number of images minus number of classes.
        factors: of the scatter of each class, ``[C, directions, width]``: ``factor^T factor`` approximates it. Unused
            rows are zero. In float32, or bfloat16 after ``compact``. None if they are not kept.
        cut: for each class, a bound on the spectral norm of what was truncated from its scatter, ``[C]``.
        unit_length: whether features are normalised to length one first.
    """

    means: Tensor
    counts: Tensor
    scatter: Tensor | None
    degrees_of_freedom: int
    factors: Tensor | None = None
    cut: Tensor | None = None
    unit_length: bool = False

    @classmethod
    def empty(cls, width: int, *, scatter: bool = True, directions: int = 0, unit_length: bool = False) -> Self:
        """Statistics without classes, with or without the scatter, and with this many directions per class."""
        return cls(
            torch.empty(0, width),
            torch.empty(0, dtype=torch.int64),
            torch.zeros(width, width, dtype=torch.float64) if scatter else None,
            0,
            torch.empty(0, directions, width) if directions else None,
            torch.empty(0, dtype=torch.float64) if directions else None,
            unit_length,
        )

    @property
    def kind(self) -> str:
        """Whether the statistics are of normalised features."""
        return "unit length" if self.unit_length else "plain"

    @property
    def detail(self) -> int:
        """0 for means alone, 1 with the scatter, more with the directions of each class."""
        return 0 if self.scatter is None else 1 if self.factors is None else 1 + self.factors.shape[1]

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.counts)

    @property
    def width(self) -> int:
        """The number of features."""
        return self.means.shape[1]

    def add(self, features: Tensor, labels: Tensor) -> Self:
        """The statistics with more images: their features ``[N, width]`` and classes; new classes get new rows.

        A class with mean ``m`` of ``n`` images that gets ``k`` images with mean ``m'`` (Chan et al., 1979) has

            mean    = m + k / (n + k) (m' - m)
            scatter = S + S' + n k / (n + k) (m' - m) (m' - m)^T
        """
        if not len(labels):
            return self
        exact = to_float64(F.normalize(features.float(), dim=1) if self.unit_length else features)
        old = self.to(exact.device).pad_to(int(labels.max()) + 1)
        labels = labels.to(exact.device)
        changed = labels.unique()
        position = torch.searchsorted(changed, labels)
        means = class_means(exact, position, range(len(changed)))
        added, before = torch.bincount(position, minlength=len(changed)).double(), old.counts[changed].double()
        means_before = to_float64(old.means[changed])
        total, step = before + added, means - means_before
        new = replace(
            old,
            means=old.means.index_copy(0, changed, (means_before + step * (added / total)[:, None]).float()),
            counts=old.counts.index_copy(0, changed, total.long()),
        )
        if old.scatter is None:
            return new
        deviations = exact - means[position]
        between = step * (before * added / total).sqrt()[:, None]  # zero for a new class
        scatter = old.scatter + deviations.T @ deviations + between.T @ between
        degrees_of_freedom = old.degrees_of_freedom + len(labels) - int((before == 0).sum())
        new = replace(new, scatter=scatter, degrees_of_freedom=degrees_of_freedom)
        return new if old.factors is None else new._add_to_factors(changed, position, deviations, between)

    def remove(self, features: Tensor, labels: Tensor) -> Self:
        """The opposite of ``add``, for images that are in the statistics; exact up to truncation and rounding.

        Each class must keep at least one image.
        """
        assert self.scatter is not None
        assert not self.unit_length
        if not len(labels):
            return self
        exact, means = to_float64(features), to_float64(self.means)
        removed = torch.bincount(labels, minlength=self.classes)
        remaining = (self.counts - removed).double()
        total = torch.zeros_like(means).index_add(0, labels, exact)
        means_after = (means * self.counts[:, None] - total) / remaining[:, None]
        changed = removed.nonzero()[:, 0]
        # The scatter around the old mean is the sum of three parts: that of the removed images, that of the remaining
        # images around the new mean, and that of the step from the old to the new mean.
        deviations = exact - means[labels]
        between = (means_after - means)[changed] * remaining[changed].sqrt()[:, None]
        scatter = _nearest_semidefinite(self.scatter - deviations.T @ deviations - between.T @ between)
        factors = self.factors
        if factors is not None:
            factors = factors.clone()
            for place, row in enumerate(changed.tolist()):
                rows = torch.cat([deviations[labels == row], between[place : place + 1]])
                factors[row] = _downdate(to_float64(factors[row]), rows).float()
        return replace(
            self,
            means=torch.where(removed[:, None] > 0, means_after, means).float(),
            counts=self.counts - removed,
            scatter=scatter,
            degrees_of_freedom=self.degrees_of_freedom - len(labels),
            factors=factors,
        )

    def apply_drift_map(self, drift_map: Tensor) -> Self:
        """The statistics after all features ``x`` (rows) became ``x M``, with a matrix ``M`` ``[width, width]``.

        They are ``mean M``, ``M^T S M`` and ``factor M``. Statistics of normalised features stay unchanged, because a
        linear map of features does not map normalised features linearly.
        """
        if self.unit_length:
            return self
        drift_map = to_float64(drift_map).to(self.means.device)
        return replace(
            self,
            means=(to_float64(self.means) @ drift_map).float(),
            scatter=None if self.scatter is None else drift_map.T @ self.scatter @ drift_map,
            factors=None if self.factors is None else self.factors.float() @ drift_map.float(),
            cut=None if self.cut is None else self.cut * float(torch.linalg.matrix_norm(drift_map, 2)) ** 2,
        )

    def shift_means(self, shifts: Tensor) -> Self:
        """The statistics with the mean of each class shifted by a row of ``[classes, width]``; covariances stay.

        Statistics of normalised features stay unchanged.
        """
        return self if self.unit_length else replace(self, means=(to_float64(self.means) + to_float64(shifts)).float())

    def replace_gaussians(self, gaussians: Iterable[Gaussian]) -> Self:
        """The statistics with another mean and covariance of each class; counts stay.

        The pooled covariance becomes the mean of the covariances, weighted by degrees of freedom. Classes without
        images do not change.
        """
        assert self.scatter is not None
        means, scatter = to_float64(self.means).clone(), torch.zeros_like(self.scatter)
        factors, cut = (None if part is None else part.clone() for part in (self.factors, self.cut))
        freedom, truncate = (self.counts - 1).clamp_min(0).tolist(), self._truncation()
        for row, gaussian in enumerate(gaussians):
            if not self.counts[row]:
                continue
            means[row] = gaussian.mean
            scatter += freedom[row] * gaussian.root.T @ gaussian.root
            if factors is not None and cut is not None:
                factors[row], cut[row] = truncate(gaussian.own * freedom[row] ** 0.5)
        if total := sum(freedom):
            scatter *= self.degrees_of_freedom / total  # also of classes that were removed
        return replace(self, means=means.float(), scatter=scatter if total else self.scatter, factors=factors, cut=cut)

    def merge_classes(self, source: int, target: int) -> Self:
        """The statistics with the images of ``source`` added to ``target``; the row of ``source`` does not change."""
        added, before = self.counts[source].double(), self.counts[target].double()
        mean_before = to_float64(self.means[target])
        step = to_float64(self.means[source]) - mean_before
        place = torch.tensor([target], device=self.means.device)
        new = replace(
            self,
            means=self.means.index_copy(0, place, (mean_before + step * (added / (before + added)))[None].float()),
            counts=self.counts.index_copy(0, place, (before + added).long()[None]),
        )
        if self.scatter is None:
            return new
        between = (step * (before * added / (before + added)).sqrt())[None]
        new = replace(new, scatter=self.scatter + between.T @ between, degrees_of_freedom=self.degrees_of_freedom + 1)
        if self.factors is None or self.cut is None:
            return new
        deviations = self.factors[source].double()
        position = torch.zeros(len(deviations), dtype=torch.int64, device=place.device)
        new = replace(new, cut=self.cut.index_copy(0, place, (self.cut[target] + self.cut[source])[None]))
        return new._add_to_factors(place, position, deviations, between)

    def nearest_classes(self, classes: Tensor, count: int) -> Tensor:
        """These classes and the ``count`` nearest ones of each under the pooled covariance, ascending."""
        if len(classes) * count >= self.classes:
            return torch.arange(self.classes, device=classes.device)
        means = (self.means - self.means[classes].mean(0)) @ self.whitening().float()
        nearest = torch.cdist(means[classes], means).topk(count + 1, largest=False).indices
        near: Tensor = torch.cat([classes, nearest.flatten()]).unique()
        return near

    def select_classes(self, classes: Tensor) -> Self:
        """The statistics of these classes; the scatter does not change, unless no class is left."""
        old = self if len(classes) else self.reset_classes(torch.arange(self.classes, device=self.counts.device))
        return old._with_same_scatter(**{name: value[classes] for name, value in old._class_tensors().items()})

    def reset_classes(self, classes: Tensor) -> Self:
        """The statistics without images of these classes; the scatter stays as long as another class has images."""
        parts: dict[str, Any] = {name: value.index_fill(0, classes, 0) for name, value in self._class_tensors().items()}
        if not bool(parts["counts"].any()):
            scatter = None if self.scatter is None else torch.zeros_like(self.scatter)
            parts |= {"scatter": scatter, "degrees_of_freedom": 0}
        return replace(self, **parts)

    def concatenate(self, other: Self) -> Self:
        """The statistics of two disjoint sets of classes under the same adapter; the classes of ``other`` come last."""
        own, added = self._class_tensors(), other._class_tensors()
        parts: dict[str, Any] = {name: torch.cat([own[name], added[name]]) for name in own if name in added}
        return replace(
            self,
            scatter=None if self.scatter is None or other.scatter is None else self.scatter + other.scatter,
            degrees_of_freedom=self.degrees_of_freedom + other.degrees_of_freedom,
            **{"factors": None, "cut": None} | parts,
        )

    def pad_to(self, classes: int) -> Self:
        """The statistics with empty classes appended up to this number."""
        missing = max(0, classes - self.classes)
        parts: dict[str, Any] = {
            name: F.pad(value, (0, 0) * (value.dim() - 1) + (0, missing))
            for name, value in self._class_tensors().items()
        }
        return replace(self, **parts) if missing else self

    def reduce_to(self, needed: ClassStatistics) -> Self:
        """The statistics reduced to the level of detail of ``needed``, which are of the same kind."""
        directions = 0 if needed.factors is None else needed.factors.shape[1]
        return self._with_same_scatter(
            scatter=None if needed.scatter is None else self.scatter,
            factors=self.factors[:, :directions] if directions and self.factors is not None else None,
            cut=self.cut if directions else None,
        )

    def compact(self) -> Self:
        """The statistics with factors in bfloat16, which halves their size; later changes keep this type."""
        return self if self.factors is None else self._with_same_scatter(factors=self.factors.bfloat16())

    def to(self, device: torch.device) -> Self:
        """The statistics on another device, unless it has no float64 (MPS)."""
        if device.type == "mps" or self.means.device == device:
            return self
        parts: dict[str, Any] = {name: value.to(device) for name, value in self._tensors().items()}
        return replace(self, **parts)

    def state_dict(self) -> Tensors:
        """All statistics as named tensors; means alone have no counts, as their classes are added only once."""
        if self.scatter is None:
            return {"prototypes": self.means}
        parts = self._tensors()
        return {"prototypes": parts.pop("means"), **parts, "freedom": torch.tensor(self.degrees_of_freedom)}

    def from_state_dict(self, state: Tensors) -> Self:
        """Statistics of the same kind and detail from named tensors.

        Raises:
            ValueError: a tensor has the wrong dtype or shape.
        """
        means = state["prototypes"]
        parts: dict[str, Any] = {"means": means}
        if self.scatter is None:
            parts["counts"] = torch.ones(len(means), dtype=torch.int64, device=means.device)
        else:
            parts |= {name: state[name] for name in self._tensors() if name != "means"}
        for name, value in parts.items():
            like = getattr(self, name)
            shape = like.shape if name == "scatter" else (len(means), *like.shape[1:])
            types = {like.dtype} | ({torch.bfloat16} if name == "factors" else set())
            if value.dtype not in types or value.shape != shape:
                raise ValueError(
                    f"{name} of {value.dtype} and {tuple(value.shape)}, not {like.dtype} and {tuple(shape)}"
                )
        if self.scatter is None:
            return replace(self, **parts)
        return replace(self, degrees_of_freedom=int(state["freedom"]), **parts)

    def covariance(self) -> Tensor:
        """The pooled within-class covariance, shrunk to be invertible."""
        assert self.scatter is not None
        return shrunk_covariance(self.scatter, self.degrees_of_freedom)

    def whitening(self) -> Tensor:
        """``W = covariance^(-1/2)``: features times ``W`` have the identity as pooled covariance."""
        return inverse_sqrt(*self._spectrum)

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the covariance, cached because they are expensive and used several times."""
        return eigh(self.covariance())

    def _with_same_scatter(self, **changes: Any) -> Self:
        """A changed copy that keeps the cached eigendecomposition, as the scatter does not change."""
        new = replace(self, **changes)
        if "_spectrum" in self.__dict__:
            new.__dict__["_spectrum"] = self._spectrum
        return new

    def _tensors(self) -> Tensors:
        parts = ((name, getattr(self, name)) for name in ("means", "counts", "scatter", "factors", "cut"))
        return {name: value for name, value in parts if value is not None}

    def _class_tensors(self) -> Tensors:
        """The tensors with one row per class."""
        return {name: value for name, value in self._tensors().items() if name != "scatter"}

    def _add_to_factors(self, classes: Tensor, position: Tensor, deviations: Tensor, between: Tensor) -> Self:
        """The statistics with more deviations in the factors of some classes.

        Args:
            classes: the classes whose factors change, ``[K]``.
            position: position of each deviation's class among these.
            deviations: deviations from the mean of the new images, ``[N, width]``.
            between: the scaled step from the old mean to that mean for each class, ``[K, width]``.
        """
        assert self.factors is not None
        assert self.cut is not None
        factors, cut, truncate = self.factors.clone(), self.cut.clone(), self._truncation()
        members = dict(rows_of_each(position))
        for place, row in enumerate(classes.tolist()):
            old = self.factors[row][self.factors[row].any(1)].double()  # empty for a new class
            rows = torch.cat([old, deviations[members[place]], between[place : place + 1]])
            factors[row], truncated = truncate(rows)
            cut[row] += truncated
        return self._with_same_scatter(factors=factors, cut=cut)

    def _truncation(self) -> Callable[[Tensor], tuple[Tensor, float]]:
        """A function of rows: the factor ``[directions, width]`` of ``rows^T rows`` that is kept, and what it lacks.

        Directions are selected in the whitened space, where classes are compared: the leading eigenvectors of
        ``W S_c W``, mapped back by ``W^(-1)``. What is lacking is a bound on the spectral norm.
        """
        directions = 0 if self.factors is None else self.factors.shape[1]
        values, vectors = self._spectrum
        values = values.clamp_min(values[-1] * _RCOND)
        whiten, unwhiten = (vectors * values.rsqrt()) @ vectors.T, (vectors * values.sqrt()) @ vectors.T

        def truncate(rows: Tensor) -> tuple[Tensor, float]:
            leading, truncated = truncate_factor(rows @ whiten, directions)
            factor = F.pad(leading @ unwhiten, (0, 0, 0, directions - len(leading))).float()
            return factor, truncated * float(values[-1])  # mapping back scales a direction by at most this

        return truncate


def used_rows(factors: Tensor) -> int:
    """The largest number of directions of a class; further rows of all factors ``[C, directions, width]`` are zero.

    >>> used_rows(torch.tensor([[[1.0, 2.0], [0.0, 0.0]]]))
    1
    """
    return int(factors.any(2).sum(1).amax()) if len(factors) else 0


def truncate_factor(rows: Tensor, rank: int) -> tuple[Tensor, float]:
    """The best factor of ``rows^T rows`` with at most ``rank`` rows, and the largest truncated eigenvalue.

    Directions whose eigenvalues are rounding errors are left out.
    """
    if len(rows) <= rows.shape[1]:
        values, left = eigh(rows @ rows.T)
        right = left.T @ rows  # each row is an eigenvector times its singular value
    else:
        values, vectors = eigh(rows.T @ rows)
        right = values.clamp_min(0).sqrt()[:, None] * vectors.T
    order = torch.arange(len(values) - 1, -1, -1, device=values.device)
    order = order[values[order] > _RCOND * values[-1:].clamp_min(0)]
    return right[order[:rank]], float(values[order[rank]]) if len(order) > rank else 0.0


def _downdate(factor: Tensor, rows: Tensor) -> Tensor:
    """A factor of ``factor^T factor - rows^T rows``, with the same number of rows as ``factor``."""
    basis, parts = torch.linalg.qr(torch.cat([factor, rows]).T)
    plus, minus = parts[:, : len(factor)], parts[:, len(factor) :]
    values, vectors = eigh(plus @ plus.T - minus @ minus.T)
    new = (vectors * values.clamp_min(0).sqrt()).T @ basis.T
    return F.pad(new.flip(0)[: len(factor)], (0, 0, 0, max(0, len(factor) - len(new))))


def _nearest_semidefinite(matrix: Tensor) -> Tensor:
    """The nearest positive semi-definite matrix; rounding may have caused negative eigenvalues."""
    values, vectors = eigh((matrix + matrix.T) / 2)
    return (vectors * values.clamp_min(0)) @ vectors.T


def shrunk_covariance(scatter: Tensor, degrees_of_freedom: int) -> Tensor:
    """The covariance from a scatter matrix, ``(1 - rho) S / n + rho tr(S / n) / width I``, float64.

    The shrinkage ``rho`` is that of the oracle approximating shrinkage (Chen et al., 2010, "Shrinkage Algorithms for
    MMSE Covariance Estimation"; ``sklearn.covariance.OAS``). Without degrees of freedom it is the identity.

    >>> shrunk_covariance(torch.diag(torch.tensor([400.0, 100.0], dtype=torch.float64)), 100).diagonal()
    tensor([3.8614, 1.1386], dtype=torch.float64)
    """
    width = len(scatter)
    identity = torch.eye(width, dtype=torch.float64, device=scatter.device)
    mean = scatter.diagonal().mean()
    if degrees_of_freedom < 1 or mean <= 0:
        return identity
    covariance = scatter / mean  # of mean variance one
    square, trace = (covariance**2).sum(), float(width)
    # The terms of order 1 / width are left out, as in scikit-learn.
    numerator, denominator = square + trace**2, (degrees_of_freedom + 1) * (square - trace**2 / width)
    shrinkage = float((numerator / denominator).clamp(0, 1)) if denominator > 0 else 1.0
    return ((1 - shrinkage) * covariance + shrinkage * identity) * (mean / degrees_of_freedom)


def inverse_sqrt(eigenvalues: Tensor, eigenvectors: Tensor) -> Tensor:
    """The symmetric inverse square root of a positive matrix from its eigenvalues in ascending order.

    >>> inverse_sqrt(torch.tensor([4.0, 16.0]), torch.eye(2)).diagonal()
    tensor([0.5000, 0.2500])
    """
    floor = max(float(eigenvalues[-1]) * _RCOND, math.ulp(0.0))
    root: Tensor = (eigenvectors * eigenvalues.clamp_min(floor).rsqrt()) @ eigenvectors.T
    return root
