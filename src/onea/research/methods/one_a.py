# SPDX-License-Identifier: Apache-2.0
"""One-A: one adapter for all tasks, merged with regard to how much each side knows."""

from __future__ import annotations

from typing import ClassVar

from onea.learner.one_a import OneAOptions
from onea.research.methods.adapter_merging import AdapterMerging


class OneAMethod(AdapterMerging):
    """One adapter, merged by asymmetric alignment, information-adaptive weights and directional gates."""

    title: ClassVar[str] = "One-A"
    paper: ClassVar[str] = "https://arxiv.org/abs/2603.10237"
    trains: ClassVar[str] = "an adapter per task"
    stores: ClassVar[str] = "one adapter, a prototype per class"
    Options: ClassVar[type] = OneAOptions
    base_learning_rate: ClassVar[float | None] = 0.17
    options: OneAOptions
