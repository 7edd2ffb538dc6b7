# SPDX-License-Identifier: Apache-2.0
"""DARE: drop entries of the new side at random, scale up the rest, then average.

Paper: "Language Models are Super Mario" (arXiv 2311.03099). Only the new side is thinned: it was never before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onea import seeds
from onea.merging.average import RunningMean
from onea.merging.operator import MergeResult, Sizes, Traits, check_mergeable, count_of
from onea.schema import BelowOne
from onea.tensors import Tensors, to_float64


@dataclass(frozen=True)
class DARE(Traits):
    """``mask * new / (1 - drop)``, which is ``new`` on average, then the running mean; vectors and matrices alike.

    Attributes:
        drop: share of entries that is dropped; about 0.9 suits the tiny deltas of large language models.
        seed: of the draw; every merge and every tensor draws anew.
    """

    title = "DARE"
    paper = "https://arxiv.org/abs/2311.03099"

    drop: BelowOne = 0.2
    seed: int = 0

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Merge; ``state["count"]`` is the number of sides inside ``accumulated``."""
        check_mergeable(accumulated, new)
        thinned = {}
        for name, tensor in new.items():
            generator = seeds.generator(self.seed, count_of(state), f"dare {name}")
            kept = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) >= self.drop
            value = to_float64(tensor)
            thinned[name] = value * kept.to(value.device) / (1 - self.drop)
        return RunningMean()(accumulated, thinned, sizes, state)
