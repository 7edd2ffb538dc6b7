# SPDX-License-Identifier: Apache-2.0
"""An adapter per task, merged by any operator of the merging library: ``onea run adapter --merge ties``."""

from __future__ import annotations

from typing import ClassVar

from onea.learner.merged_adapter import MergedAdapterOptions
from onea.research.methods.adapter_merging import AdapterMerging


class MergedAdapter(AdapterMerging):
    """One adapter, merged by the operator of your choice."""

    title: ClassVar[str] = "Merged adapter"
    paper: ClassVar[str] = "https://arxiv.org/abs/2603.10237"
    trains: ClassVar[str] = "an adapter per task"
    stores: ClassVar[str] = "one adapter, a prototype per class, what the operator remembers"
    in_paper: ClassVar[bool] = False
    Options: ClassVar[type] = MergedAdapterOptions
    base_learning_rate: ClassVar[float | None] = 0.17
