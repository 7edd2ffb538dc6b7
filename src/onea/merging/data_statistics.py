# SPDX-License-Identifier: Apache-2.0
"""Operators that need statistics of the training data: Fisher merging and RegMean.

Statistics are sums over samples or tokens, not means, so a larger task has a larger weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onea.errors import OneaError
from onea.merging.average import mean
from onea.merging.operator import BaseOperator, MergeResult, Sizes, as_matrix, num_merged
from onea.schema import ZeroToOne
from onea.tensors import Tensors, cast_like, to_float64

_RCOND = 1e-10  # input directions with a smaller share of the energy count as absent


@dataclass(frozen=True)
class Fisher(BaseOperator):
    """``(F_acc * accumulated + F_new * new) / (F_acc + F_new)``, with the diagonal Fisher information ``F``.

    Paper: "Merging Models with Fisher-Weighted Averaging". Where neither side has information the accumulated entry
    stays; no constant is added to the denominator, so the merge is exact and associative. A task with a single class
    has no information and changes nothing.

    Takes ``fisher.NAME`` and ``new_fisher.NAME``, each with the shape of tensor NAME, and keeps their sum.
    """

    title = "Fisher merging"
    paper = "https://arxiv.org/abs/2111.09832"
    associative = True
    needs = "fisher"
    on_deltas = False

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        merged, kept = {}, {}
        for name, left in accumulated.items():
            old, added = _statistics(state, f"fisher.{name}", tuple(left.shape), self.title, left)
            total = old + added
            informed = total > 0
            share = torch.where(informed, added / torch.where(informed, total, 1.0), 0.0)
            value = to_float64(left)
            merged[name] = cast_like(value + share * (to_float64(new[name]) - value), left)
            kept[f"fisher.{name}"] = total
        return MergeResult(merged, kept)


@dataclass(frozen=True)
class RegMean(BaseOperator):
    """The linear layer whose outputs are closest to those of each merged layer on the data of its task.

    Paper: "Dataless Knowledge Fusion by Merging Weights of Language Models". It solves ``W (G_acc + G_new) =
    W_acc G_acc + W_new G_new`` for matrices ``[out, in]``, with Gram matrices ``G`` of the inputs; vectors are
    averaged. In input directions without data the accumulated matrix stays.

    Takes ``gram.NAME`` and ``new_gram.NAME`` (``[in, in]``) of each matrix, and keeps their sum.

    Attributes:
        off_diagonal: factor on the off-diagonal entries of the Gram matrices; 0 to 1.
    """

    title = "RegMean"
    paper = "https://arxiv.org/abs/2212.09849"
    associative = True
    needs = "gram"
    on_deltas = False

    off_diagonal: ZeroToOne = 0.9

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        count = num_merged(state)
        merged, kept = {}, {"count": torch.tensor(count + 1)}
        for name, left in accumulated.items():
            if left.dim() < 2:
                merged[name] = cast_like(mean(left, new[name], count), left)
                continue
            old_weight, new_weight = as_matrix(left), as_matrix(new[name])
            width = old_weight.shape[1]
            old, added = _statistics(state, f"gram.{name}", (width, width), self.title, left)
            inverse = torch.linalg.pinv(self._scaled(old + added), rtol=_RCOND, hermitian=True)
            # The normal equations, solved for the change, which is zero where they have no solution.
            merged[name] = cast_like(old_weight + (new_weight - old_weight) @ self._scaled(added) @ inverse, left)
            kept[f"gram.{name}"] = old + added
        return MergeResult(merged, kept)

    def _scaled(self, gram: Tensor) -> Tensor:
        return self.off_diagonal * gram + (1 - self.off_diagonal) * torch.diag(gram.diagonal())


def _statistics(state: Tensors, key: str, shape: tuple[int, ...], title: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """A statistic of the accumulated and of the new side in float64, on the device of the tensor."""
    device = to_float64(like).device
    statistics = []
    for name in (key, f"new_{key}"):
        if name not in state:
            raise OneaError(
                f"{title} needs statistics of the training data, which plain files do not have; "
                f"give them as state['{name}'] or choose another operator."
            )
        value = to_float64(state[name]).to(device)
        if tuple(value.shape) != shape:
            raise OneaError(f"state['{name}'] has shape {tuple(value.shape)}; it must be {shape}.")
        statistics.append(value)
    return statistics[0], statistics[1]
