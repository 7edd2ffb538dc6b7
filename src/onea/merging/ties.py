# SPDX-License-Identifier: Apache-2.0
"""TIES: drop the small entries, elect a sign for each, and average only the entries that agree with it.

Paper: "TIES-Merging: Resolving Interference When Merging Models" (arXiv 2306.01708). Continual form: only the
new side is trimmed, because trimming the accumulated one at every merge would thin it out again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onea.merging.operator import MergeResult, Sizes, Traits, check_mergeable, count_of
from onea.schema import Fraction, Positive
from onea.tensors import Tensors, cast_like, to_float64

Votes = Literal["uniform", "classes"]


def trim(tensors: Tensors, density: float) -> Tensors:
    """Keep the share ``density`` of all entries that is largest in magnitude, over all tensors together.

    >>> trim({"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([2.0, 3.0])}, 0.5)
    {'a': tensor([ 0., -4.]), 'b': tensor([0., 3.])}
    """
    magnitudes = torch.cat([tensor.abs().flatten() for tensor in tensors.values()])
    kept = min(max(1, round(density * len(magnitudes))), len(magnitudes))
    if kept == len(magnitudes):
        return dict(tensors)
    smallest = magnitudes.kthvalue(len(magnitudes) - kept + 1).values
    return {name: torch.where(tensor.abs() >= smallest, tensor, 0.0) for name, tensor in tensors.items()}


def elect(left: Tensor, right: Tensor, left_vote: float = 1, right_vote: float = 1) -> Tensor:
    """The mean of the entries that agree with the sign of the sum; zeros have no vote, and a draw is for the left.

    >>> elect(torch.tensor([1.0, 3.0, -1.0, 2.0, 0.0]), torch.tensor([3.0, -1.0, 2.0, -2.0, 5.0]))
    tensor([2., 3., 2., 2., 5.])
    """
    total = left_vote * left + right_vote * right
    sign = torch.where(total == 0, left, total).sign()
    left_counts, right_counts = left_vote * (left * sign > 0), right_vote * (right * sign > 0)
    votes = left_counts + right_counts
    return (left_counts * left + right_counts * right) / torch.where(votes > 0, votes, 1.0)


def votes_of(weights: Votes, sizes: Sizes, count: int) -> tuple[float, float]:
    """The votes of the accumulated side, which holds ``count`` tasks, and of the new one."""
    return (sizes.accumulated_classes, sizes.new_classes) if weights == "classes" else (count, 1)


@dataclass(frozen=True)
class TIES(Traits):
    """Trim, elect sign, disjoint mean; vectors and matrices alike, entry by entry.

    Two untrimmed sides merge to the mean where their signs agree and to the larger entry where they differ.

    Attributes:
        density: share of the new side's entries that is kept, over all tensors together.
        scale: factor on the result; the accumulated side is divided by it again before the next merge.
        weights: the votes of a side in election and mean: one for every task (``uniform``) or one for every class
            (``classes``).
    """

    title = "TIES"
    paper = "https://arxiv.org/abs/2306.01708"

    density: Fraction = 0.2
    scale: Positive = 1.0
    weights: Votes = "uniform"

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Merge; ``state["count"]`` is the number of sides inside ``accumulated``, and tells that it is scaled."""
        check_mergeable(accumulated, new)
        count, old_scale = count_of(state), self.scale if "count" in state else 1.0
        votes = votes_of(self.weights, sizes, count)
        trimmed = trim({name: to_float64(tensor) for name, tensor in new.items()}, self.density)
        merged = {
            name: cast_like(self.scale * elect(to_float64(left) / old_scale, trimmed[name], *votes), left)
            for name, left in accumulated.items()
        }
        return MergeResult(merged, {"count": torch.tensor(count + 1)})
