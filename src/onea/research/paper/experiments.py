# SPDX-License-Identifier: Apache-2.0
"""Every table and figure of the paper, by name."""

from __future__ import annotations

from functools import cache

from onea.errors import OneaError, did_you_mean
from onea.research.paper.experiment import Experiment
from onea.research.paper.figures import FIGURES
from onea.research.paper.tables import TABLES


@cache
def experiments() -> dict[str, Experiment]:
    """Every table and figure by name, in the paper's order."""
    return {experiment.name: experiment for experiment in (*TABLES, *FIGURES)}


def find_experiment(name: str) -> Experiment:
    """An experiment by its name, its alias or the paper's label."""
    known = experiments()
    names = {key: one for one in known.values() for key in (one.name, one.alias, one.label)}
    if name.lower() in ("figure3", "fig:framework"):
        raise OneaError("Figure 3 is a drawing of the method, not a result; `onea paper` lists what can be made.")
    if name not in names:
        hint = did_you_mean(name, {key for one in known.values() for key in (one.name, one.alias)})
        if not hint.startswith("did you mean"):
            hint = "`onea paper` lists them all."
        raise OneaError(f"There is no experiment '{name}'; {hint}")
    return names[name]
