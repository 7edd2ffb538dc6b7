# SPDX-License-Identifier: Apache-2.0
"""RegMean: the linear layer whose outputs are closest to those of every merged layer on its own data.

Paper: "Dataless Knowledge Fusion by Merging Weights of Language Models" (arXiv 2212.09849). The Gram matrices
of the inputs are summed over tokens, not averaged, so a larger task weighs more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onea.merging.average import join_mean
from onea.merging.operator import MergeResult, Sizes, Traits, check_mergeable, count_of, matrix, statistic
from onea.schema import ZeroToOne
from onea.tensors import Tensors, cast_like

_RCOND = 1e-10  # input directions with a smaller share of the energy were not seen


@dataclass(frozen=True)
class RegMean(Traits):
    """``W (G_acc + G_new) = W_acc G_acc + W_new G_new`` for matrices ``[out, in]``; vectors are averaged.

    In directions of the input that neither side has seen the accumulated matrix stays.

    Attributes:
        off_diagonal: factor on the off-diagonal entries of the Gram matrices; 0 to 1.
    """

    title = "RegMean"
    paper = "https://arxiv.org/abs/2212.09849"
    associative = True
    needs = "gram"
    on_deltas = False

    off_diagonal: ZeroToOne = 0.9

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Merge; takes ``gram.NAME`` and ``new_gram.NAME`` (``[in, in]``) of every matrix, keeps their sum."""
        check_mergeable(accumulated, new)
        count = count_of(state)
        merged, kept = {}, {"count": torch.tensor(count + 1)}
        for name, left in accumulated.items():
            if left.dim() < 2:
                merged[name] = cast_like(join_mean(left, new[name], count), left)
                continue
            old_weight, new_weight = matrix(left), matrix(new[name])
            width = old_weight.shape[1]
            old, added = (
                statistic(state, f"{prefix}gram.{name}", (width, width), self.title, left) for prefix in ("", "new_")
            )
            inverse = torch.linalg.pinv(self._scaled(old + added), rtol=_RCOND, hermitian=True)
            # The normal equations, solved for the change: their solution where they have one, no change where not.
            merged[name] = cast_like(old_weight + (new_weight - old_weight) @ self._scaled(added) @ inverse, left)
            kept[f"gram.{name}"] = old + added
        return MergeResult(merged, kept)

    def _scaled(self, gram: Tensor) -> Tensor:
        return self.off_diagonal * gram + (1 - self.off_diagonal) * torch.diag(gram.diagonal())
