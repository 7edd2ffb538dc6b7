# SPDX-License-Identifier: Apache-2.0
"""Means of everything merged so far: one vote per task, one per class or sample, or all votes for the newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onea.merging.operator import MergeResult, Sizes, Traits, check_mergeable, count_of
from onea.schema import Positive
from onea.tensors import Tensors, cast_like, to_float64


def join_mean(left: Tensor, right: Tensor, count: float, joining: float = 1) -> Tensor:
    """The float64 mean of a side that counts ``count`` times and one that counts ``joining`` times."""
    return (to_float64(left) * count + to_float64(right) * joining) / (count + joining)


@dataclass(frozen=True)
class RunningMean(Traits):
    """``((n - 1) * accumulated + new) / n`` for the n-th side; equals the plain mean of all sides."""

    title = "Running mean"
    paper = "https://arxiv.org/abs/2203.05482"
    associative = True
    on_deltas = False
    starts_from = "fresh"

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Merge; ``state["count"]`` is the number of sides inside ``accumulated`` (one at the first merge)."""
        check_mergeable(accumulated, new)
        count = count_of(state)
        merged = {name: cast_like(join_mean(left, new[name], count), left) for name, left in accumulated.items()}
        return MergeResult(merged, {"count": torch.tensor(count + 1)})


@dataclass(frozen=True)
class WeightedMean(Traits):
    """``(N * accumulated + n * new) / (N + n)``: every class, or every sample, has one vote.

    Attributes:
        by: what has a vote: ``classes`` or ``samples``.
        boost: votes of each class or sample of the new side; one of the old side has one.
    """

    title = "Weighted mean"
    paper = "https://arxiv.org/abs/2203.05482"
    uses_sizes = True
    associative = True
    on_deltas = False
    starts_from = "fresh"

    by: Literal["classes", "samples"] = "classes"
    boost: Positive = 1.0

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Merge; keeps no state."""
        check_mergeable(accumulated, new)
        old, joining = sizes.accumulated_classes, sizes.new_classes
        if self.by == "samples":
            old, joining = sizes.accumulated_samples, sizes.new_samples
        joining *= self.boost
        return MergeResult(
            {name: cast_like(join_mean(left, new[name], old, joining), left) for name, left in accumulated.items()}
        )


@dataclass(frozen=True)
class Newest(Traits):
    """``new``: no merge. Where tasks start from the kept adapter, the sequential training that MagMax improves on."""

    title = "Newest"
    paper = "https://arxiv.org/abs/2407.06322"
    on_deltas = False
    starts_from = "previous"

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """The new side; keeps no state."""
        check_mergeable(accumulated, new)
        return MergeResult({name: cast_like(new[name], left) for name, left in accumulated.items()})
