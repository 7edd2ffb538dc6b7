# SPDX-License-Identifier: Apache-2.0
"""Results of a benchmark: timings, rows, the CSV file and the tables in the terminal."""

from __future__ import annotations

import csv
import io
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as TerminalTable

from onea.files import write_atomically
from onea.presentation.tables import Table, terminal
from onea.research.bench.config import BenchConfig

_MAX_REPEATS = 500


@dataclass(frozen=True)
class Timing:
    """The time of one call, from several repeats.

    Attributes:
        seconds: median.
        spread: half of the interquartile range.
        best: minimum.
    """

    seconds: float
    spread: float
    best: float


def time_repeatedly(
    action: Callable[[], object], device: torch.device, seconds: float, *, warm_up: int = 2, min_repeats: int = 4
) -> Timing:
    """Time an action repeatedly for about this many seconds."""
    return time_interleaved([action], device, seconds, warm_up=warm_up, min_repeats=min_repeats)[0]


def time_interleaved(
    actions: Sequence[Callable[[], object]],
    device: torch.device,
    seconds: float,
    *,
    warm_up: int = 2,
    min_repeats: int = 4,
) -> list[Timing]:
    """Time several actions in turn, so that a slowdown of the machine affects all of them."""
    for action in actions:
        for _ in range(warm_up):  # compilation, caches, choice of kernels, worker processes
            action()
    times: list[list[float]] = [[] for _ in actions]
    synchronise(device)
    started = time.perf_counter()
    while (repeats := len(times[0])) < min_repeats or (
        time.perf_counter() - started < seconds * len(actions) and repeats < _MAX_REPEATS
    ):
        for action, action_times in zip(actions, times, strict=True):
            before = time.perf_counter()
            action()
            synchronise(device)
            action_times.append(time.perf_counter() - before)
    return [summarise_times(action_times) for action_times in times]


def summarise_times(times: Sequence[float]) -> Timing:
    """Median, spread and minimum of some times.

    >>> summarise_times([1.0, 2.0, 3.0, 4.0, 100.0])
    Timing(seconds=3.0, spread=1.0, best=1.0)
    """
    if len(times) == 1:
        return Timing(times[0], 0.0, times[0])
    low, _, high = quantiles(times, n=4, method="inclusive")
    return Timing(median(times), (high - low) / 2, min(times))


def synchronise(device: torch.device) -> None:
    """Wait for all operations on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


PLAIN, OFFICIAL, SAME, FAST = "plain loop", "official", "same numerics", "fast"
PYTORCH, EXPORT, SCALE = "PyTorch fp32", "export", "scale"


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        measure: the measured quantity, such as ``training``.
        setting: the conditions, such as the batch size.
        column: the implementation: the plain loop, the published code, onea in fp32 or at its fastest, or timm.
        value: median.
        unit: unit of the value and its spread.
        spread: half of the interquartile range; 0 for a constant.
    """

    measure: str
    setting: str
    column: str
    value: float
    unit: str
    spread: float = 0.0


def timm_column(precision: str, compiled: bool) -> str:
    """The name of timm's column; timm has no fp8, so its bf16 is compared with onea's fp8.

    >>> timm_column("fp8", True)
    'timm bf16 compiled'
    """
    return f"timm {'bf16' if precision == 'fp8' else precision} {'compiled' if compiled else 'eager'}"


def rate(measure: str, setting: str, column: str, images: int, timing: Timing) -> Row:
    """Images per second."""
    speed = images / timing.seconds
    return Row(measure, setting, column, speed, "images/s", speed * timing.spread / timing.seconds)


def duration(measure: str, setting: str, column: str, timing: Timing) -> Row:
    """A time in milliseconds."""
    return Row(measure, setting, column, 1000 * timing.seconds, "ms", 1000 * timing.spread)


def find_row(rows: Iterable[Row], measure: str, setting: str, column: str, unit: str) -> Row | None:
    """The row of this measurement, if there is one."""
    key = (measure, setting, column, unit)
    return next((row for row in rows if (row.measure, row.setting, row.column, row.unit) == key), None)


