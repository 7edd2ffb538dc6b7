# SPDX-License-Identifier: Apache-2.0
"""The paper: its methods and datasets, the cells of its tables and figures, and the numbers in ``reported.yaml``."""

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
    """A dataset of the paper, as published.

    Attributes:
        title: the paper's name of it.
        classes: how many.
        train: training images in all.
        test: test images in all.
    """

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

# Methods by the paper's name, in the order of its tables.
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
    """What a heading calls a dataset.

    >>> data_title("cub200"), data_title("folder:/shop/hats")
    ('CUB', 'hats')
    """
    name = data_name(data)
    return DATASETS[name].title if name in DATASETS else name


Kind = Literal[
    "table",  # numbers by row and column
    "settings",  # hyper-parameters, nothing to run
    "streams",  # pictures of streams, nothing to run
    "bars",  # one number by row, grouped by column
    "curves",  # accuracy after every task, a panel a group
    "forgetting",  # forgetting after every task, a panel a group
    "directions",  # update strength per singular direction of the merges
    "alignment",  # bases before against bases after a merge
    "heatmap",  # one number by row and column, a panel a group
    "scatter",  # accuracy against cost, a point a row
]

# What every run of the paper shares. PILOT's preprocessing goes with the paper's backbone only.
SHARED: dict[str, Any] = {"backbone": BACKBONE, "protocol": "pilot", "stream": "step", "gamma": 0.01}


@dataclass(frozen=True)
class Cell:
    """The runs behind one place of a table or figure: one for each seed.

    Attributes:
        row: the row's name.
        group: heading over the columns; ``{data}``, ``{tasks}`` and ``{gamma}`` stand for the run's own.
        columns: a heading (with the same words in braces) and a metric for each number that the runs give here.
        options: what ``make_config`` takes, without the seed.
        split: cut every task into pieces of at most so many classes, in the same class order.
    """

    row: str
    group: str
    columns: tuple[tuple[str, str], ...]
    options: Mapping[str, Any]
    split: int | None = None

    def headings(self) -> tuple[tuple[str, str], ...]:
        """Group and name of each column."""
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
        name: ``table1``, ``figure4``, ... in the paper's order of appearance.
        alias: a readable name.
        title: one line.
        label: the paper's own label.
        kind: how it is shown.
        cells: what it is made of; empty where nothing is run.
        seeds: how many, counted from 1.
        per_task: whether it shows one stream step by step, so that all rows must share one seed.
        notes: choices that are ours because the paper does not say.
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
        """What a page calls it."""
        return f"{self.name.replace('table', 'Table ').replace('figure', 'Figure ')}: {self.title}"

    @property
    def datasets(self) -> tuple[str, ...]:
        """The datasets it runs on, in order."""
        return tuple(dict.fromkeys(str(cell.options["data"]) for cell in self.cells))


# what the paper reports


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
