# SPDX-License-Identifier: Apache-2.0
"""A table of an experiment: methods by settings, our mean and spread over seeds beside what a paper reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Value:
    """What is known about one cell.

    Attributes:
        mean: over the seeds that have been run; None while there is none.
        std: sample deviation over seeds; None for fewer than two.
        seeds: how many were run.
        wanted: how many the experiment asks for; fewer are a gap to mark.
        reported: what the paper prints, as it prints it, such as ``88.23 ± 0.48``; None where it prints nothing.
    """

    mean: float | None = None
    std: float | None = None
    seeds: int = 0
    wanted: int = 0
    reported: str | None = None


@dataclass(frozen=True)
class Column:
    """One column: a group such as a dataset, a name such as ``A_T``, and whether more is better."""

    group: str
    name: str
    higher_is_better: bool = True
    digits: int = 2


@dataclass(frozen=True)
class GridTable:
    """Rows by columns; a missing cell is an empty one.

    Attributes:
        title: one line.
        notes: what a reader must know, the first one most of all (another backbone or dataset than the paper's).
        values: by row name and column index.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    values: Mapping[tuple[str, int], Value]
    notes: tuple[str, ...] = field(default=())
