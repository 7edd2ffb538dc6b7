# SPDX-License-Identifier: Apache-2.0
"""Merging operators: pure functions on tensors that know nothing of networks; looked up by name, imported when used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onea.registry import Registry

if TYPE_CHECKING:
    from onea.merging.operator import Operator

_OWN = {
    "one-a": "onea.merging.one_a:OneAMerge",
    "running-mean": "onea.merging.average:RunningMean",
    "weighted-mean": "onea.merging.average:WeightedMean",
    "newest": "onea.merging.average:Newest",
    "task-arithmetic": "onea.merging.task_arithmetic:TaskArithmetic",
    "ties": "onea.merging.ties:TIES",
    "dare": "onea.merging.dare:DARE",
    "fisher": "onea.merging.fisher:Fisher",
    "regmean": "onea.merging.regmean:RegMean",
    "knots": "onea.merging.knots:KnOTS",
    "knots-ties": "onea.merging.knots:KnOTSTies",
    "tsv": "onea.merging.tsv:TSV",
    "iso-c": "onea.merging.iso_c:IsoC",
    "opcm": "onea.merging.opcm:OPCM",
    "magmax": "onea.merging.magmax:MagMax",
    "acmap": "onea.merging.acmap:ACMapMean",
}

OPERATORS = Registry("operator", "onea.operators", _OWN)


def operator_class(name: str) -> Any:
    """The class of an operator: a dataclass whose fields are its options, with the attributes of ``Traits``."""
    return OPERATORS.load(name)


def make_operator(name: str, **options: Any) -> Operator:
    """An operator by name; options may be text, as a command line gives them.

    >>> make_operator("ties", density="0.5")
    TIES(density=0.5, scale=1.0, weights='uniform')
    """
    from onea.options import make_options

    operator: Operator = make_options(operator_class(name), options)
    return operator
