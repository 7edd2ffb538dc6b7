# SPDX-License-Identifier: Apache-2.0
"""MagMax: of every entry, keep the largest change that any task made.

Paper: "MagMax: Leveraging Model Merging for Seamless Continual Learning" (arXiv 2407.06322). Its tasks are
trained one from the other, so the changes are measured from where the first task began.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onea.merging.operator import MergeResult, Sizes, Traits, check_mergeable, count_of
from onea.schema import Positive
from onea.tensors import Tensors, cast_like, to_float64


@dataclass(frozen=True)
class MagMax(Traits):
    """The entry of larger magnitude, the newer of two equal ones; vectors and matrices alike.

    Attributes:
        scale: factor on the result; the accumulated side is divided by it again before the next merge.
    """

    title = "MagMax"
    paper = "https://arxiv.org/abs/2407.06322"
    associative = True
    starts_from = "previous"

    scale: Positive = 0.5

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Merge; ``state["count"]`` tells that the accumulated side is scaled already."""
        check_mergeable(accumulated, new)
        old_scale = self.scale if "count" in state else 1.0
        merged = {}
        for name, tensor in accumulated.items():
            left, right = to_float64(tensor) / old_scale, to_float64(new[name])
            merged[name] = cast_like(self.scale * torch.where(right.abs() >= left.abs(), right, left), tensor)
        return MergeResult(merged, {"count": torch.tensor(count_of(state) + 1)})
