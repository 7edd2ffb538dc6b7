# SPDX-License-Identifier: Apache-2.0
"""Statistics of features by class, which add up over tasks without any image.

Under one adapter, means, counts and the scatter around the means add up exactly, in any order. The covariance of a
class is kept as its leading directions; what is cut off has a bound that is kept with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.tensors import Tensors, eigh, round_to_bfloat16, to_float64
from onea.vit.heads import class_means

_TINY = 1e-12  # relative to the largest eigenvalue: below it there is rounding only


@dataclass(frozen=True)
class ClassStatistics:
    """Means, counts and spread of the features of each class; class ``i`` has row ``i``.

    The scatter is the sum over images of the outer product of their deviation from their class's mean. It belongs to
    all classes together, so what a forgotten class has put into it stays while another class is known.

    Attributes:
        means: mean feature of each class, ``[C, width]`` float32.
        counts: number of images of each class, ``[C]``.
        scatter: of all classes, ``[width, width]`` float64; None where it is not kept.
        freedom: number of independent deviations in the scatter: images less classes.
        factors: ``[C, directions, width]`` float32, rows of zeros where there is less; the product of a factor's
            transpose with itself is the scatter of one class, less what was cut off. None where it is not kept.
        cut: for each class a bound on the spectral norm of what was cut off its scatter, ``[C]``.
        unit_length: whether features are scaled to length one first.
    """

    means: Tensor
    counts: Tensor
    scatter: Tensor | None
    freedom: int
    factors: Tensor | None = None
    cut: Tensor | None = None
    unit_length: bool = False

    @classmethod
    def empty(cls, width: int, *, scatter: bool = True, directions: int = 0, unit_length: bool = False) -> Self:
        """Statistics of no image, which will keep this much of every class."""
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
        """Statistics of plain features, or of those of length one."""
        return "unit length" if self.unit_length else "plain"

    @property
    def richness(self) -> int:
        """Means alone, means and scatter, or with directions of each class."""
        return 0 if self.scatter is None else 1 if self.factors is None else 1 + self.factors.shape[1]

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.counts)

    @property
    def width(self) -> int:
        """The number of features."""
        return self.means.shape[1]

    def add(self, features: Tensor, rows: Tensor) -> Self:
        """The statistics with these images' features ``[N, width]`` added to the classes in ``rows``; new ones grow."""
        if not len(rows):
            return self
        exact = to_float64(F.normalize(features.float(), dim=1) if self.unit_length else features)
        known = self.to(exact.device).grown(int(rows.max()) + 1)
        rows = rows.to(exact.device)
        taught = rows.unique()
        position = torch.searchsorted(taught, rows)
        means = class_means(exact, position, range(len(taught)))
        new, old = torch.bincount(position, minlength=len(taught)).double(), known.counts[taught].double()
        before = to_float64(known.means[taught])
        total, step = old + new, means - before
        changed = replace(
            known,
            means=known.means.index_copy(0, taught, (before + step * (new / total)[:, None]).float()),
            counts=known.counts.index_copy(0, taught, total.long()),
        )
        if known.scatter is None:
            return changed
        inside = exact - means[position]
        apart = step * (old * new / total).sqrt()[:, None]  # what a known class's mean moved; nothing for a new class
        scatter = known.scatter + inside.T @ inside + apart.T @ apart
        freedom = known.freedom + len(rows) - int((old == 0).sum())
        changed = replace(changed, scatter=scatter, freedom=freedom)
        return changed if known.factors is None else changed._with_factors(taught, position, inside, apart)

    def carry(self, by: Tensor) -> Self:
        """The statistics after a linear map ``[width, width]`` of all features: rows of features times ``by``.

        Where features are scaled to length one first, that is no linear map, and nothing changes.
        """
        if self.unit_length:
            return self
        by = to_float64(by).to(self.means.device)
        return replace(
            self,
            means=(to_float64(self.means) @ by).float(),
            scatter=None if self.scatter is None else by.T @ self.scatter @ by,
            factors=None if self.factors is None else self.factors @ by.float(),
            cut=None if self.cut is None else self.cut * float(torch.linalg.matrix_norm(by, 2)) ** 2,
        )

    def joined(self, row: int, into: int) -> Self:
        """The statistics as if the images of one class had been those of another; its own row stays as it was."""
        new, old = self.counts[row].double(), self.counts[into].double()
        before = to_float64(self.means[into])
        step = to_float64(self.means[row]) - before
        place = torch.tensor([into], device=self.means.device)
        changed = replace(
            self,
            means=self.means.index_copy(0, place, (before + step * (new / (old + new)))[None].float()),
            counts=self.counts.index_copy(0, place, (old + new).long()[None]),
        )
        if self.scatter is None:
            return changed
        apart = (step * (old * new / (old + new)).sqrt())[None]
        changed = replace(changed, scatter=self.scatter + apart.T @ apart, freedom=self.freedom + 1)
        if self.factors is None or self.cut is None:
            return changed
        inside = self.factors[row].double()
        position = torch.zeros(len(inside), dtype=torch.int64, device=place.device)
        changed = replace(changed, cut=self.cut.index_copy(0, place, (self.cut[into] + self.cut[row])[None]))
        return changed._with_factors(place, position, inside, apart)

    def keep(self, rows: Tensor) -> Self:
        """The statistics of these classes alone; the scatter and its freedom stay those of all, while there is one."""
        known = self if len(rows) else self.cleared(torch.arange(self.classes, device=self.counts.device))
        return known._with_same_scatter(
            means=known.means[rows],
            counts=known.counts[rows],
            factors=None if known.factors is None else known.factors[rows],
            cut=None if known.cut is None else known.cut[rows],
        )

    def cleared(self, rows: Tensor) -> Self:
        """The statistics with nothing known of these classes; the scatter stays while anything is known of another."""
        counts = self.counts.index_fill(0, rows, 0)
        nothing = not bool(counts.any())
        return replace(
            self,
            means=self.means.index_fill(0, rows, 0),
            counts=counts,
            scatter=torch.zeros_like(self.scatter) if nothing and self.scatter is not None else self.scatter,
            freedom=0 if nothing else self.freedom,
            factors=None if self.factors is None else self.factors.index_fill(0, rows, 0),
            cut=None if self.cut is None else self.cut.index_fill(0, rows, 0),
        )

    def combine(self, other: Self) -> Self:
        """The statistics of two disjoint sets of classes under the same adapter: ours first, then the other's."""
        return replace(
            self,
            means=torch.cat([self.means, other.means]),
            counts=torch.cat([self.counts, other.counts]),
            scatter=None if self.scatter is None or other.scatter is None else self.scatter + other.scatter,
            freedom=self.freedom + other.freedom,
            factors=_joined(self.factors, other.factors),
            cut=_joined(self.cut, other.cut),
        )

    def grown(self, classes: int) -> Self:
        """The same with an empty row for every class that is new."""
        more = classes - self.classes
        if more <= 0:
            return self
        return replace(
            self,
            means=F.pad(self.means, (0, 0, 0, more)),
            counts=F.pad(self.counts, (0, more)),
            factors=None if self.factors is None else F.pad(self.factors, (0, 0, 0, 0, 0, more)),
            cut=None if self.cut is None else F.pad(self.cut, (0, more)),
        )

    def reduced_to(self, needed: ClassStatistics) -> Self:
        """The same with no more of every class than these, of the same kind, would keep."""
        directions = 0 if needed.factors is None else needed.factors.shape[1]
        return self._with_same_scatter(
            scatter=None if needed.scatter is None else self.scatter,
            factors=self.factors[:, :directions] if directions and self.factors is not None else None,
            cut=self.cut if directions else None,
        )

    def compact(self) -> Self:
        """The same with directions that bfloat16 can hold, which halves what has to be kept of them."""
        return self if self.factors is None else self._with_same_scatter(factors=round_to_bfloat16(self.factors))

    def to(self, device: torch.device) -> Self:
        """The statistics on another device; they stay where they are for one without float64."""
        if device.type == "mps" or self.means.device == device:
            return self
        parts: dict[str, Any] = {name: value.to(device) for name, value in self._tensors().items()}
        return replace(self, **parts)

    def state_dict(self) -> Tensors:
        """All of it as named tensors; of means alone no counts, because then a class comes only once."""
        if self.scatter is None:
            return {"prototypes": self.means}
        parts = self._tensors()
        return {"prototypes": parts.pop("means"), **parts, "freedom": torch.tensor(self.freedom)}

    def restored(self, state: Tensors) -> Self:
        """Statistics of the same kind from named tensors.

        Raises:
            ValueError: a tensor has another type or shape than such statistics have.
        """
        means = state["prototypes"]
        parts: dict[str, Any] = {"means": means}
        if self.scatter is None:
            parts["counts"] = torch.ones(len(means), dtype=torch.int64, device=means.device)
        else:
            parts |= {name: state[name] for name in self._tensors() if name != "means"}
        for name, value in parts.items():
            own = getattr(self, name)
            shape = own.shape if name == "scatter" else (len(means), *own.shape[1:])
            if value.dtype != own.dtype or value.shape != shape:
                raise ValueError(
                    f"{name} of {value.dtype} and {tuple(value.shape)}, not {own.dtype} and {tuple(shape)}"
                )
        return replace(self, freedom=self.freedom if self.scatter is None else int(state["freedom"]), **parts)

    def covariance(self) -> Tensor:
        """The covariance that all classes share, shrunk so that it can be inverted."""
        assert self.scatter is not None
        return shrunk_covariance(self.scatter, self.freedom)

    def whitening(self) -> Tensor:
        """The symmetric map under which the deviations of all classes together have the unit covariance."""
        return _inverse_root(*self._spectrum)

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the covariance: what takes most of the time, and is asked for often."""
        return eigh(self.covariance())

    def _with_same_scatter(self, **changes: Any) -> Self:
        """The same but for these changes, and for what is known of the scatter already."""
        changed = replace(self, **changes)
        if "_spectrum" in self.__dict__:
            changed.__dict__["_spectrum"] = self._spectrum
        return changed

    def _tensors(self) -> Tensors:
        parts = ((name, getattr(self, name)) for name in ("means", "counts", "scatter", "factors", "cut"))
        return {name: value for name, value in parts if value is not None}

    def _with_factors(self, taught: Tensor, position: Tensor, inside: Tensor, apart: Tensor) -> Self:
        """The same with new deviations in the factors of the classes taught: ``inside`` and how their means moved.

        Directions are chosen where classes are compared: in the whitened space. There ``W S W`` is cut to its leading
        eigenvectors and taken back by the inverse of ``W``.
        """
        assert self.factors is not None
        assert self.cut is not None
        values, vectors = self._spectrum
        values = values.clamp_min(values[-1] * _TINY)
        root, inverse = (vectors * values.rsqrt()) @ vectors.T, (vectors * values.sqrt()) @ vectors.T
        directions, factors, cut = self.factors.shape[1], self.factors.clone(), self.cut.clone()
        for place, row in enumerate(taught.tolist()):
            known = self.factors[row][self.factors[row].any(1)].double()  # nothing for a new class
            deviations = torch.cat([known, inside[position == place], apart[place : place + 1]])
            kept, dropped = _leading(deviations @ root, directions)
            factors[row] = F.pad(kept @ inverse, (0, 0, 0, directions - len(kept))).float()
            cut[row] += dropped * values[-1]  # taken back, a dropped direction is at most that much longer
        return self._with_same_scatter(factors=factors, cut=cut)


def _joined(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else torch.cat([first, second])


def _leading(rows: Tensor, most: int) -> tuple[Tensor, float]:
    """At most so many rows whose product with themselves is nearest to that of the given ones, and the largest
    eigenvalue that is lost.
    """
    if len(rows) <= rows.shape[1]:
        values, left = eigh(rows @ rows.T)
        right = left.T @ rows  # each row is an eigenvector times its singular value
    else:
        values, vectors = eigh(rows.T @ rows)
        right = values.clamp_min(0).sqrt()[:, None] * vectors.T
    order = torch.arange(len(values) - 1, -1, -1, device=values.device)
    kept = right[order[:most]]
    return kept, float(values[order[most]].clamp_min(0)) if len(values) > most else 0.0


def shrunk_covariance(scatter: Tensor, freedom: int) -> Tensor:
    """The covariance of deviations with this scatter, ``[width, width]`` float64.

    With few deviations it is shrunk towards a multiple of the identity by the oracle approximating shrinkage (Chen et
    al., 2010); with none, nothing is known and it is the identity.

    >>> shrunk_covariance(torch.diag(torch.tensor([400.0, 100.0], dtype=torch.float64)), 100).diagonal()
    tensor([3.8614, 1.1386], dtype=torch.float64)
    """
    width = len(scatter)
    one = torch.eye(width, dtype=torch.float64, device=scatter.device)
    mean = scatter.diagonal().mean()
    if freedom < 1 or mean <= 0:
        return one
    covariance = scatter / mean  # of mean variance one
    square, trace = (covariance**2).sum(), float(width)
    top, bottom = square + trace**2, (freedom + 1) * (square - trace**2 / width)  # without terms of order 1 / width
    share = float((top / bottom).clamp(0, 1)) if bottom > 0 else 1.0
    return ((1 - share) * covariance + share * one) * (mean / freedom)


def inverse_root(matrix: Tensor) -> Tensor:
    """The symmetric inverse square root of a positive matrix, float64.

    >>> inverse_root(torch.diag(torch.tensor([4.0, 16.0]))).diagonal()
    tensor([0.5000, 0.2500], dtype=torch.float64)
    """
    return _inverse_root(*eigh(to_float64(matrix)))


def _inverse_root(values: Tensor, vectors: Tensor) -> Tensor:
    """The same from eigenvalues, the largest last, and eigenvectors."""
    floor = max(float(values[-1]) * _TINY, math.ulp(0.0))
    root: Tensor = (vectors * values.clamp_min(floor).rsqrt()) @ vectors.T
    return root
