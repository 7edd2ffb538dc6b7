# SPDX-License-Identifier: Apache-2.0
"""The figures of a bench as tables a person can read."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from onea.bench.rows import FAST, PLAIN, SAME, Row, find
from onea.bench.run import BenchResult
from onea.bench.timm_baseline import timm_column

_MORE_IS_BETTER = ("images/s", "%", "TFLOP/s")
_NOISY = 0.05  # a spread worth mentioning; the file has them all


def print_result(result: BenchResult) -> None:
    """Our columns beside the plain loop, then beside plain timm, then what grows."""
    console = Console(highlight=False)
    how = f"{result.precision}, {'compiled' if result.compiled else 'eager'}"
    if result.busy:
        console.print(f"[yellow]others use this machine (load {result.load:.1f}): measure again when it is idle[/]")
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


def _list(rows: list[Row]) -> Table:
    table = _table("", right=("",))
    for row in rows:
        table.add_row(f"{row.setting}, {row.unit}", _number(row))
    return table


def _columns(rows: list[Row]) -> Table:
    table = _table("", right=(PLAIN, SAME, FAST, "same ×", "fast ×"))
    for measure, setting, unit in dict.fromkeys((row.measure, row.setting, row.unit) for row in rows):
        found = {name: find(rows, measure, setting, name, unit) for name in (PLAIN, SAME, FAST)}
        values = [_number(row) for row in found.values()]
        if any(found.values()):
            ratios = [_ratio(found[name], found[PLAIN]) for name in (SAME, FAST)]
            table.add_row(_label(measure, setting, unit), *values, *ratios)
    return table


def _against_timm(result: BenchResult) -> Table:
    """Ours with the adapter against timm without it, both at the same precision and compiled or not alike."""
    table = _table("inference", right=("timm, no adapter", "ours with adapter", "slower by"))
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
                    table.add_row(label, _number(theirs), _number(ours), change)
    return table


def _growth(rows: list[Row]) -> Table:
    """Early and late side by side: rows of one measure and unit come in pairs."""
    table = _table("growth", "", right=("early", "late", "change"))
    for early, late in _pairs(rows):
        change = f"{100 * (late.value / early.value - 1):+.2f} %"
        measure = f"{early.measure.removeprefix('growth: ')}, {early.unit}"
        table.add_row(measure, f"{early.setting} | {late.setting}", _number(early), _number(late), change)
    return table


def _pairs(rows: list[Row]) -> Iterable[tuple[Row, Row]]:
    return zip(rows[::2], rows[1::2], strict=True)


def _table(*left: str, right: Iterable[str]) -> Table:
    table = Table(*left, box=SIMPLE_HEAD)
    for head in right:
        table.add_column(head, justify="right", no_wrap=True)
    return table


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
