# SPDX-License-Identifier: Apache-2.0
"""The plain mean of all task adapters: the simplest merge, and a rival with the same training.

Adapters that start from different random weights have their hidden units in different orders, so that the mean of their
down-projections tends to zero. A start that all tasks share keeps the units in place: a second method of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from onea.learner.adapter_training import Start
from onea.learner.merged_adapter import MergingOptions
from onea.merging.average import RunningMean
from onea.research.methods.adapter_merging import AdapterMerging


@dataclass(frozen=True)
class RunningMeanOptions(MergingOptions):
    """Options of the running mean: those of the training."""

    def operator(self) -> RunningMean:
        """The plain mean."""
        return RunningMean()


class RunningMeanOfAdapters(AdapterMerging):
    """One adapter, the plain mean of all task adapters."""

    title: ClassVar[str] = "Running mean"
    paper: ClassVar[str] = "https://arxiv.org/abs/2203.05482"
    trains: ClassVar[str] = "an adapter per task"
    stores: ClassVar[str] = "one adapter, a prototype per class"
    in_paper: ClassVar[bool] = False
    Options: ClassVar[type] = RunningMeanOptions
    base_learning_rate: ClassVar[float | None] = 0.042
    auto_preset: ClassVar[Mapping[str, Any]] = {"single_class": "skip"}


@dataclass(frozen=True)
class SharedStartOptions(RunningMeanOptions):
    """Options of the running mean with a shared start."""

    start: Start = "shared"


class RunningMeanSharedStart(RunningMeanOfAdapters):
    """The plain mean of all task adapters, each trained from the same random weights."""

    title: ClassVar[str] = "Running mean, shared start"
    trains: ClassVar[str] = "an adapter per task, all from the same random weights"
    Options: ClassVar[type] = SharedStartOptions
    base_learning_rate: ClassVar[float | None] = 0.042
