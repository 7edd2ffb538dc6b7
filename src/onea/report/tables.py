# SPDX-License-Identifier: Apache-2.0
"""Results as a table: one row per record, one column per number, the best of each marked; numbers, no verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onea.record import Record
from onea.record_metrics import Metric, headline_metrics


@dataclass(frozen=True)
class Cell:
    """A number as it is printed, and whether none in its column is better."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Row:
    """One record of the table."""

    method: str
    cells: tuple[Cell, ...]
    note: str


def labels(records: Sequence[Record]) -> list[str]:
    """What to call each record: its title where a caller gave one, else its method; told apart where two agree.

    >>> labels([{"config": {"method": "one-a", "seed": 1}}, {"config": {"method": "one-a", "seed": 2}}])
    ['one-a (seed 1)', 'one-a (seed 2)']
    """
    plain = [_name(record) for record in records]
    names = [
        f"{name} (seed {record['config']['seed']})" if plain.count(name) > 1 else name
        for name, record in zip(plain, records, strict=True)
    ]
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[index] = f"{name} #{seen[name]}"
    return names


def finished(record: Record) -> bool:
    """Whether a run has reached its last task."""
    return bool(record["status"] == "finished")


def rows(records: Sequence[Record]) -> list[Row]:
    """The table as plain values; a run that is still going on is shown but never marked as best."""
    names, columns = labels(records), [_cells(metric, records) for metric in headline_metrics().values()]
    return [
        Row(name, tuple(cells[index] for cells in columns), _note(record))
        for index, (name, record) in enumerate(zip(names, records, strict=True))
    ]


def markdown(records: Sequence[Record]) -> str:
    """The table in Markdown, best values in bold."""
    table = rows(records)
    notes = any(row.note for row in table)
    metrics = headline_metrics().values()
    heads = ["method", *(metric.heading for metric in metrics), *(["note"] if notes else [])]
    lines = [heads, ["---", *["---:"] * len(metrics), *(["---"] if notes else [])]]
    for row in table:
        numbers = [f"**{cell.text}**" if cell.best else cell.text for cell in row.cells]
        lines.append([_plain(row.method), *numbers, *([_plain(row.note)] if notes else [])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _name(record: Record) -> str:
    return str(record.get("title") or record["config"]["method"])


def _cells(metric: Metric, records: Sequence[Record]) -> list[Cell]:
    fair = [_may_win(metric, record, records) for record in records]
    read = [metric.value(record) for record in records]
    values = [value for value, counts in zip(read, fair, strict=True) if counts and value is not None]
    # Compared as printed: two numbers that read the same are both marked, or the table would seem to contradict itself.
    best = f"{metric.best(*values):.{metric.digits}f}" if len(values) > 1 else None
    texts = [metric.text(record) for record in records]
    return [Cell(text, text == best and counts) for text, counts in zip(texts, fair, strict=True)]


def _may_win(metric: Metric, record: Record, records: Sequence[Record]) -> bool:
    if metric.machine_dependent and (lent(record) or len({_machine(other) for other in records}) > 1):
        return False  # seconds that others spent, or another machine's, are not this method's merit
    return finished(record)


def _machine(record: Record) -> tuple[Any, ...]:
    runtime, environment = record.get("runtime", {}), record.get("environment", {})
    return (*(runtime.get(name) for name in ("device", "precision", "threads")), environment.get("processor"))


def _note(record: Record) -> str:
    notes = [str(record["note"])] if record.get("note") else []
    done, tasks = len(record["metrics"]["A"]), len(record["stream"]["sizes"])
    if not finished(record):
        notes.append(f"still running: {done} of {tasks} tasks")
    if lent(record):
        notes.append(lent_note(record))
    if skipped := sum(task.get("trained") is False for task in record["tasks"]):
        notes.append(f"{skipped} of {done} tasks not trained")
    return "; ".join(notes)


def lent(record: Record) -> int:
    """How many tasks of this record use an adapter that another run trained, without counting its time."""
    return sum(bool(task.get("training_shared")) for task in record["tasks"])


def lent_note(record: Record) -> str:
    """The sentence to put beside the seconds of a record that trained less than it used."""
    return (
        f"{lent(record)} of {len(record['tasks'])} adapters were trained by another run here, "
        "their training is not counted"
    )


def _plain(text: str) -> str:
    """Text that cannot end a Markdown cell or a line."""
    return " ".join(text.split()).replace("|", "\\|")
