# SPDX-License-Identifier: Apache-2.0
"""The numbers that the paper reports, cell by cell, from ``reported.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import NamedTuple

from onea.errors import OneaError, did_you_mean, import_extra


class Number(NamedTuple):
    """A printed number, and its deviation where one is printed."""

    value: float
    std: float | None


@dataclass(frozen=True)
class ReportedTable:
    """One table of the paper.

    Attributes:
        name: ``table1`` to ``table10``, in the order of appearance.
        label: the paper's own.
        columns: ``group / name``, or the name alone.
        rows: a row's values as printed, one per column.
    """

    name: str
    label: str
    caption: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]

    def cell(self, row: str, column: str) -> str | None:
        """What is printed there, or None where the table has no such cell."""
        if row not in self.rows or column not in self.columns:
            return None
        return self.rows[row][self.columns.index(column)]


@cache
def reported_tables() -> dict[str, ReportedTable]:
    """All tables by name."""
    yaml = import_extra("yaml", "research")

    text = (resources.files("onea.research.paper") / "reported.yaml").read_text(encoding="utf-8")
    tables: dict[str, ReportedTable] = {}
    for block in yaml.safe_load(text):
        rows = {str(row): tuple(str(value) for value in values) for row, values in block["rows"].items()}
        columns = tuple(str(column) for column in block["columns"])
        if wrong := [row for row, values in rows.items() if len(values) != len(columns)]:
            raise OneaError(f"reported.yaml is damaged: {block['name']} lacks values in '{wrong[0]}'; reinstall onea.")
        tables[block["name"]] = ReportedTable(block["name"], block["label"], block["caption"], columns, rows)
    return tables


def reported_table(name: str) -> ReportedTable:
    """A table by its name, or by the paper's own label."""
    tables = reported_tables()
    by_label = {table.label: table for table in tables.values()}
    found = tables.get(name) or by_label.get(name)
    if found is None:
        raise OneaError(f"The paper has no table '{name}'; {did_you_mean(name, tables)}")
    return found


def reported(table: str, row: str, column: str) -> str | None:
    """What a cell of the paper prints, or None where it prints nothing.

    >>> reported("table1", "One-A", "CIFAR100 (T=10) / A_T")
    '88.23 ± 0.48'
    """
    return reported_table(table).cell(row, column)


def number(printed: str) -> Number:
    """A printed cell as numbers.

    >>> number("88.23 ± 0.48"), number("39.19×").value, number("5×10^-4").value, number("40 (T)").value
    (Number(value=88.23, std=0.48), 39.19, 0.0005, 40.0)
    """
    if power := re.fullmatch(r"([\d.]+)×10\^(-?\d+)", printed):
        return Number(float(f"{power[1]}e{power[2]}"), None)
    value, _, rest = printed.partition(" ± ")
    std = re.match(r"[\d.]+", rest)
    found = re.match(r"[\d.]+", value)
    if found is None:
        raise OneaError(f"'{printed}' holds no number; correct reported.yaml.")
    return Number(float(found[0]), float(std[0]) if std else None)
