# SPDX-License-Identifier: Apache-2.0
"""ACMap's merge: the running mean of the first tasks; after so many the adapter stays as it is.

Paper: "Adapter Merging with Centroid Prototype Mapping for Scalable Class-Incremental Learning" (arXiv 2412.18219).
Later tasks start from the first task's trained adapter, so that all lie in one basin.
"""

from __future__ import annotations

from dataclasses import dataclass

from onea.merging.average import RunningMean
from onea.merging.operator import MergeResult, Sizes, Traits, check_mergeable, count_of
from onea.schema import Count
from onea.tensors import Tensors


@dataclass(frozen=True)
class ACMapMean(Traits):
    """The running mean until ``limit`` sides are in it; vectors and matrices alike.

    Attributes:
        limit: number of sides after which nothing is merged any more.
    """

    title = "ACMap"
    paper = "https://arxiv.org/abs/2412.18219"
    on_deltas = False
    starts_from = "first"

    limit: Count = 10

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Merge; ``state["count"]`` is the number of sides inside ``accumulated``."""
        check_mergeable(accumulated, new)
        if count_of(state) >= self.limit:
            return MergeResult(dict(accumulated), dict(state))
        return RunningMean()(accumulated, new, sizes, state)
