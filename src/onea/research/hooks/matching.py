# SPDX-License-Identifier: Apache-2.0
"""The prompts of an image: those whose keys are nearest to its query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onea.vit.heads import cosine_scores

Selection = Literal["instance", "batch"]


@dataclass(frozen=True)
class Match:
    """The keys chosen for each query of a batch, and how well they fit.

    Attributes:
        chosen: their numbers, ``int64 [B, count]``.
        cosines: of each query to its chosen keys, ``[B, count]``.
    """

    chosen: Tensor
    cosines: Tensor

    def pull(self) -> Tensor:
        """How close queries and their keys are: the sum over the chosen keys, the mean over the batch."""
        return self.cosines.sum(1).mean()


def match_keys(queries: Tensor, keys: Tensor, count: int, selection: Selection = "instance") -> Match:
    """Choose the ``count`` keys of largest cosine for each query.

    With ``batch`` the whole batch shares the keys that most of its queries chose (of equally many, the first ones); the
    answer for one image then depends on its neighbours.

    >>> keys = torch.eye(3)
    >>> queries = torch.tensor([[3.0, 1.0, 0.0], [2.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    >>> match_keys(queries, keys, 1).chosen.T
    tensor([[0, 0, 2]])
    >>> match_keys(queries, keys, 1, "batch").chosen.T
    tensor([[0, 0, 0]])
    """
    cosines = cosine_scores(queries, keys)
    chosen = cosines.topk(count, dim=1).indices
    if selection == "batch":
        votes = torch.bincount(chosen.flatten(), minlength=len(keys))
        chosen = votes.argsort(descending=True, stable=True)[:count].expand(len(queries), -1)
    return Match(chosen, cosines.gather(1, chosen))
