# SPDX-License-Identifier: Apache-2.0
"""An adapter trained on the first task and kept for ever, under any classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from onea.learner.merged_adapter import MergingOptions
from onea.merging.average import RunningMean
from onea.options import ZeroToOne
from onea.research.methods.adapter_merging import AdapterMerging
from onea.research.methods.classification import RandomFeatures
from onea.vit.hooks import BlockHooks


@dataclass(frozen=True)
class FirstTaskOptions(MergingOptions):
    """Options of an adapter of the first task: those of the training."""

    single_class: Literal["train", "skip"] = "skip"
    min_share: ZeroToOne = 1.0

    def operator(self) -> RunningMean:
        """Never asked for more than the first adapter."""
        return RunningMean()


class FirstTask(AdapterMerging):
    """One adapter, trained on the first task that has two classes or more."""

    title: ClassVar[str] = "First task"
    paper: ClassVar[str] = "https://arxiv.org/abs/2303.07338"
    trains: ClassVar[str] = "an adapter on the first task"
    stores: ClassVar[str] = "one adapter, a prototype per class"
    in_paper: ClassVar[bool] = False
    Options: ClassVar[type] = FirstTaskOptions
    base_learning_rate: ClassVar[float | None] = 0.21

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The adapter, which stands still after its task."""
        return {f"adapter of {self.merged.classes} classes": self.kept}


@dataclass(frozen=True)
class RanPACFirstOptions(RandomFeatures, FirstTaskOptions):
    """Options of RanPAC on an adapter of the first task."""


class RanPACFirst(FirstTask):
    """Ridge regression on random features of a network adapted to the first task, as published."""

    title: ClassVar[str] = "RanPAC (first task)"
    paper: ClassVar[str] = "https://arxiv.org/abs/2307.02251"
    stores: ClassVar[str] = "one adapter, two matrices of random features: 200 MB for 5,000"
    Options: ClassVar[type] = RanPACFirstOptions
    base_learning_rate: ClassVar[float | None] = 0.18
