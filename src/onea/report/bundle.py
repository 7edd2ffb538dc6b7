# SPDX-License-Identifier: Apache-2.0
"""All files of a report about a set of records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from onea.errors import OneaError
from onea.files import write_atomically
from onea.record import Record
from onea.report import formats, style
from onea.report.aggregate import Setting, grid_table, settings
from onea.report.experiment_figures import banded_curves
from onea.report.experiment_page import experiment_page
from onea.report.table import Table


def write_report(records: Sequence[Record], folder: Path, title: str) -> list[Path]:
    """Write page, tables and curves, and return their paths; records are grouped by data, stream and network."""
    records = _best_first(records)
    found = settings(records)
    tables = [grid_table(setting) for setting in found]
    lines = [formats.csv_text(_told(table)).splitlines(keepends=True) for table in tables]
    texts = {
        "report.html": experiment_page(title, records),
        "table.md": "\n".join(map(formats.markdown, tables)),
        "table.tex": "\n".join(map(formats.latex, tables)),
        "table.csv": "".join([lines[0][0], *(line for table in lines for line in table[1:])]),
    }
    for name, text in texts.items():
        write_atomically(folder / name, text.encode(), "choose another --out")
    return [*(folder / name for name in texts), *_curves(found, folder)]


def _best_first(records: Sequence[Record]) -> list[Record]:
    """One-A, which this package is about and which curves emphasise, then the most accurate."""
    return sorted(records, key=lambda record: (record["config"]["method"] != "one-a", -record["metrics"]["A"][-1]))


def with_titles(records: Sequence[Record]) -> list[Record]:
    """Records under the names that papers give their methods, where this installation knows them."""
    from onea.methods import method_class

    titles: dict[str, str] = {}
    for name in {record["config"]["method"] for record in records}:
        try:
            titles[name] = method_class(name).title
        except OneaError:  # somebody else's method, whose package is not installed here
            titles[name] = name
    return [{"title": titles[record["config"]["method"]]} | record for record in records]


def _told(table: Table) -> Table:
    """The table with its setting in every column, as lines of one file must say where they come from."""
    columns = tuple(dataclasses.replace(column, group=table.title) for column in table.columns)
    return dataclasses.replace(table, columns=columns)


def _curves(found: Sequence[Setting], folder: Path) -> list[Path]:
    names = ["curves.png"] if len(found) == 1 else [f"curves-{number}.png" for number in range(1, len(found) + 1)]
    return [style.save(banded_curves(setting), folder / name) for setting, name in zip(found, names, strict=True)]
