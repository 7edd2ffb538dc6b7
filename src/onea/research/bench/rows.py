# SPDX-License-Identifier: Apache-2.0
"""The figures of a bench, one line each, with hardware and versions: the CSV that it leaves behind."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from onea.files import write_atomically
from onea.research.bench.timing import Timing

PLAIN, OFFICIAL, SAME, FAST = "plain loop", "official", "same numerics", "fast"


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        measure: what was measured.
        setting: under which circumstances.
        column: who did it: the plain loop, the published code, we in the same numerics or our fastest, or plain timm.
        value: the median.
        unit: of the value and its spread.
        spread: half the distance between the quartiles; 0 for what does not vary.
    """

    measure: str
    setting: str
    column: str
    value: float
    unit: str
    spread: float = 0.0


def rate(measure: str, setting: str, column: str, images: int, timing: Timing) -> Row:
    """So many images in this time, as images per second."""
    speed = images / timing.seconds
    return Row(measure, setting, column, speed, "images/s", speed * timing.relative_spread)


def duration(measure: str, setting: str, column: str, timing: Timing) -> Row:
    """A time in milliseconds."""
    return Row(measure, setting, column, 1000 * timing.seconds, "ms", 1000 * timing.spread)


def find(rows: Iterable[Row], measure: str, setting: str, column: str, unit: str) -> Row | None:
    """The row of this name, if it was measured."""
    wanted = (measure, setting, column, unit)
    return next((row for row in rows if (row.measure, row.setting, row.column, row.unit) == wanted), None)


def chip_of(environment: dict[str, Any]) -> str:
    """The name of the accelerator, else of the processor."""
    return str(environment["accelerator"] or environment["processor"] or "unknown")


def hardware_of(environment: dict[str, Any], cores: int) -> str:
    """The chip and the cores that were used beside it."""
    return f"{chip_of(environment)}, {cores} cores"


def csv_name(environment: dict[str, Any], cores: int, backbone: str, data: str = "") -> str:
    """A file name that carries the hardware.

    >>> csv_name({"accelerator": "NVIDIA H200", "processor": "x"}, 16, "random:vit_base_patch16_224")
    'bench-nvidia-h200-16-random-vit_base_patch16_224.csv'
    """
    parts = ("bench", chip_of(environment), str(cores), Path(backbone).name.removesuffix(".safetensors"), data)
    return "-".join(re.sub(r"[^a-z0-9_.]+", "-", part.lower()).strip("-") for part in parts if part) + ".csv"


def write_csv(
    path: Path, rows: Sequence[Row], backbone: str, hardware: str, load: float, environment: dict[str, Any]
) -> None:
    """All rows in long format, each with the backbone, hardware, load by others and versions it belongs to."""
    versions = " ".join(f"{name} {environment[name]}" for name in ("onea", "python", "torch", "torchvision", "timm"))
    text = io.StringIO()
    names = [field.name for field in fields(Row)]
    table = csv.DictWriter(text, [*names, "backbone", "hardware", "load", "versions"], lineterminator="\n")
    table.writeheader()
    where = {"backbone": backbone, "hardware": hardware, "load": f"{load:.2f}", "versions": versions}
    for row in rows:
        numbers = {"value": f"{row.value:.6g}", "spread": f"{row.spread:.3g}"}
        table.writerow({**asdict(row), **numbers, **where})
    write_atomically(path, text.getvalue().encode())
