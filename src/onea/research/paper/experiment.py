# SPDX-License-Identifier: Apache-2.0
"""The paper's methods and datasets, the structure of its tables and figures, and the numbers in ``reported.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple

from onea.errors import OneaError, import_extra
from onea.research.data import data_name

BACKBONE = "vit_base_patch16_224.augreg_in21k"
BACKBONE_TITLE = "ViT-B/16 pretrained on ImageNet-21K"


@dataclass(frozen=True)
class PaperData:
    """A dataset of the paper: its title, and the numbers of classes, training images and test images."""

    title: str
    classes: int
    train: int
    test: int


DATASETS: dict[str, PaperData] = {
    "cifar100": PaperData("CIFAR100", 100, 50_000, 10_000),
    "cub200": PaperData("CUB", 200, 5_994, 5_794),
    "imagenet-a": PaperData("ImageNet-A", 200, 6_000, 1_500),
    "imagenet-r": PaperData("ImageNet-R", 200, 24_000, 6_000),
}

# The paper's names of the methods, in the order of its tables, and ours.
METHODS: dict[str, str] = {
    "L2P": "l2p",
    "DualPrompt": "dualprompt",
    "CODA-Prompt": "coda-prompt",
    "Aper-adapter": "aper-adapter",
    "EASE": "ease",
    "InfLoRA": "inflora",
    "SEMA": "sema",
    "ACMap": "acmap",
    "CL-LoRA": "cl-lora",
    "Per-task adapter": "per-task",
    "MOS": "mos",
    "One-A": "one-a",
}


def data_title(data: str) -> str:
    """The name of a dataset in headings.

    >>> data_title("cub200"), data_title("folder:/shop/hats")
    ('CUB', 'hats')
    """
    name = data_name(data)
    return DATASETS[name].title if name in DATASETS else name


Kind = Literal[
    "table",
    "settings",  # table of hyper-parameters, without runs
    "streams",  # figures of streams, without runs
    "bars",
    "curves",  # accuracy after each task, one panel per group
    "forgetting",  # forgetting after each task, one panel per group
    "directions",  # update strength per singular direction
    "alignment",  # overlap of the bases before and after a merge
    "heatmap",  # one panel per group
    "scatter",  # accuracy against cost
]

# Options of all runs. PILOT's preprocessing is for the paper's backbone only.
SHARED: dict[str, Any] = {"backbone": BACKBONE, "protocol": "pilot", "stream": "step", "gamma": 0.01}


@dataclass(frozen=True)
class Cell:
    """A cell of a table or figure, with one run per seed.

    Attributes:
        row: name of the row.
        group: heading over the columns; ``{data}``, ``{tasks}`` and ``{gamma}`` are replaced.
        columns: heading (with the same placeholders) and metric of each column that the runs fill.
        options: arguments of ``make_config``, without the seed.
        split: split all tasks into tasks of at most this many classes, in the same class order.
    """

    row: str
    group: str
    columns: tuple[tuple[str, str], ...]
    options: Mapping[str, Any]
    split: int | None = None

    def headings(self) -> tuple[tuple[str, str], ...]:
        """Group and heading of each column."""
        words = {
            "data": data_title(self.options["data"]),
            "tasks": self.options["tasks"],
            "gamma": f"{self.options['gamma']:g}",
        }
        return tuple((self.group.format(**words), name.format(**words)) for name, _ in self.columns)


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Attributes:
        name: ``table1``, ``figure4``, ... in order of appearance.
        alias: descriptive name.
        title: title on one line.
        label: LaTeX label in the paper.
        kind: how the experiment is displayed.
        cells: cells of the experiment; empty without runs.
        seeds: number of seeds, from 1.
        per_task: whether it shows a single stream task by task, so that all rows must have the same seed.
        notes: choices that the paper leaves open.
    """

    name: str
    alias: str
    title: str
    label: str
    kind: Kind
    cells: tuple[Cell, ...] = ()
    seeds: int = 1
    per_task: bool = False
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """Name and title for pages."""
        return f"{self.name.replace('table', 'Table ').replace('figure', 'Figure ')}: {self.title}"

    @property
    def datasets(self) -> tuple[str, ...]:
        """The datasets of its runs, in order."""
        return tuple(dict.fromkeys(str(cell.options["data"]) for cell in self.cells))


# reported numbers


class Number(NamedTuple):
    """A reported number, and its standard deviation if there is one."""

    value: float
    std: float | None


@dataclass(frozen=True)
class ReportedTable:
    """A table of the paper.

    Attributes:
        name: ``table1`` to ``table10``, in order of appearance.
        label: LaTeX label in the paper.
        columns: ``group / name``, or the name alone.
        rows: the values of each row, one per column, as printed.
    """

    name: str
    label: str
    caption: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]

    def cell(self, row: str, column: str) -> str | None:
        """The printed text of a cell, or None if there is no such cell."""
        if row not in self.rows or column not in self.columns:
            return None
        return self.rows[row][self.columns.index(column)]


@cache
def reported_tables() -> dict[str, ReportedTable]:
    """All tables of the paper by name."""
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


def number(printed: str) -> Number:
    """Parse a printed cell.

    >>> number("88.23 ± 0.48"), number("39.19×").value, number("5×10^-4").value, number("40 (T)").value
    (Number(value=88.23, std=0.48), 39.19, 0.0005, 40.0)
    """
    if power := re.fullmatch(r"([\d.]+)×10\^(-?\d+)", printed):
        return Number(float(f"{power[1]}e{power[2]}"), None)
    value, _, rest = printed.partition(" ± ")
    mean, std = (re.match(r"[\d.]+", text) for text in (value, rest))
    if mean is None:
        raise OneaError(f"'{printed}' contains no number; correct reported.yaml.")
    return Number(float(mean[0]), float(std[0]) if std else None)
