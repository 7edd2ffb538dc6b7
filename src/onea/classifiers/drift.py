# SPDX-License-Identifier: Apache-2.0
"""Compensation of semantic drift: a linear map of features from before to after a change of the adapter.

Statistics of earlier classes become outdated when the adapter changes, and their images are gone. The new images have
features under both adapters, from which the drift is estimated (Yu et al., "Semantic Drift Compensation for
Class-Incremental Learning", arXiv 2004.00440) as a linear map (Gomez-Villa et al., "Exemplar-free Continual
Representation Learning via Learnable Drift Compensation", arXiv 2407.08536), here in closed form by ridge regression.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onea.tensors import eigh, to_float64

_ROUNDING = 1e-9  # smaller relative improvements over the identity are rounding errors
_STRENGTHS = torch.logspace(-4, 4, 33, dtype=torch.float64)  # relative to the mean squared singular value


def fit_drift_map(before: Tensor, after: Tensor) -> Tensor:
    """The matrix ``M = I + argmin_D ||F D - (F' - F)||^2 + l ||D||^2`` from features ``F`` before to ``F'`` after.

    The result is ``[width, width]`` float64; multiply features by it from the right. The strength ``l`` minimises the
    leave-one-out error, for which ridge regression has a closed form: the residual divided by one minus the leverage.
    The result is the identity if no strength has a smaller error.

    >>> features = torch.eye(3)
    >>> torch.equal(fit_drift_map(features, features), torch.eye(3, dtype=torch.float64))
    True
    """
    features = to_float64(before)
    change = to_float64(after) - features
    eigenvalues, basis = eigh(features.T @ features)
    eigenvalues = eigenvalues.clamp_min(0)
    rotated = features @ basis
    covariance = rotated.T @ change
    best, smallest_error = torch.zeros_like(eigenvalues), float((change**2).sum())  # of the identity
    for strength in (_STRENGTHS * eigenvalues[-len(features) :].mean().cpu()).tolist():
        weights = 1 / (eigenvalues + strength)
        residual = change - rotated @ (weights[:, None] * covariance)
        leverage = (rotated**2 * weights).sum(1)
        error = float(((residual / (1 - leverage).clamp_min(1e-6)[:, None]) ** 2).sum())
        if error < smallest_error * (1 - _ROUNDING):
            best, smallest_error = weights, error
    drift: Tensor = basis @ (best[:, None] * covariance)
    return torch.eye(features.shape[1], dtype=torch.float64, device=features.device) + drift
