# SPDX-License-Identifier: Apache-2.0
"""The table of every report: columns, rows of words or of numbers over seeds, notes; ``formats`` and ``html`` write it.

The best number of a column and the second best are marked, and what has not been run is a gap to be seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

Mark = Literal["best", "second"]
NOTHING = "–"  # where a number could be and none is
GAP = "not run"


@dataclass(frozen=True)
class Value:
    """A number over seeds.

    Attributes:
        mean: over the seeds that have been run; None while there is none.
        std: sample deviation over seeds; None for fewer than two.
        seeds: how many were run.
        wanted: how many the experiment asks for; fewer are a gap to mark.
        reported: what the paper prints, as it prints it, such as ``88.23 ± 0.48``; None where it prints nothing.
        competes: whether it may be the best of its column once it is complete.
    """

    mean: float | None = None
    std: float | None = None
    seeds: int = 0
    wanted: int = 0
    reported: str | None = None
    competes: bool = True

    @property
    def complete(self) -> bool:
        """Whether every seed that the experiment asks for has been run."""
        return self.mean is not None and self.seeds >= self.wanted

    @property
    def gap(self) -> str:
        """What is missing: ``not run``, ``2/5 seeds``, or nothing.

        >>> Value(mean=1.0, seeds=2, wanted=5).gap, Value(wanted=5).gap, Value().gap
        ('2/5 seeds', 'not run', '')
        """
        if self.complete or not self.wanted:
            return ""
        return f"{self.seeds}/{self.wanted} seeds" if self.mean is not None else GAP

    def text(self, digits: int) -> str:
        """The number as it is printed, ``88.23 ± 0.48``; empty where there is none.

        >>> Value(mean=88.234, std=0.4777, seeds=5, wanted=5).text(2)
        '88.23 ± 0.48'
        """
        if self.mean is None:
            return ""
        spread = "" if self.std is None else f" ± {self.std:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


Cell = Value | str


@dataclass(frozen=True)
class TableColumn:
    """One column.

    Attributes:
        name: such as ``A_T``.
        group: heading over neighbouring columns, such as a dataset.
        higher_is_better: which of its numbers are marked.
        digits: of its numbers, behind the decimal point.
        align: numbers stand on the right, words on the left.
    """

    name: str
    group: str = ""
    higher_is_better: bool = True
    digits: int = 2
    align: Literal["left", "right"] = "right"


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        name: its first cell.
        cells: one for each column, or a single one that holds for all of them.
        group: heading over neighbouring rows.
        note: what a reader must know about this row.
        link: an address behind the name.
        emphasised: whether the report is about this row more than about the others.
    """

    name: str
    cells: tuple[Cell, ...]
    group: str = ""
    note: str = ""
    link: str = ""
    emphasised: bool = False


@dataclass(frozen=True)
class Table:
    """Rows by columns.

    Attributes:
        title: one line.
        notes: what a reader must know, the first one most of all (another backbone or dataset than the paper's).
        corner: heading over the names of the rows.
        mark_second: whether the second best of a column is marked too.
    """

    title: str
    columns: tuple[TableColumn, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    corner: str = ""
    mark_second: bool = True

    @classmethod
    def of(
        cls,
        title: str,
        rows: Sequence[str],
        columns: Sequence[TableColumn],
        values: Mapping[tuple[str, int], Value],
        notes: Sequence[str] = (),
    ) -> Table:
        """A table of numbers by row name and column index; a missing one is an empty cell."""
        every = (Row(row, tuple(values.get((row, i), Value()) for i in range(len(columns)))) for row in rows)
        return cls(title, tuple(columns), tuple(every), tuple(notes))

    @classmethod
    def of_texts(cls, title: str, heads: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> Table:
        """A table of finished texts; so many columns from the left hold words, the others numbers."""
        columns = tuple(
            TableColumn(head, align="left" if index < left else "right") for index, head in enumerate(heads)
        )
        return cls(title, columns[1:], tuple(Row(name, tuple(cells)) for name, *cells in lines), corner=heads[0])

    @property
    def values(self) -> dict[tuple[str, int], Value]:
        """The numbers by row name and column index."""
        return {(row.name, i): c for row in self.rows for i, c in enumerate(row.cells) if isinstance(c, Value)}

    @property
    def row_notes(self) -> list[str]:
        """The notes of single rows as sentences."""
        return [f"{row.name}: {row.note}." for row in self.rows if row.note]

    def cells(self, row: Row) -> Iterator[tuple[int, TableColumn, Cell]]:
        """Every column of a row: its index, itself and its cell."""
        every = row.cells * len(self.columns) if len(row.cells) == 1 else row.cells
        return zip(range(len(every)), self.columns, every, strict=True)

    def column_groups(self) -> list[tuple[str, int]]:
        """Neighbouring columns of one group: its name and how many they are; nothing where no group has a name."""
        groups = [(name, len(list(inside))) for name, inside in groupby(self.columns, key=lambda column: column.group)]
        return groups if any(name for name, _ in groups) else []

    def marks(self) -> dict[tuple[str, int], Mark]:
        """The best and the second best of each column, among complete cells and as printed; equal ones share a mark."""
        found: dict[tuple[str, int], Mark] = {}
        values = self.values
        for index, column in enumerate(self.columns):
            fair = {
                key: round(value.mean, column.digits)
                for key, value in values.items()
                if key[1] == index and value.competes and value.complete and value.mean is not None
            }
            if len(fair) < 2:
                continue
            ranked = sorted(set(fair.values()), reverse=column.higher_is_better)[: 1 + self.mark_second]
            found |= {key: "best" if value == ranked[0] else "second" for key, value in fair.items() if value in ranked}
        return found
