# SPDX-License-Identifier: Apache-2.0
"""Logistic regression with a few inputs: Newton's method, both sides of equal weight."""

from __future__ import annotations

import torch
from torch import Tensor

from onea.tensors import to_float64

_STEPS = 50
_LONGEST = 2.0  # step; where both sides are far apart, a whole one of Newton's would overshoot


def fit_log_odds(first: Tensor, second: Tensor, start: Tensor, strength: float) -> tuple[Tensor, float]:
    """Weights ``[k]`` and offset of the log-odds that a row is of the first kind rather than the second.

    Args:
        first: rows of the first kind, ``[N, k]``; all of them together weigh one half.
        second: rows of the second kind, ``[M, k]``.
        start: weights that others pay for leaving, ``[k]``.
        strength: of that, by half the squared distance.

    >>> rows = torch.tensor([[1.0], [2.0]])
    >>> weights, offset = fit_log_odds(rows, -rows, torch.zeros(1), 0.1)
    >>> bool(weights > 0), abs(offset) < 1e-6
    (True, True)
    """
    rows = to_float64(torch.cat([first, second]))
    inputs = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
    truth = torch.cat([rows.new_ones(len(first)), rows.new_zeros(len(second))])
    weights = torch.cat([rows.new_full((len(part),), 0.5 / len(part)) for part in (first, second)])
    origin = torch.cat([to_float64(start), rows.new_zeros(1)])
    prior = torch.full_like(origin, strength)
    prior[-1] = 0
    found = origin.clone()
    for _ in range(_STEPS):
        chances = torch.sigmoid(inputs @ found)
        slope = inputs.T @ (weights * (chances - truth)) + prior * (found - origin)
        curve = inputs.T @ ((weights * chances * (1 - chances))[:, None] * inputs) + prior.diag()
        step = torch.linalg.solve(curve + 1e-12 * torch.eye(len(found), dtype=curve.dtype), slope)
        found = found - step * (_LONGEST / step.norm().clamp_min(_LONGEST))
    return found[:-1], float(found[-1])
