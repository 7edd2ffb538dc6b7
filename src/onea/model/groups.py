# SPDX-License-Identifier: Apache-2.0
"""Which images of a class resemble each other, as photos taken in series do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

GROUPS = 6  # of a class, at most


def similar_groups(features: Tensor, most: int = GROUPS) -> Tensor:
    """The group of each of a class's images, ``int64 [N]``: each belongs to the nearest of a few that are far apart.

    Those few are found one by one: first the image least like the others, then always the one that is least like
    everything found so far (farthest-first traversal, in time proportional to the images).

    >>> similar_groups(torch.tensor([[9.0, 0.0], [0.0, 9.0], [9.1, 0.1], [9.0, 0.2]]), most=2).tolist()
    [1, 0, 1, 1]
    """
    unit = F.normalize(features.double() - features.double().mean(0), dim=1)
    nearest = unit @ unit[(unit @ unit.mean(0)).argmin()]
    groups = torch.zeros(len(unit), dtype=torch.int64)
    for number in range(1, min(most, len(unit))):
        similarity = unit @ unit[nearest.argmin()]
        groups[similarity > nearest] = number
        nearest = nearest.maximum(similarity)
    compact: Tensor = groups.unique(return_inverse=True)[1]  # where images are equal, a number may have no member
    return compact
