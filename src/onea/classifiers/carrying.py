# SPDX-License-Identifier: Apache-2.0
"""Where old statistics go when the adapter changes: a linear map that the new images show, without any old one.

Each new image has a feature under the old adapter and one under the new. The ridge regression from the former to the
change tells how features move; its strength is the one that best predicts the change of images left out one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onea.tensors import eigh, to_float64

_ROUNDING = 1e-9  # one image predicts as well as no move at all, but for rounding
_STRENGTHS = torch.logspace(-4, 4, 33, dtype=torch.float64)  # relative to the mean squared singular value


def feature_map(before: Tensor, after: Tensor) -> Tensor:
    """The map ``[width, width]`` (float64) that takes features before to features after; identity where in doubt.

    >>> features = torch.eye(3)
    >>> torch.equal(feature_map(features, features), torch.eye(3, dtype=torch.float64))
    True
    """
    old = to_float64(before)
    change = to_float64(after) - old
    power, basis = eigh(old.T @ old)
    power = power.clamp_min(0)
    turned = old @ basis
    inside = turned.T @ change
    best, least = torch.zeros_like(power), float((change**2).sum())  # no move at all, unless something predicts better
    for strength in (_STRENGTHS * power[-len(old) :].mean().cpu()).tolist():
        weights = 1 / (power + strength)
        residual = change - turned @ (weights[:, None] * inside)
        leverage = (turned**2 * weights).sum(1)
        error = float(((residual / (1 - leverage).clamp_min(1e-6)[:, None]) ** 2).sum())
        if error < least * (1 - _ROUNDING):
            best, least = weights, error
    moved: Tensor = basis @ (best[:, None] * inside)
    return torch.eye(old.shape[1], dtype=torch.float64, device=old.device) + moved
