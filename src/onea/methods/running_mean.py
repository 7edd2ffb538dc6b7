"""Running mean: every task's adapter counts the same, whatever its size. What One-A must beat."""

from __future__ import annotations

from typing import ClassVar

from onea.merging.average import RunningMean
from onea.merging.operator import Operator
from onea.methods.adapter_merging import AdapterMerging, MergingOptions


class RunningMeanOfAdapters(AdapterMerging):
    """One adapter, the plain mean of all task adapters."""

    title: ClassVar[str] = "Running mean"
    paper: ClassVar[str] = "https://arxiv.org/abs/2203.05482"
    trains: ClassVar[str] = "an adapter per task"
    stores: ClassVar[str] = "one adapter, a prototype per class"
    in_paper: ClassVar[bool] = False
    Options: ClassVar[type] = MergingOptions

    def operator(self) -> Operator:
        """The plain mean."""
        return RunningMean()
