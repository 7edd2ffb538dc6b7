# SPDX-License-Identifier: Apache-2.0
"""The HTML page of runs on one stream, and the provenance of records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from onea.presentation.tables import MISSING, Row, Table, TableColumn
from onea.research.record import Record
from onea.research.record_metrics import headline_metrics
from onea.research.report.aggregate import results_table
from onea.research.report.curves import accuracy_curves, task_names
from onea.research.report.heat_maps import accuracy_matrix
from onea.research.report.html import MAX_IN_ALT, Block, Details, Picture, Section, Terms, Text, document, series
from onea.research.report.records import count_shared_adapters, finished, labels, shared_adapters_note
from onea.text import plural

DIGEST = 12  # characters of a digest that are shown


def run_page(records: Sequence[Record], title: str) -> str:
    """The HTML of the page.

    Args:
        records: runs on the same stream; the first one is emphasised, and its accuracy matrix is shown. A record may
            have a ``title``, a ``paper`` link and a ``note`` in addition to what a run writes.
        title: heading of the page.
    """
    merges = (
        _merges(record, name)
        for record, name in zip(records, labels(records), strict=True)
        if any("base" in (task.get("merge") or {}) for task in record["tasks"])
    )
    lead, results, curves = _lead(records), _results(records), _curves(records)
    return document(title, [lead, results, curves, _stream(records), _matrix(records[0]), *merges, provenance(records)])


def _lead(records: Sequence[Record]) -> Text:
    first, sizes = records[0], records[0]["stream"]["sizes"]
    data = first.get("data", {}).get("name") or first["config"].get("data", "the dataset")
    spread = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
    subject = f"{len(records)} methods learn" if len(records) > 1 else f"{labels(records)[0]} learns"
    return Text(
        f"{subject} {plural(sum(sizes), 'class', 'classes')} of {data} that arrive in "
        f"{plural(len(sizes), 'task', 'tasks')} of {spread}; after every task, accuracy is measured over all "
        "classes seen so far.",
        "lead",
    )


def _results(records: Sequence[Record]) -> Section:
    table = results_table(records)
    meanings = tuple((metric.heading, metric.meaning) for metric in headline_metrics(records).values())
    notes = [Text(note) for note in (*table.row_notes, _resolution(records))]
    return Section("Results", [table, *notes, Details("What the columns mean", [Terms(meanings)])])


def _resolution(records: Sequence[Record]) -> str:
    """The seeds, and the accuracy of a single test image in percentage points."""
    seeds, images = dict.fromkeys(str(record["config"]["seed"]) for record in records), sum(records[0]["total"])
    return (
        f"{'Seed' if len(seeds) == 1 else 'Seeds'} {', '.join(seeds)}; {images:,} test images, "
        f"one image is {100 / images:.2f} percentage points of A_T."
    )


def _curves(records: Sequence[Record]) -> Section:
    lines = [f"{name}: {series(r['metrics']['A'])}" for name, r in zip(labels(records), records, strict=True)]
    picture = Picture(
        "Accuracy as classes arrive",
        partial(accuracy_curves, records),
        "Line chart, accuracy in percent over all classes seen after each task. "
        f"{'. '.join(lines)}. Bars: new classes of each task.",
        "Grey bars: number of new classes of each task. Each line ends with the accuracy over all classes.",
    )
    return picture.section()


def _stream(records: Sequence[Record]) -> Section:
    first = records[0]
    sizes = first["stream"]["sizes"]
    images = [task["images"] for task in max((r["tasks"] for r in records), key=len)]
    heads = ["task", "new classes", "classes seen", "training images", *(f"{name}\nA_t %" for name in labels(records))]
    open_set = {name: r["open_set"] for name, r in zip(labels(records), records, strict=True) if r.get("open_set")}
    heads += [f"{name}\nopen-set AUROC %" for name in open_set]
    lines = []
    for t, (task, size, seen) in enumerate(zip(task_names(first), sizes, accumulate(sizes), strict=True)):
        numbers = [str(size), str(seen), f"{images[t]:,}" if t < len(images) else MISSING]
        numbers += [_percent(r["metrics"]["A"], t) for r in records]
        numbers += [_percent(areas, t) for areas in open_set.values()]
        lines.append([task, *numbers])
    caption = "Tasks in order of arrival, and the accuracy over all classes seen after each."
    return Section("The stream", [Table.from_texts(caption, heads, lines), *_class_names(first)])


def _percent(values: Sequence[float | None], t: int) -> str:
    value = values[t] if t < len(values) else None
    return MISSING if value is None else f"{value:.1f}"


def _class_names(record: Record) -> list[Block]:
    classes, start, items = record.get("data", {}).get("classes") or [], 0, []
    for task, size in zip(task_names(record), record["stream"]["sizes"], strict=True):
        items.append((task, ", ".join(str(name) for name in classes[start : start + size])))
        start += size
    return [Details("All class names", [Terms(tuple(items))])] if classes else []


def _matrix(record: Record) -> Section:
    name, matrix, tasks = labels([record])[0], record["metrics"]["matrix"], task_names(record)
    last = ", ".join(f"{task} {row[-1]:.1f}" for task, row in list(zip(tasks, matrix, strict=False))[:MAX_IN_ALT])
    picture = Picture(
        f"Accuracy of each task, {name}",
        partial(accuracy_matrix, record),
        f"Heat map, accuracy of each task after each task for {name}. After the last one, in percent: {last}.",
        "A row is the accuracy on the test images of one task, among all classes seen by then.",
    )
    heads = ["task", *(f"after {task}" for task in tasks[: len(matrix)])]
    lines = (
        [task, *("" if value is None else f"{value:.1f}" for value in row)]
        for task, row in zip(tasks, matrix, strict=False)
    )
    table = Table.from_texts(f"Accuracy of each task in percent, {name}", heads, lines)
    return Section(picture.heading, [picture, Details("The same as numbers", [table])])


def _merges(record: Record, name: str) -> Section:
    lines, before = [], 0
    for task in record["tasks"]:
        lines.append((str(task["name"]), *_merge_cells(task, task.get("merge") or {}, before)))
        before += task["classes"]
    heads = ("task", "classes before", "new classes", "base side", "align share", "gates,\nlowest to highest")
    caption = (
        "The larger side is the base. The smaller side is weighted by its share and by gates, which damp the base's "
        "strongest directions (0 is closed, 1 is open)."
    )
    return Section(f"Merges of {name}", [Table.from_texts(caption, heads, lines)])


def _merge_cells(task: dict[str, Any], merge: dict[str, Any], before: int) -> tuple[str, ...]:
    sizes = (str(before), str(task["classes"]))
    if "base" not in merge:
        return (*sizes, "not trained" if task.get("trained") is False else "adopted", MISSING, MISSING)
    side = {"accumulated": "the merged adapter", "new": "the new adapter"}.get(merge["base"], str(merge["base"]))
    return (*sizes, side, f"{merge['align_share']:.3f}", f"{merge['gate_min']:.3f} – {merge['gate_max']:.3f}")


_HARDWARE = (
    "accelerator",
    "processor",
    "cores",
    "platform",
)  # of a record's environment; its other fields are versions


def provenance(records: Sequence[Record]) -> Section:
    """A section with configuration, inputs, machine, versions and times; one column per record."""
    names = labels(records)
    groups: dict[str, list[dict[str, Any]]] = {
        "Configuration": [record["config"] for record in records],
        "Options of the method": [record.get("options", {}) for record in records],
        "Images and network": [_inputs(record) for record in records],
        "Machine": [_machine(record) for record in records],
        "Versions": [
            {name: value for name, value in record.get("environment", {}).items() if name not in _HARDWARE}
            for record in records
        ],
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
    # The columns are wide enough for a heading on one line.
    columns = tuple(TableColumn(name.replace(" ", "\N{NO-BREAK SPACE}"), align="left") for name in names)
    caption = "From the records; a value that spans the row is the same for all runs."
    return Section("Provenance", [Table(caption, columns, tuple(rows))])


def _compared(values: Sequence[Any]) -> tuple[str, ...]:
    """A cell per record; a single one if all are equal."""
    texts = tuple(MISSING if value is None else _plain(value) for value in values)
    return texts[:1] if len(set(texts)) == 1 else texts


def _inputs(record: Record) -> dict[str, Any]:
    data, backbone = record.get("data", {}), record.get("backbone", {})
    return {
        "dataset": data.get("name"),
        "data fingerprint": str(data["fingerprint"])[:DIGEST] if data.get("fingerprint") else None,
        "images": f"{data['train_images']:,} for training, {data['test_images']:,} for testing"
        if "train_images" in data
        else None,
        "skipped images": len(data["skipped"]) if data.get("skipped") else None,
        "network": backbone.get("name"),
        "network's sha256": str(backbone["sha256"])[:DIGEST] if backbone.get("sha256") else None,
        "network's licence": backbone.get("licence"),
        "input": f"{backbone['input']} px" if "input" in backbone else None,
    }


def _machine(record: Record) -> dict[str, Any]:
    runtime, environment = record.get("runtime", {}), record.get("environment", {})
    return {
        **{name: environment.get(name) for name in _HARDWARE},
        **{name: runtime.get(name) for name in ("device", "precision", "threads")},
    }


def _times(record: Record) -> dict[str, Any]:
    timings, dates = record["timings"], record.get("dates", {})
    shared = f" ({shared_adapters_note(record)})" if count_shared_adapters(record) else ""
    return {
        "started": dates.get("started"),
        "resumed": ", ".join(dates.get("resumed") or []) or None,
        "finished": dates.get("finished") if finished(record) else "still running",
        "seconds learning": f"{sum(timings['learn_s']):.1f}{shared}",
        "seconds evaluating": f"{sum(timings['evaluate_s']):.1f}",
    }


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
