# SPDX-License-Identifier: Apache-2.0
"""The provenance of results: everything that runs record about themselves, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onea.presentation.table import NOTHING, Row, Table, TableColumn
from onea.research.record import Record
from onea.research.report.page import Section
from onea.research.report.tables import finished, labels, lent, lent_note

SHORT = 12  # characters of a digest that tell it apart


def provenance(records: Sequence[Record]) -> Section:
    """The section that tells configuration, inputs, machine, versions and times, a column for each record."""
    names = labels(records)
    groups: dict[str, list[dict[str, Any]]] = {
        "Configuration": [record["config"] for record in records],
        "Options of the method": [record.get("options", {}) for record in records],
        "Images and network": [_inputs(record) for record in records],
        "Machine": [_machine(record) for record in records],
        "Versions": [_versions(record) for record in records],
        "Time": [_times(record) for record in records],
    }
    rows = []
    for group, values in groups.items():
        keys = [key for key in dict.fromkeys(k for v in values for k in v) if key != "options"]
        rows += [
            Row(key, _compared([v.get(key) for v in values]), group)
            for key in keys
            if any(v.get(key) is not None for v in values)
        ]
    # Its columns are wide, so a heading stays on one line.
    columns = tuple(TableColumn(name.replace(" ", "\N{NO-BREAK SPACE}"), align="left") for name in names)
    caption = "Everything that the runs record about themselves; a value that spans the row holds for all of them."
    return Section("How this was made", [Table(caption, columns, tuple(rows))])


def _compared(values: Sequence[Any]) -> tuple[str, ...]:
    """A single cell where all records agree."""
    texts = tuple(NOTHING if value is None else _plain(value) for value in values)
    return texts[:1] if len(set(texts)) == 1 else texts


def _inputs(record: Record) -> dict[str, Any]:
    data, backbone = record.get("data", {}), record.get("backbone", {})
    return {
        "dataset": data.get("name"),
        "data fingerprint": str(data["fingerprint"])[:SHORT] if data.get("fingerprint") else None,
        "images": f"{data['train_images']:,} for training, {data['test_images']:,} for testing"
        if "train_images" in data
        else None,
        "skipped images": len(data["skipped"]) if data.get("skipped") else None,
        "network": backbone.get("name"),
        "network's sha256": str(backbone["sha256"])[:SHORT] if backbone.get("sha256") else None,
        "network's licence": backbone.get("licence"),
        "input": f"{backbone['input']} px" if "input" in backbone else None,
    }


def _machine(record: Record) -> dict[str, Any]:
    runtime, environment = record.get("runtime", {}), record.get("environment", {})
    return {
        "accelerator": environment.get("accelerator"),
        **{name: environment.get(name) for name in ("processor", "cores", "platform")},
        **{name: runtime.get(name) for name in ("device", "precision", "threads")},
    }


def _versions(record: Record) -> dict[str, Any]:
    named = ("processor", "cores", "platform", "accelerator")
    return {name: value for name, value in record.get("environment", {}).items() if name not in named}


def _times(record: Record) -> dict[str, Any]:
    timings, dates = record["timings"], record.get("dates", {})
    return {
        "started": dates.get("started"),
        "resumed": ", ".join(dates.get("resumed") or []) or None,
        "finished": dates.get("finished") if finished(record) else "still running",
        "seconds learning": f"{sum(timings['learn_s']):.1f}" + (f" ({lent_note(record)})" if lent(record) else ""),
        "seconds evaluating": f"{sum(timings['evaluate_s']):.1f}",
    }


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
