# SPDX-License-Identifier: Apache-2.0
"""One-A: one adapter for all tasks, merged with regard to how much each side knows."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from onea.merging.one_a import OneAMerge, OneASwitches
from onea.methods.adapter_merging import AdapterMerging, MergingOptions


@dataclass(frozen=True)
class OneAOptions(OneASwitches, MergingOptions):
    """Options of One-A: those of the training, and every part of the merge."""

    def operator(self) -> OneAMerge:
        """The merge of the paper, with these switches."""
        return OneAMerge(**{field.name: getattr(self, field.name) for field in fields(OneASwitches)})


class OneAMethod(AdapterMerging):
    """One adapter, merged by asymmetric alignment, information-adaptive weights and directional gates."""

    title: ClassVar[str] = "One-A"
    paper: ClassVar[str] = "https://arxiv.org/abs/2603.10237"
    trains: ClassVar[str] = "an adapter per task"
    stores: ClassVar[str] = "one adapter, a prototype per class"
    Options: ClassVar[type] = OneAOptions
    base_rate: ClassVar[float | None] = 0.17
    options: OneAOptions
