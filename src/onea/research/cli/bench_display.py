# SPDX-License-Identifier: Apache-2.0
"""The figures of a bench as tables a person can read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table as TerminalTable

from onea.presentation.formats import terminal
from onea.presentation.table import Table
from onea.research.bench.answering import timm_column
from onea.research.bench.exported import EXPORT, PYTORCH
from onea.research.bench.rows import FAST, OFFICIAL, PLAIN, SAME, Row, find
from onea.research.bench.run import BenchResult

_MORE_IS_BETTER = ("images/s", "%", "TFLOP/s")
_NOISY = 0.05  # a spread worth mentioning; the file has them all


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
