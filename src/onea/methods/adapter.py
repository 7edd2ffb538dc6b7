# SPDX-License-Identifier: Apache-2.0
"""An adapter per task, merged by any operator of the merging library: ``onea run adapter --merge ties``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onea.merging import make_operator
from onea.merging.operator import Operator
from onea.methods.adapter_merging import AdapterMerging, MergingOptions
from onea.options import parse_pairs


@dataclass(frozen=True)
class MergedAdapterOptions(MergingOptions):
    """Options of the training, and which merge follows it.

    Attributes:
        merge: the operator: one-a, running-mean, weighted-mean, newest, task-arithmetic, ties, dare, fisher, regmean,
            knots, knots-ties, tsv, iso-c, opcm, magmax, acmap, or one that an installed package adds.
        merge_options: options of the operator, such as density=0.2,scale=0.6.
    """

    merge: str = "one-a"
    merge_options: str = ""

    def operator(self) -> Operator:
        """The operator that these options name."""
        return make_operator(self.merge, **parse_pairs(self.merge_options, "merge_options"))


class MergedAdapter(AdapterMerging):
    """One adapter, merged by the operator of your choice."""

    title: ClassVar[str] = "Merged adapter"
    paper: ClassVar[str] = "https://arxiv.org/abs/2603.10237"
    trains: ClassVar[str] = "an adapter per task"
    stores: ClassVar[str] = "one adapter, a prototype per class, what the operator remembers"
    in_paper: ClassVar[bool] = False
    Options: ClassVar[type] = MergedAdapterOptions
    base_rate: ClassVar[float | None] = 0.17
