# SPDX-License-Identifier: Apache-2.0
"""Iso-C: sum all tasks, then make every direction of the sum equally strong.

Paper: "No Task Left Behind: Isotropic Model Merging" (arXiv 2502.04959). The raw sum is remembered and only
what is deployed is flattened; otherwise every merge would flatten again what was flat already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onea.merging.average import join_mean
from onea.merging.operator import MergeResult, Sizes, Traits, check_mergeable, count_of, is_matrix, matrix
from onea.schema import BelowOne
from onea.tensors import Tensors, cast_like, svd


@dataclass(frozen=True)
class IsoC(Traits):
    """Every singular value of a matrix becomes their mean; vectors are averaged.

    Attributes:
        scale: factor on the flattened matrices (alpha).
        tolerance: singular values below this share of the largest are noise and stay zero; without the cut, flattening
            would raise a matrix of low rank to full rank.
    """

    title = "Iso-C"
    paper = "https://arxiv.org/abs/2502.04959"
    associative = True

    scale: float = 1.0
    tolerance: BelowOne = 1e-5

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Merge; keeps the raw sum of every matrix as ``sum.NAME``, and ``count`` for the vectors."""
        check_mergeable(accumulated, new)
        count = count_of(state)
        merged, kept = {}, {"count": torch.tensor(count + 1)}
        for name, left in accumulated.items():
            if not is_matrix(left):
                merged[name] = cast_like(join_mean(left, new[name], count), left)
                continue
            joining = matrix(new[name])
            total = state.get(f"sum.{name}", matrix(left)).to(joining) + joining
            merged[name] = cast_like(self.scale * self.flat(total), left)
            kept[f"sum.{name}"] = total
        return MergeResult(merged, kept)

    def flat(self, total: Tensor) -> Tensor:
        """The matrix with all its singular values that are not noise set to their mean."""
        left, spectrum, right = svd(total)
        rank = int((spectrum > self.tolerance * spectrum[0]).sum())
        if not rank:
            return torch.zeros_like(total)
        flat: Tensor = spectrum[:rank].mean() * left[:, :rank] @ right[:rank]
        return flat
