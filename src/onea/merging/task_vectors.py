# SPDX-License-Identifier: Apache-2.0
"""Element-wise operators on task vectors: task arithmetic, DARE, TIES and MagMax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onea import seeds
from onea.merging.average import RunningMean
from onea.merging.operator import BaseOperator, MergeResult, Sizes, num_merged
from onea.schema import BelowOne, Fraction, Positive
from onea.tensors import Tensors, cast_like, to_float64

Votes = Literal["uniform", "classes"]


@dataclass(frozen=True)
class TaskArithmetic(BaseOperator):
    """``scale * (first + second + ...)``; its norm grows with the number of tasks.

    Attributes:
        scale: factor on every task (lambda).
    """

    title = "Task arithmetic"
    paper = "https://arxiv.org/abs/2212.04089"
    associative = True

    scale: float = 0.3

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        old_scale = 1.0 if "count" in state else self.scale  # the first task is not scaled yet
        merged = {
            name: cast_like(old_scale * to_float64(left) + self.scale * to_float64(new[name]), left)
            for name, left in accumulated.items()
        }
        return MergeResult(merged, {"count": torch.tensor(num_merged(state) + 1)})


@dataclass(frozen=True)
class DARE(BaseOperator):
    """Drop random entries of the new side and rescale the others, then take the running mean.

    Paper: "Language Models are Super Mario". The entries are ``mask * new / (1 - drop)``, with expectation ``new``.

    Attributes:
        drop: share of entries that are dropped; about 0.9 suits the tiny deltas of large language models.
        seed: random seed of the masks, which differ between merges and tensors.
    """

    title = "DARE"
    paper = "https://arxiv.org/abs/2311.03099"

    drop: BelowOne = 0.2
    seed: int = 0

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        sparse = {}
        for name, tensor in new.items():
            generator = seeds.generator(self.seed, num_merged(state), f"dare {name}")
            kept = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) >= self.drop
            value = to_float64(tensor)
            sparse[name] = value * kept.to(value.device) / (1 - self.drop)
        return RunningMean()(accumulated, sparse, sizes, state)


@dataclass(frozen=True)
class TIES(BaseOperator):
    """Trim small entries, elect a sign for each entry, and average the values with that sign.

    Paper: "TIES-Merging: Resolving Interference When Merging Models". In this continual form only the new side is
    trimmed, as trimming the accumulated side at every merge would thin it out. Two untrimmed sides merge to the mean
    where their signs agree and to the larger entry where they differ.

    Attributes:
        density: share of the new side's entries that is kept, over all tensors together.
        scale: factor on the result; the accumulated side is divided by it before the next merge.
        weights: votes in the election and the mean: one per task (``uniform``) or one per class (``classes``).
    """

    title = "TIES"
    paper = "https://arxiv.org/abs/2306.01708"

    density: Fraction = 0.2
    scale: Positive = 1.0
    weights: Votes = "uniform"

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        count, old_scale = num_merged(state), self.scale if "count" in state else 1.0
        votes = count_votes(self.weights, sizes, count)
        trimmed = trim({name: to_float64(tensor) for name, tensor in new.items()}, self.density)
        merged = {
            name: cast_like(self.scale * elect(to_float64(left) / old_scale, trimmed[name], *votes), left)
            for name, left in accumulated.items()
        }
        return MergeResult(merged, {"count": torch.tensor(count + 1)})


def count_votes(weights: Votes, sizes: Sizes, count: int) -> tuple[float, float]:
    """The votes of the accumulated side, with ``count`` tasks, and of the new side."""
    return (sizes.accumulated_classes, sizes.new_classes) if weights == "classes" else (count, 1)


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


def elect(left: Tensor, right: Tensor, left_votes: float = 1, right_votes: float = 1) -> Tensor:
    """The mean of the entries with the sign of the sum; zeros have no vote. A sum of zero takes the sign of ``left``.

    >>> elect(torch.tensor([1.0, 3.0, -1.0, 2.0, 0.0]), torch.tensor([3.0, -1.0, 2.0, -2.0, 5.0]))
    tensor([2., 3., 2., 2., 5.])
    """
    total = left_votes * left + right_votes * right
    sign = torch.where(total == 0, left, total).sign()
    left_counts, right_counts = left_votes * (left * sign > 0), right_votes * (right * sign > 0)
    votes = left_counts + right_counts
    return (left_counts * left + right_counts * right) / torch.where(votes > 0, votes, 1.0)


@dataclass(frozen=True)
class MagMax(BaseOperator):
    """The entry of larger magnitude; of two equal ones, the newer.

    Paper: "MagMax: Leveraging Model Merging for Seamless Continual Learning". Each task starts from the weights of the
    previous one, so changes are relative to the initial weights of the first task.

    Attributes:
        scale: factor on the result; the accumulated side is divided by it before the next merge.
    """

    title = "MagMax"
    paper = "https://arxiv.org/abs/2407.06322"
    associative = True
    starts_from = "previous"

    scale: Positive = 0.5

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        old_scale = self.scale if "count" in state else 1.0
        merged = {}
        for name, tensor in accumulated.items():
            left, right = to_float64(tensor) / old_scale, to_float64(new[name])
            merged[name] = cast_like(self.scale * torch.where(right.abs() >= left.abs(), right, left), tensor)
        return MergeResult(merged, {"count": torch.tensor(num_merged(state) + 1)})
