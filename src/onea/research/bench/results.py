# SPDX-License-Identifier: Apache-2.0
"""The results of a bench: timings, rows, the CSV file and the tables in the terminal."""

from __future__ import annotations

import csv
import io
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
from onea.presentation.formats import terminal
from onea.presentation.table import Table
from onea.research.bench.config import BenchConfig

_MOST = 500


@dataclass(frozen=True)
class Timing:
    """Seconds that one call takes.

    Attributes:
        seconds: the median.
        spread: half the distance between the quartiles.
        best: the shortest.
    """

    seconds: float
    spread: float
    best: float

    @property
    def relative_spread(self) -> float:
        """The spread as a share of the median."""
        return self.spread / self.seconds


def time_repeatedly(
    action: Callable[[], object], device: torch.device, seconds: float, *, warm_up: int = 2, fewest: int = 4
) -> Timing:
    """Time an action again and again for about so many seconds, and at least a few times."""
    return time_interleaved([action], device, seconds, warm_up=warm_up, fewest=fewest)[0]


def time_interleaved(
    actions: Sequence[Callable[[], object]],
    device: torch.device,
    seconds: float,
    *,
    warm_up: int = 2,
    fewest: int = 4,
) -> list[Timing]:
    """Time several actions in turn, so that whatever slows the machine down meets all of them alike."""
    for action in actions:
        for _ in range(warm_up):  # compiles, fills caches, picks kernels, starts workers
            action()
    taken: list[list[float]] = [[] for _ in actions]
    synchronise(device)
    started = time.perf_counter()
    while len(taken[0]) < fewest or (time.perf_counter() - started < seconds * len(actions) and len(taken[0]) < _MOST):
        for action, times in zip(actions, taken, strict=True):
            before = time.perf_counter()
            action()
            synchronise(device)
            times.append(time.perf_counter() - before)
    return [summarise(times) for times in taken]


def summarise(taken: Sequence[float]) -> Timing:
    """Median and spread of some times.

    >>> summarise([1.0, 2.0, 3.0, 4.0, 100.0])
    Timing(seconds=3.0, spread=1.0, best=1.0)
    """
    if len(taken) == 1:
        return Timing(taken[0], 0.0, taken[0])
    low, _, high = quantiles(taken, n=4, method="inclusive")
    return Timing(median(taken), (high - low) / 2, min(taken))


def synchronise(device: torch.device) -> None:
    """Wait until the device has done everything it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


PLAIN, OFFICIAL, SAME, FAST = "plain loop", "official", "same numerics", "fast"
PYTORCH, EXPORT = "PyTorch fp32", "export"


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


def timm_column(precision: str, compiled: bool) -> str:
    """The name of this baseline's column; timm has no eight bits, so what is compared with fp8 is bf16.

    >>> timm_column("fp8", True)
    'timm bf16 compiled'
    """
    return f"timm {'bf16' if precision == 'fp8' else precision} {'compiled' if compiled else 'eager'}"


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


def chip_name(environment: dict[str, Any]) -> str:
    """The name of the accelerator, else of the processor."""
    return str(environment["accelerator"] or environment["processor"] or "unknown")


def hardware_name(environment: dict[str, Any], cores: int) -> str:
    """The chip and the cores that were used beside it."""
    return f"{chip_name(environment)}, {cores} cores"


def csv_name(environment: dict[str, Any], cores: int, backbone: str, data: str = "") -> str:
    """A file name that carries the hardware.

    >>> csv_name({"accelerator": "NVIDIA H200", "processor": "x"}, 16, "random:vit_base_patch16_224")
    'bench-nvidia-h200-16-random-vit_base_patch16_224.csv'
    """
    parts = ("bench", chip_name(environment), str(cores), Path(backbone).name.removesuffix(".safetensors"), data)
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


_BUSY = 0.25  # of the cores
_MORE_IS_BETTER = ("images/s", "%", "TFLOP/s")
_NOISY = 0.05  # a spread worth mentioning; the file has them all


@dataclass(frozen=True)
class BenchResult:
    """All figures of one bench, and the machine they belong to.

    Attributes:
        load: processes that wanted a core on average in the minute before, none of them ours.
        data: the dataset of a whole stream, if that is what was measured.
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
        """The chip and the cores."""
        return hardware_name(self.environment, self.environment["cores"])

    def write(self, folder: Path) -> Path:
        """Leave the figures in a file whose name carries the hardware."""
        path = folder / csv_name(self.environment, self.environment["cores"], self.backbone, self.data)
        write_csv(path, self.rows, self.backbone, self.hardware, self.load, self.environment)
        return path

    @property
    def busy(self) -> bool:
        """Whether others were using the machine enough to spoil the figures."""
        return bool(self.load > _BUSY * self.environment["cores"])


