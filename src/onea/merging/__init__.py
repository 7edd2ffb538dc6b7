# SPDX-License-Identifier: Apache-2.0
"""Merging operators: pure functions on named tensors, in a registry that imports them on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onea.registry import Registry

if TYPE_CHECKING:
    from onea.merging.operator import Operator

_BUILT_IN = {
    "one-a": "onea.merging.one_a:OneAMerge",
    "running-mean": "onea.merging.average:RunningMean",
    "weighted-mean": "onea.merging.average:WeightedMean",
    "newest": "onea.merging.average:Newest",
    "task-arithmetic": "onea.merging.task_vectors:TaskArithmetic",
    "ties": "onea.merging.task_vectors:TIES",
    "dare": "onea.merging.task_vectors:DARE",
    "fisher": "onea.merging.data_statistics:Fisher",
    "regmean": "onea.merging.data_statistics:RegMean",
    "knots": "onea.merging.spectral:KnOTS",
    "knots-ties": "onea.merging.spectral:KnOTSTies",
    "tsv": "onea.merging.spectral:TSV",
    "iso-c": "onea.merging.spectral:IsoC",
    "opcm": "onea.merging.spectral:OPCM",
    "magmax": "onea.merging.task_vectors:MagMax",
    "acmap": "onea.merging.average:ACMapMean",
}

OPERATORS = Registry("operator", "onea.operators", _BUILT_IN)


def operator_class(name: str) -> Any:
    """The class of an operator: a dataclass with its options as fields and the attributes of ``BaseOperator``."""
    return OPERATORS.load(name)


def make_operator(name: str, **options: Any) -> Operator:
    """An operator by name; options may be text, as a command line gives them.

    >>> make_operator("ties", density="0.5")
    TIES(density=0.5, scale=1.0, weights='uniform')
    """
    from onea.options import make_options

    operator: Operator = make_options(operator_class(name), options)
    return operator
