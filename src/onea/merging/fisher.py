# SPDX-License-Identifier: Apache-2.0
"""Fisher merging: every entry weighs as much as the training data cared about it.

Paper: "Merging Models with Fisher-Weighted Averaging" (arXiv 2111.09832). The diagonal Fisher information is
summed over samples, not averaged, so a larger task weighs more; a task of a single class has none and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onea.merging.operator import MergeResult, Sizes, Traits, check_mergeable, statistic
from onea.tensors import Tensors, cast_like, to_float64


@dataclass(frozen=True)
class Fisher(Traits):
    """``(F_acc * accumulated + F_new * new) / (F_acc + F_new)``, of vectors and matrices alike.

    Where neither side has any information the accumulated entry stays; no constant is added to the denominator, so
    the merge is exact and associative.
    """

    title = "Fisher merging"
    paper = "https://arxiv.org/abs/2111.09832"
    associative = True
    needs = "fisher"
    on_deltas = False

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Merge; takes ``fisher.NAME`` and ``new_fisher.NAME``, each shaped as NAME, and keeps their sum."""
        check_mergeable(accumulated, new)
        merged, kept = {}, {}
        for name, left in accumulated.items():
            old, added = (
                statistic(state, f"{prefix}fisher.{name}", tuple(left.shape), self.title, left)
                for prefix in ("", "new_")
            )
            total = old + added
            known = total > 0
            share = torch.where(known, added / torch.where(known, total, 1.0), 0.0)
            value = to_float64(left)
            merged[name] = cast_like(value + share * (to_float64(new[name]) - value), left)
            kept[f"fisher.{name}"] = total
        return MergeResult(merged, kept)
