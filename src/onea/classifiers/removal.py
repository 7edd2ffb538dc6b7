# SPDX-License-Identifier: Apache-2.0
"""Statistics without some of the images that are in them, from the features of these alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.classifiers.statistics import ClassStatistics
from onea.tensors import eigh, to_float64


def without_images(known: ClassStatistics, features: Tensor, rows: Tensor) -> ClassStatistics:
    """The opposite of ``ClassStatistics.add``, exact but for what was cut off or rounded since.

    Of a class, at least one feature must be left.

    Args:
        known: statistics of plain features, with these among them.
        features: ``[N, width]``.
        rows: their classes.
    """
    assert known.scatter is not None
    assert not known.unit_length
    if not len(rows):
        return known
    exact, means = to_float64(features), to_float64(known.means)
    gone = torch.bincount(rows, minlength=known.classes)
    left = (known.counts - gone).double()
    total = torch.zeros_like(means).index_add(0, rows, exact)
    after = (means * known.counts[:, None] - total) / left[:, None]
    touched = gone.nonzero()[:, 0]
    # The sum of squares around the old mean is that of the images taken, of the others around their own mean, and of
    # the step between the two means.
    inside = exact - means[rows]
    step = (after - means)[touched] * left[touched].sqrt()[:, None]
    scatter = _positive(known.scatter - inside.T @ inside - step.T @ step)
    changed = replace(
        known,
        means=torch.where(gone[:, None] > 0, after, means).float(),
        counts=known.counts - gone,
        scatter=scatter,
        freedom=known.freedom - len(rows),
    )
    if known.factors is None:
        return changed
    factors = known.factors.clone()
    for place, row in enumerate(touched.tolist()):
        less = torch.cat([inside[rows == row], step[place : place + 1]])
        factors[row] = _lessened(to_float64(known.factors[row]), less).float()
    return replace(changed, factors=factors)


def _positive(matrix: Tensor) -> Tensor:
    """The nearest matrix without negative eigenvalues, which rounding brings in."""
    values, vectors = eigh((matrix + matrix.T) / 2)
    return (vectors * values.clamp_min(0)) @ vectors.T


def _lessened(factor: Tensor, less: Tensor) -> Tensor:
    """As many rows, whose product with themselves is the factor's less that of other rows."""
    basis, parts = torch.linalg.qr(torch.cat([factor, less]).T)
    more, fewer = parts[:, : len(factor)], parts[:, len(factor) :]
    values, vectors = eigh(more @ more.T - fewer @ fewer.T)
    found = (vectors * values.clamp_min(0).sqrt()).T @ basis.T
    return F.pad(found.flip(0)[: len(factor)], (0, 0, 0, max(0, len(factor) - len(found))))
