# SPDX-License-Identifier: Apache-2.0
"""Where old prototypes go when the adapter changes: a linear map that the new images show, without any old one.

Each new image has a feature under the old adapter and one under the new. The ridge regression from the former to the
change tells how features move; its strength is the one that best predicts the change of images left out one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onea.decompose import svd

_STRENGTHS = torch.logspace(-4, 4, 33, dtype=torch.float64)  # relative to the mean squared singular value


def drift(before: Tensor, after: Tensor) -> Tensor:
    """The map ``[width, width]`` (float64) that takes features before to features after; identity where in doubt.

    >>> features = torch.eye(3)
    >>> torch.equal(drift(features, features), torch.eye(3, dtype=torch.float64))
    True
    """
    old, change = before.double(), (after - before).double()
    left, spectrum, right = svd(old)
    power = spectrum**2
    inside = left.T @ change
    best, least = torch.zeros_like(power), float((change**2).sum())  # no move at all, unless something predicts better
    for strength in (_STRENGTHS * power.mean()).tolist():
        shares = power / (power + strength)
        residual = change - left @ (shares[:, None] * inside)
        leverage = (left**2 * shares).sum(1)
        error = float(((residual / (1 - leverage).clamp_min(1e-6)[:, None]) ** 2).sum())
        if error < least:
            best, least = spectrum / (power + strength), error
    moved: Tensor = right.T @ (best[:, None] * inside)
    return torch.eye(old.shape[1], dtype=torch.float64) + moved
