# SPDX-License-Identifier: Apache-2.0
"""Task arithmetic: the sum of all tasks, each scaled alike. Its norm grows with the number of tasks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onea.merging.operator import MergeResult, Sizes, Traits, check_mergeable, count_of
from onea.tensors import Tensors, cast_like, to_float64


@dataclass(frozen=True)
class TaskArithmetic(Traits):
    """``scale * (first + second + ...)``, of vectors and matrices alike.

    Attributes:
        scale: factor on every task (lambda).
    """

    title = "Task arithmetic"
    paper = "https://arxiv.org/abs/2212.04089"
    associative = True

    scale: float = 0.3

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Merge; ``state["count"]`` tells that the accumulated side is scaled already, which the first one is not."""
        check_mergeable(accumulated, new)
        old = 1.0 if "count" in state else self.scale
        merged = {
            name: cast_like(old * to_float64(left) + self.scale * to_float64(new[name]), left)
            for name, left in accumulated.items()
        }
        return MergeResult(merged, {"count": torch.tensor(count_of(state) + 1)})
