# SPDX-License-Identifier: Apache-2.0
"""One-A's merge: the smaller side is fused into the subspace of the larger one, by its share of the information."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from onea.merging.analysis import analyse
from onea.merging.gated_fusion import Fusion, Gate, fuse, stack, unstack
from onea.merging.operator import BaseOperator, MergeResult, Sizes
from onea.tensors import Tensors

Proxy = Literal["classes", "uniform", "norm", "spectrum"]


@dataclass(frozen=True)
class OneAMergeOptions(Gate):
    """The options of One-A's merge, with a switch for each ablation; shared by the operator and the method.

    Attributes:
        alignment: project the smaller side into the larger one's subspace; off is the weighted mean.
        weights: information proxy: ``classes`` (the paper), ``uniform`` (one half each), ``norm`` (Frobenius norm,
            per matrix) or ``spectrum`` (squared singular values, per matrix).
        base_by: what makes a side the larger one: its number of ``samples`` (the paper) or ``classes`` (the official
            code).
        swapped_weights: reproduce the official code, which gives a new base the accumulated side's class share.
        gated_base: the base to which gates apply: ``any`` (the paper; if the new side is the base, gates hold back what
            was learned before), or only the ``accumulated`` side.
    """

    alignment: bool = True
    weights: Proxy = "classes"
    base_by: Literal["samples", "classes"] = "samples"
    swapped_weights: bool = False
    gated_base: Literal["any", "accumulated"] = "any"


@dataclass(frozen=True)
class OneAMerge(OneAMergeOptions, BaseOperator):
    """The merging operator of One-A; the estimator is ``onea.OneA``."""

    title = "One-A"
    paper = "https://arxiv.org/abs/2603.10237"
    uses_sizes = True
    on_deltas = False
    starts_from = "fresh"

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        fusions = self.fusions(accumulated, new, sizes)

        def report() -> dict[str, Any]:
            matrices = [fusion for _, fusion in fusions if fusion.merged.shape[1] > 1]
            return {
                "base": "new" if self.new_is_base(sizes) else "accumulated",
                "align_share": float(torch.cat([fusion.align_share for _, fusion in fusions]).mean()),
                "gate_min": min(float(fusion.gates.min()) for fusion in matrices),
                "gate_max": max(float(fusion.gates.max()) for fusion in matrices),
                "analysis": analyse(fusions),
            }

        return MergeResult(unstack(accumulated, fusions), report=report)

    def new_is_base(self, sizes: Sizes) -> bool:
        """Whether the new side is the larger one; a tie goes to the new side."""
        if self.base_by == "classes":
            return sizes.new_classes >= sizes.accumulated_classes
        return sizes.new_samples >= sizes.accumulated_samples

    def fusions(self, accumulated: Tensors, new: Tensors, sizes: Sizes) -> list[tuple[list[str], Fusion]]:
        """The names and the fusion of all tensors of a shape, in order of first appearance."""
        base, align = (new, accumulated) if self.new_is_base(sizes) else (accumulated, new)
        groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, tensor in base.items():
            groups[tuple(tensor.shape)].append(name)
        return [(names, self._fuse_group(stack(base, names), stack(align, names), sizes)) for names in groups.values()]

    def _fuse_group(self, base: Tensor, align: Tensor, sizes: Sizes) -> Fusion:
        open_gates = self.gated_base == "accumulated" and self.new_is_base(sizes)
        gate = Gate(gating=False) if open_gates else self
        return fuse(base, align, self._align_share(base, align, sizes), gate, alignment=self.alignment)

    def _align_share(self, base: Tensor, align: Tensor, sizes: Sizes) -> Tensor | float:
        """The align side's share of the information (Eq. 8)."""
        if self.weights == "uniform":
            return 0.5
        if self.weights == "classes":
            align_is_new = not self.new_is_base(sizes) or self.swapped_weights
            return sizes.new_share if align_is_new else 1 - sizes.new_share
        # The squared singular values sum to the squared Frobenius norm, so no decomposition is needed.
        power = 1 if self.weights == "norm" else 2
        info_base, info_align = (side.flatten(1).norm(dim=1) ** power for side in (base, align))
        total = info_base + info_align
        return torch.where(total > 0, info_align / total.where(total > 0, torch.ones_like(total)), 0.5)
