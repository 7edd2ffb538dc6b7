"""One-A: one adapter for all tasks, merged with regard to how much each side knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from onea.merging.analysis import describe
from onea.merging.one_a import OneA, Proxy, unstack
from onea.merging.operator import Sizes, Tensors
from onea.methods.adapter_merging import AdapterMerging, MergingOptions


@dataclass(frozen=True)
class OneAOptions(MergingOptions):
    """Options of One-A: those of the training, and every part of the merge.

    Attributes:
        alignment: project the smaller side into the larger one's subspace; off is the weighted mean.
        weights: information proxy: classes, uniform, norm or spectrum.
        gating: hold back the leading singular directions.
        kappa: sharpness of the gate.
        quantile: share of directions, from the smallest up, whose gate exceeds one half.
        base_by: what makes a side the larger one: samples or classes.
        swapped_weights: reproduce the official code's swapped class shares.
    """

    alignment: bool = True
    weights: Proxy = "classes"
    gating: bool = True
    kappa: float = 2.0
    quantile: float = 0.3
    base_by: Literal["samples", "classes"] = "samples"
    swapped_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.merge()  # refuses what makes no sense now, not after the first task

    def merge(self) -> OneA:
        """The merge these options describe."""
        return OneA(**{name: getattr(self, name) for name in OneA.__dataclass_fields__})


class OneAMethod(AdapterMerging):
    """One adapter, merged by asymmetric alignment, information-adaptive weights and directional gates."""

    title: ClassVar[str] = "One-A"
    paper: ClassVar[str] = "https://arxiv.org/abs/2603.10237"
    trains: ClassVar[str] = "an adapter per task"
    stores: ClassVar[str] = "one adapter, a prototype per class"
    Options: ClassVar[type] = OneAOptions
    options: OneAOptions

    def operator(self) -> OneA:
        """The merge of the paper, with the switches of the options."""
        return self.options.merge()

    def merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes) -> tuple[Tensors, dict[str, Any]]:
        """Merge, and record who was the base, the align share, the range of the gates and what each direction did."""
        operator = self.operator()
        fusions = operator.fusions(accumulated, new, sizes)
        matrices = [fusion for _, fusion in fusions if fusion.merged.shape[1] > 1]
        report = {
            "base": "new" if operator.new_is_base(sizes) else "accumulated",
            "align_share": float(torch.cat([fusion.align_share for _, fusion in fusions]).mean()),
            "gate_min": min(float(fusion.gates.min()) for fusion in matrices),
            "gate_max": max(float(fusion.gates.max()) for fusion in matrices),
            "analysis": describe(fusions),
        }
        return unstack(accumulated, fusions), report
