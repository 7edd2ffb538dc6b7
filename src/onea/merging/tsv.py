# SPDX-License-Identifier: Apache-2.0
"""TSV-Merge: keep each side's leading singular vectors, make them orthogonal to each other, and put them together.

Paper: "Task Singular Vectors: Reducing Task Interference in Model Merging" (arXiv 2412.00081). Continual form:
the components are shared out by class counts; halves would halve every old task's rank at every merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onea.errors import OneaError
from onea.merging.average import join_mean
from onea.merging.operator import MergeResult, Sizes, Traits, check_mergeable, count_of, is_matrix, matrix
from onea.tensors import Tensors, cast_like, svd

_NULL = 1e-6  # components below this share of the largest are noise, and would disturb the others


def leading(side: Tensor, components: int) -> tuple[Tensor, Tensor, Tensor]:
    """Left vectors ``[out, k]``, values ``[k]`` and right vectors ``[in, k]`` of the largest components."""
    left, spectrum, right = svd(side)
    rank = int((spectrum > _NULL * spectrum[0]).sum())
    kept = min(components, rank)
    return left[:, :kept], spectrum[:kept], right[:kept].T


def orthogonal(vectors: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns (polar factor); repeated directions share one column's weight."""
    if not vectors.shape[1]:
        return vectors
    left, spectrum, right = svd(vectors)
    factor: Tensor = (left * (spectrum > _NULL * spectrum[0])) @ right
    return factor


@dataclass(frozen=True)
class TSV(Traits):
    """Matrices are put together from orthogonalised components of both sides; vectors are averaged.

    Attributes:
        components: kept of both sides together; 0 is as many as a matrix has.
    """

    title = "TSV-Merge"
    paper = "https://arxiv.org/abs/2412.00081"
    uses_sizes = True

    components: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.components < 0 or self.components == 1:
            raise OneaError(f"components is {self.components}; it must be 0, or at least 2 for two sides.")

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Merge; ``state["count"]`` is the number of sides inside ``accumulated``, for the vectors."""
        check_mergeable(accumulated, new)
        count = count_of(state)
        share = sizes.accumulated_classes / (sizes.accumulated_classes + sizes.new_classes)
        merged = {}
        for name, left in accumulated.items():
            if is_matrix(left):
                merged[name] = cast_like(self._merge(matrix(left), matrix(new[name]), share), left)
            else:
                merged[name] = cast_like(join_mean(left, new[name], count), left)
        return MergeResult(merged, {"count": torch.tensor(count + 1)})

    def _merge(self, old: Tensor, new: Tensor, share: float) -> Tensor:
        budget = min(self.components or old.numel(), *old.shape)
        kept = min(max(1, round(budget * share)), budget - 1)  # each side keeps at least one
        sides = zip(leading(old, kept), leading(new, budget - kept), strict=True)
        left, spectrum, right = (torch.cat(pair, dim=-1) for pair in sides)
        return (orthogonal(left) * spectrum) @ orthogonal(right).T
