# SPDX-License-Identifier: Apache-2.0
"""From features to similarities: cosine to the class prototypes, in a space where classes are equally wide everywhere.

The spread of images around their class's prototype is much larger along some directions of a network's features than
along others, and says nothing there about the class. Dividing it out (the shared covariance of linear discriminant
analysis) needs one matrix, which adds up over updates exactly, without any image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onea.decompose import eigh
from onea.vit.heads import class_means, cosine_scores

Readout = Literal["whitened", "cosine"]


@dataclass(frozen=True)
class Evidence:
    """What images have said about classes so far; class ``i`` has row ``i``.

    Attributes:
        prototypes: mean feature of each class, ``[C, width]``.
        counts: images behind each, ``[C]``.
        scatter: sum over images of the outer product of their deviation from their prototype, float64.
        freedom: how many independent deviations are in it.
    """

    prototypes: Tensor
    counts: Tensor
    scatter: Tensor
    freedom: int

    def grown(self, classes: int) -> Evidence:
        """The same with an empty row for every class that is new."""
        more = classes - len(self.counts)
        return Evidence(
            torch.cat([self.prototypes, torch.zeros(more, self.prototypes.shape[1])]),
            torch.cat([self.counts, torch.zeros(more, dtype=torch.int64)]),
            self.scatter,
            self.freedom,
        )

    def plus(self, features: Tensor, rows: Tensor) -> Evidence:
        """The evidence with these images' features added to the classes in ``rows``."""
        taught = rows.unique()
        position = torch.searchsorted(taught, rows)
        means = class_means(features.double(), position, range(len(taught)))
        new, old = torch.bincount(position, minlength=len(taught)), self.counts[taught]
        before, total = self.prototypes[taught].double(), old + new
        step, inside = means - before, features.double() - means[position]
        apart = step * (old * new / total).sqrt()[:, None]  # what the classes' own means moved; nothing for a new class
        moved = before + step * (new / total)[:, None]
        return Evidence(
            self.prototypes.index_copy(0, taught, moved.float()),
            self.counts.index_copy(0, taught, total),
            self.scatter + inside.T @ inside + apart.T @ apart,
            self.freedom + len(rows) - int((old == 0).sum()),
        )

    def moved(self, by: Tensor) -> Evidence:
        """The evidence after a linear map of all features."""
        prototypes = (self.prototypes.double() @ by).float()
        return Evidence(prototypes, self.counts, by.T @ self.scatter @ by, self.freedom)

    def metric(self, readout: Readout) -> Tensor:
        """The map of features in which similarities are taken, ``[width, width]`` float32."""
        width = len(self.scatter)
        if readout == "cosine":
            return torch.eye(width)
        return whitening(self.scatter, self.freedom)

    def similarities(self, features: Tensor, metric: Tensor) -> Tensor:
        """Cosine of every feature to every prototype under a metric, ``[B, C]``."""
        return cosine_scores(features @ metric, self.prototypes @ metric)

    def crossed(self, features: Tensor, rows: Tensor, readout: Readout, folds: int = 5) -> Tensor:
        """Similarities of each feature under this evidence plus all other folds of these features, ``[N, C]``.

        So each image is judged by what others say, and every class keeps some of its images in every fold.
        """
        fold = torch.empty(len(rows), dtype=torch.int64)
        for row in rows.unique():
            own = (rows == row).nonzero()[:, 0]
            fold[own] = torch.arange(len(own)) % folds
        scores = torch.empty(len(rows), len(self.counts))
        for part in fold.unique():
            here = fold == part
            others = self.plus(features[~here], rows[~here]) if bool((~here).any()) else self
            scores[here] = others.similarities(features[here], others.metric(readout))
        return scores


def whitening(scatter: Tensor, freedom: int) -> Tensor:
    """The symmetric matrix that makes deviations with this scatter equally wide in all directions, up to a factor.

    With few deviations the covariance is shrunk towards a multiple of the identity by the oracle approximating
    shrinkage (Chen et al., 2010); with none, nothing is known and nothing is changed.

    >>> whitening(torch.diag(torch.tensor([400.0, 100.0], dtype=torch.float64)), 10**6).diagonal()
    tensor([0.7906, 1.5811])
    """
    width = len(scatter)
    mean = scatter.diagonal().mean()
    if freedom < 1 or mean <= 0:
        return torch.eye(width)
    covariance = scatter / mean  # of mean variance one: a common factor does not matter to a cosine
    square, trace = (covariance**2).sum(), float(width)
    top, bottom = square + trace**2, (freedom + 1) * (square - trace**2 / width)  # without terms of order 1 / width
    share = float((top / bottom).clamp(0, 1)) if bottom > 0 else 1.0
    shrunk = (1 - share) * covariance + share * torch.eye(width, dtype=torch.float64)
    values, vectors = eigh(shrunk)
    root: Tensor = (vectors * values.clamp_min(1e-9).rsqrt()) @ vectors.T
    return root.float()