def chip_name(environment: dict[str, Any]) -> str:
    """The name of the accelerator, or of the processor if there is none."""
    return str(environment["accelerator"] or environment["processor"] or "unknown")


def hardware_name(environment: dict[str, Any]) -> str:
    """The chip and the number of CPU cores."""
    return f"{chip_name(environment)}, {environment['cores']} cores"


def load_average() -> float:
    """The load of the machine in the last minute; 0 where the system does not report it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


_BUSY = 0.25  # load per core
_HIGHER_IS_BETTER = ("images/s", "%", "TFLOP/s")
_NOISY = 0.05  # the tables show larger relative spreads only; the file has all of them


@dataclass(frozen=True)
class BenchResult:
    """All results of a benchmark, and the machine.

    Attributes:
        load: load average of the machine before the benchmark.
        data: dataset of a whole stream, ``export`` or ``scale``.
    """

    config: BenchConfig
    rows: list[Row]
    backbone: str
    precision: str
    compiled: bool
    load: float
    environment: dict[str, Any]
    data: str = ""

    @property
    def hardware(self) -> str:
        """The chip and the number of CPU cores."""
        return hardware_name(self.environment)

    @property
    def file_name(self) -> str:
        """The name of the CSV file, such as ``bench-nvidia-h200-16-random-vit_base_patch16_224.csv``."""
        backbone = Path(self.backbone).name.removesuffix(".safetensors")
        parts = ("bench", chip_name(self.environment), str(self.environment["cores"]), backbone, self.data)
        return "-".join(re.sub(r"[^a-z0-9_.]+", "-", part.lower()).strip("-") for part in parts if part) + ".csv"

    def write(self, folder: Path) -> Path:
        """Write all rows to a CSV file, each with backbone, hardware, load and versions."""
        packages = ("onea", "python", "torch", "torchvision", "timm")
        where = {
            "backbone": self.backbone,
            "hardware": self.hardware,
            "load": f"{self.load:.2f}",
            "versions": " ".join(f"{name} {self.environment[name]}" for name in packages),
        }
        text = io.StringIO()
        table = csv.DictWriter(text, [*(field.name for field in fields(Row)), *where], lineterminator="\n")
        table.writeheader()
        for row in self.rows:
            numbers = {"value": f"{row.value:.6g}", "spread": f"{row.spread:.3g}"}
            table.writerow({**asdict(row), **numbers, **where})
        write_atomically(folder / self.file_name, text.getvalue().encode())
        return folder / self.file_name

    @property
    def busy(self) -> bool:
        """Whether other processes used the machine so much that the results are unreliable."""
        return bool(self.load > _BUSY * self.environment["cores"])


def print_result(result: BenchResult) -> None:
    """Print onea next to the plain loop, then onea next to timm, then the growth."""
    console = Console(highlight=False)
    title = f"{result.backbone}, rank {result.config.rank}, {result.hardware}"
    mode = f"{result.precision}, {'compiled' if result.compiled else 'eager'}"
    if result.busy:
        console.print(
            f"[yellow]other processes are using this machine (load {result.load:.1f}): measure again when it is idle[/]"
        )
    if result.data == EXPORT:
        console.print(title)
        console.print(f"×: how many times faster than {PYTORCH}")
        console.print(_export_table(result.rows))
        return
    if result.data == SCALE:
        console.print(f"{title}; synthetic classes, real photos")
        console.print(_scale_table(result.rows))
        return
    if result.data:
        console.print(f"One-A with {result.backbone}, {mode}, {result.hardware}")
        console.print(_table(("", ""), ([f"{row.setting}, {row.unit}", _number(row)] for row in result.rows)))
        return
    console.print(title)
    console.print(f"plain loop: fp32, eager, DataLoader workers; same numerics: onea, fp32, eager; fast: onea, {mode}")
    console.print("×: how many times better than the plain loop")
    console.print(_column_table([row for row in result.rows if not row.measure.startswith("growth")]))
    console.print(_timm_table(result))
    if growth := [row for row in result.rows if row.measure.startswith("growth")]:
        console.print(_growth_table(growth))


def _scale_table(rows: list[Row]) -> TerminalTable:
    """Each quantity by the number of classes."""
    settings = list(dict.fromkeys(row.setting for row in rows))
    lines = []
    for name, unit in dict.fromkeys((row.measure, row.unit) for row in rows):
        found = {row.setting: row for row in rows if row.measure == name}
        lines.append([f"{name}, {unit}", *(_number(found.get(setting)) for setting in settings)])
    return _table(("", *settings), lines)


def _export_table(rows: list[Row]) -> TerminalTable:
    """The time of each batch size by runtime, and its ratio to PyTorch."""
    settings = list(dict.fromkeys(row.setting for row in rows))
    lines = []
    for name in dict.fromkeys(row.column for row in rows):
        line = [name]
        for setting in settings:
            row, baseline = (find_row(rows, "inference", setting, column, "ms") for column in (name, PYTORCH))
            line += [_number(row), _ratio(row, baseline)]
        lines.append(line)
    heads = [cell for setting in settings for cell in (f"{setting}, ms", "×")]
    return _table(("inference", *heads), lines)


def _column_table(rows: list[Row]) -> TerminalTable:
    measured = {row.column for row in rows}
    names = [name for name in (PLAIN, OFFICIAL, SAME, FAST) if name != OFFICIAL or name in measured]
    lines = []
    for measure, setting, unit in dict.fromkeys((row.measure, row.setting, row.unit) for row in rows):
        by_column = {name: find_row(rows, measure, setting, name, unit) for name in names}
        if any(by_column.values()):
            ratios = [_ratio(by_column[name], by_column[PLAIN]) for name in (SAME, FAST)]
            lines.append([_label(measure, setting, unit), *map(_number, by_column.values()), *ratios])
    return _table(("", *names, "same ×", "fast ×"), lines)


def _timm_table(result: BenchResult) -> TerminalTable:
    """onea with an adapter and timm without one, in the same precision, both compiled or both eager."""
    lines = []
    for name, precision, compiled in ((SAME, "fp32", False), (FAST, result.precision, result.compiled)):
        column = timm_column(precision, compiled)
        for batch in result.config.batches:
            setting = f"batch {batch}"
            for unit in ("ms", "images/s"):
                timm = find_row(result.rows, "inference", setting, column, unit)
                onea = find_row(result.rows, "inference", setting, name, unit)
                if timm and onea:
                    slowdown = onea.value / timm.value if unit == "ms" else timm.value / onea.value
                    label = _label(column.removeprefix("timm "), setting, unit)
                    lines.append([label, _number(timm), _number(onea), f"{100 * (slowdown - 1):+.1f} %"])
    return _table(("inference", "timm, no adapter", "onea with adapter", "slower by"), lines)


def _growth_table(rows: list[Row]) -> TerminalTable:
    """Early and late tasks side by side, from alternating rows."""
    lines = []
    for early, late in zip(rows[::2], rows[1::2], strict=True):
        change = f"{100 * (late.value / early.value - 1):+.2f} %"
        measure = f"{early.measure.removeprefix('growth: ')}, {early.unit}"
        lines.append([measure, f"{early.setting} | {late.setting}", _number(early), _number(late), change])
    return _table(("growth", "", "early", "late", "change"), lines, text_columns=2)


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]], text_columns: int = 1) -> TerminalTable:
    return terminal(Table.from_texts("", heads, lines, text_columns), no_wrap=True)


def _label(measure: str, setting: str, unit: str) -> str:
    return ", ".join(part for part in (measure, setting, unit) if part)


def _number(row: Row | None) -> str:
    if row is None:
        return ""
    digits = 0 if row.value >= 1000 else 1 if row.value >= 100 else 2 if row.value >= 10 else 3
    noisy = row.spread > _NOISY * row.value
    spread = f" ±{100 * row.spread / row.value:.0f}%" if noisy else ""
    return f"{row.value:,.{digits}f}{spread}"


def _ratio(row: Row | None, baseline: Row | None) -> str:
    """How many times better than the baseline."""
    if row is None or baseline is None:
        return ""
    ratio = row.value / baseline.value if row.unit in _HIGHER_IS_BETTER else baseline.value / row.value
    return f"{ratio:.2f}x"