def print_result(result: BenchResult) -> None:
    """Our columns beside the plain loop, then beside plain timm, then what grows."""
    console = Console(highlight=False)
    how = f"{result.precision}, {'compiled' if result.compiled else 'eager'}"
    if result.busy:
        console.print(f"[yellow]others use this machine (load {result.load:.1f}): measure again when it is idle[/]")
    if result.data == EXPORT:
        console.print(f"{result.backbone}, rank {result.config.rank}, {result.hardware}")
        console.print(f"×: how many times faster than {PYTORCH}")
        console.print(_exported(result.rows))
        return
    if result.data:
        console.print(f"One-A with {result.backbone}, {how}, {result.hardware}")
        console.print(_list(result.rows))
        return
    console.print(f"{result.backbone}, rank {result.config.rank}, {result.hardware}")
    console.print(f"plain loop: fp32, eager, DataLoader workers; same numerics: ours, fp32, eager; fast: ours, {how}")
    console.print("×: how many times better than the plain loop")
    own = [row for row in result.rows if not row.measure.startswith("growth")]
    console.print(_columns(own))
    console.print(_against_timm(result))
    late = [row for row in result.rows if row.measure.startswith("growth")]
    if late:
        console.print(_growth(late))


def _list(rows: list[Row]) -> TerminalTable:
    return _table(("", ""), ([f"{row.setting}, {row.unit}", _number(row)] for row in rows))


def _exported(rows: list[Row]) -> TerminalTable:
    """Each way to answer, with its time for each batch and how it compares."""
    settings = list(dict.fromkeys(row.setting for row in rows))
    lines = []
    for name in dict.fromkeys(row.column for row in rows):
        times = [
            (find(rows, "inference", one, name, "ms"), find(rows, "inference", one, PYTORCH, "ms")) for one in settings
        ]
        lines.append([name, *(cell for ours, plain in times for cell in (_number(ours), _ratio(ours, plain)))])
    heads = [cell for setting in settings for cell in (f"{setting}, ms", "×")]
    return _table(("inference", *heads), lines)


def _columns(rows: list[Row]) -> TerminalTable:
    names = [
        name for name in (PLAIN, OFFICIAL, SAME, FAST) if name != OFFICIAL or any(row.column == name for row in rows)
    ]
    lines = []
    for measure, setting, unit in dict.fromkeys((row.measure, row.setting, row.unit) for row in rows):
        found = {name: find(rows, measure, setting, name, unit) for name in names}
        if any(found.values()):
            ratios = [_ratio(found[name], found[PLAIN]) for name in (SAME, FAST)]
            lines.append([_label(measure, setting, unit), *map(_number, found.values()), *ratios])
    return _table(("", *names, "same ×", "fast ×"), lines)


def _against_timm(result: BenchResult) -> TerminalTable:
    """Ours with the adapter against timm without it, both at the same precision and compiled or not alike."""
    lines = []
    for name, precision, compiled in ((SAME, "fp32", False), (FAST, result.precision, result.compiled)):
        column = timm_column(precision, compiled)
        for batch in result.config.batches:
            setting = f"batch {batch}"
            for unit in ("ms", "images/s"):
                theirs = find(result.rows, "inference", setting, column, unit)
                ours = find(result.rows, "inference", setting, name, unit)
                if theirs and ours:
                    slower = ours.value / theirs.value if unit == "ms" else theirs.value / ours.value
                    change = f"{100 * (slower - 1):+.1f} %"
                    label = _label(column.removeprefix("timm "), setting, unit)
                    lines.append([label, _number(theirs), _number(ours), change])
    return _table(("inference", "timm, no adapter", "ours with adapter", "slower by"), lines)


def _growth(rows: list[Row]) -> TerminalTable:
    """Early and late side by side: rows of one measure and unit come in pairs."""
    lines = []
    for early, late in zip(rows[::2], rows[1::2], strict=True):
        change = f"{100 * (late.value / early.value - 1):+.2f} %"
        measure = f"{early.measure.removeprefix('growth: ')}, {early.unit}"
        lines.append([measure, f"{early.setting} | {late.setting}", _number(early), _number(late), change])
    return _table(("growth", "", "early", "late", "change"), lines, left=2)


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> TerminalTable:
    return terminal(Table.of_texts("", heads, lines, left), no_wrap=True)


def _label(measure: str, setting: str, unit: str) -> str:
    return ", ".join(part for part in (measure, setting, unit) if part)


def _number(row: Row | None) -> str:
    if row is None:
        return ""
    digits = 0 if row.value >= 1000 else 1 if row.value >= 100 else 2 if row.value >= 10 else 3
    noisy = row.spread > _NOISY * row.value
    spread = f" ±{100 * row.spread / row.value:.0f}%" if noisy else ""
    return f"{row.value:,.{digits}f}{spread}"


def _ratio(ours: Row | None, plain: Row | None) -> str:
    """How many times better than the plain loop: faster, or smaller."""
    if ours is None or plain is None:
        return ""
    better = ours.value / plain.value if ours.unit in _MORE_IS_BETTER else plain.value / ours.value
    return f"{better:.2f}x"
