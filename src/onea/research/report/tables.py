# SPDX-License-Identifier: Apache-2.0
"""Results as a table, a row for each record: numbers, no verdicts; and what records are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from onea.presentation.table import Row, Table, TableColumn, Value
from onea.research.record import Record
from onea.research.record_metrics import Metric, headline_metrics


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


def results_table(records: Sequence[Record]) -> Table:
    """The headline numbers of all records; a run that is still going on is shown but never marked as best."""
    metrics = headline_metrics(records).values()
    when = "after the whole stream" if all(map(finished, records)) else "so far"
    rows = (
        Row(
            name,
            tuple(Value(metric.value(record), competes=_may_win(metric, record, records)) for metric in metrics),
            note=_note(record),
            link=paper if (paper := str(record.get("paper") or "")).startswith("https://") else "",
            emphasised=index == 0,
        )
        for index, (name, record) in enumerate(zip(labels(records), records, strict=True))
    )
    return Table(
        title=f"Results {when}" + ("; the best of each column is marked." if len(records) > 1 else "."),
        columns=tuple(TableColumn(m.heading, "", m.higher_is_better, m.digits) for m in metrics),
        rows=tuple(rows),
        corner="method",
        mark_second=False,
    )


def _name(record: Record) -> str:
    return str(record.get("title") or record["config"]["method"])


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
