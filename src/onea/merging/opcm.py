# SPDX-License-Identifier: Apache-2.0
"""OPCM: add only what is orthogonal to the leading directions of what is there, and keep the norm of a single task.

Paper: "Merging Models on the Fly Without Retraining: A Sequential Approach to Scalable Continual Model Merging"
(arXiv 2501.09522).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onea.merging.operator import MergeResult, Sizes, Traits, check_mergeable, count_of, is_matrix, matrix
from onea.schema import ZeroToOne
from onea.tensors import Tensors, cast_like, svd, to_float64

_NULL = 1e-9  # directions below this share of the largest singular value are not directions of the accumulated side


@dataclass(frozen=True)
class OPCM(Traits):
    """Matrices are projected, vectors are added as they are; then everything is scaled to the mean norm of one task.

    Attributes:
        alpha: the leading directions are those before which the singular values sum to at most this share.
        keep_diagonal: reproduce the official code, whose zeroing of the diagonal has no effect.
    """

    title = "OPCM"
    paper = "https://arxiv.org/abs/2501.09522"

    alpha: ZeroToOne = 0.5
    keep_diagonal: bool = False

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Merge; keeps ``count``, the ``factor`` that the sum was divided by, and the mean ``norm`` of a task."""
        check_mergeable(accumulated, new)
        count = count_of(state)
        factor = float(state.get("factor", 1.0))
        norm = (count * float(state.get("norm", _norm(accumulated))) + _norm(new)) / (count + 1)
        sums = {}
        for name, left in accumulated.items():
            if is_matrix(left):
                sums[name] = factor * matrix(left) + self.project(matrix(left), matrix(new[name]))
            else:
                sums[name] = factor * to_float64(left) + to_float64(new[name])
        factor = _norm(sums) / norm if norm > 0 and _norm(sums) > 0 else 1.0
        merged = {name: cast_like(sums[name] / factor, left) for name, left in accumulated.items()}
        numbers = {"factor": factor, "norm": norm}
        kept = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
        return MergeResult(merged, {"count": torch.tensor(count + 1), **kept})

    def project(self, accumulated: Tensor, new: Tensor) -> Tensor:
        """``new`` without its part in the leading directions of ``accumulated``, nor along each direction's own pair.

        Written as a subtraction, for which the thin decomposition suffices.
        """
        left, spectrum, right = svd(accumulated)
        rank = int((spectrum > _NULL * spectrum[0]).sum())
        if not rank:
            return new
        left, spectrum, right = left[:, :rank], spectrum[:rank], right[:rank]
        reached = (spectrum.cumsum(0) > self.alpha * spectrum.sum()).nonzero()
        block = int(reached[0]) if len(reached) else rank
        removed = torch.zeros(rank, rank, dtype=torch.bool, device=new.device)
        removed[:block, :block] = True
        if not self.keep_diagonal:
            removed.fill_diagonal_(True)
        conflict: Tensor = left @ (removed * (left.T @ new @ right.T)) @ right
        return new - conflict


def _norm(tensors: Tensors) -> float:
    return math.sqrt(sum(float(to_float64(tensor).square().sum()) for tensor in tensors.values()))
