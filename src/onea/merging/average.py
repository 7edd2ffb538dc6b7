# SPDX-License-Identifier: Apache-2.0
"""Means of all tasks, weighted by task (also ACMap), class or sample; or the newest task alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onea.merging.operator import BaseOperator, MergeResult, Sizes, num_merged
from onea.schema import Count, Positive
from onea.tensors import Tensors, cast_like, to_float64


def mean(left: Tensor, right: Tensor, left_weight: float, right_weight: float = 1) -> Tensor:
    """The weighted mean of two tensors in float64."""
    return (to_float64(left) * left_weight + to_float64(right) * right_weight) / (left_weight + right_weight)


@dataclass(frozen=True)
class RunningMean(BaseOperator):
    """``((n - 1) * accumulated + new) / n`` for the n-th task, which equals the plain mean of all tasks."""

    title = "Running mean"
    paper = "https://arxiv.org/abs/2203.05482"
    associative = True
    on_deltas = False
    starts_from = "fresh"

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        count = num_merged(state)
        merged = {name: cast_like(mean(left, new[name], count), left) for name, left in accumulated.items()}
        return MergeResult(merged, {"count": torch.tensor(count + 1)})


@dataclass(frozen=True)
class ACMapMean(BaseOperator):
    """The running mean of the first ``limit`` tasks, which later tasks leave unchanged.

    Paper: "Adapter Merging with Centroid Prototype Mapping for Scalable Class-Incremental Learning". Later tasks start
    from the first task's trained adapter, so that all adapters lie in one basin of the loss.

    Attributes:
        limit: number of tasks that are merged.
    """

    title = "ACMap"
    paper = "https://arxiv.org/abs/2412.18219"
    on_deltas = False
    starts_from = "first"

    limit: Count = 10

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        if num_merged(state) >= self.limit:
            return MergeResult(dict(accumulated), dict(state))
        return RunningMean()(accumulated, new, sizes, state)


@dataclass(frozen=True)
class WeightedMean(BaseOperator):
    """``(N * accumulated + n * new) / (N + n)``: every class, or every sample, has one vote. No state is kept.

    Attributes:
        by: what the weights count: ``classes`` or ``samples``.
        boost: weight of a class or sample of the new side, relative to one of the accumulated side.
    """

    title = "Weighted mean"
    paper = "https://arxiv.org/abs/2203.05482"
    uses_sizes = True
    associative = True
    on_deltas = False
    starts_from = "fresh"

    by: Literal["classes", "samples"] = "classes"
    boost: Positive = 1.0

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        votes, new_votes = sizes.accumulated_classes, sizes.new_classes
        if self.by == "samples":
            votes, new_votes = sizes.accumulated_samples, sizes.new_samples
        new_votes *= self.boost
        return MergeResult(
            {name: cast_like(mean(left, new[name], votes, new_votes), left) for name, left in accumulated.items()}
        )


@dataclass(frozen=True)
class Newest(BaseOperator):
    """The new side alone. Each task starts from the adapter of the last one: sequential training, MagMax's baseline."""

    title = "Newest"
    paper = "https://arxiv.org/abs/2407.06322"
    on_deltas = False
    starts_from = "previous"

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        return MergeResult({name: cast_like(new[name], left) for name, left in accumulated.items()})
