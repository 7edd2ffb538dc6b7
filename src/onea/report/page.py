# SPDX-License-Identifier: Apache-2.0
"""One HTML page about runs on one stream: self-contained, no script, no request, light and dark, phone to desk."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import accumulate
from typing import Any

from onea.record import Record
from onea.record_metrics import headline_metrics
from onea.report import html
from onea.report.curves import accuracy_curves, task_names
from onea.report.made import made
from onea.report.matrices import accuracy_matrix
from onea.report.tables import finished, labels, rows


def page(records: Sequence[Record], title: str) -> str:
    """The page as text.

    Args:
        records: runs on the same stream; the first one is emphasised and has its matrix shown. A record may carry a
            ``title``, a ``paper`` link and a ``note`` on top of what a run writes.
        title: heading of the page.
    """
    parts = [
        f"<h1>{escape(title)}</h1>",
        _lead(records),
        _results(records),
        _curves(records),
        _stream(records),
        _matrix(records[0]),
        *(_merges(record, name) for record, name in zip(records, labels(records), strict=True)),
        made(records),
    ]
    return html.document(title, parts)


# ---- what it says --------------------------------------------------------------------------------------------------


def _lead(records: Sequence[Record]) -> str:
    first, sizes = records[0], records[0]["stream"]["sizes"]
    spread = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
    who = f"{len(records)} methods learn" if len(records) > 1 else f"{labels(records)[0]} learns"
    return (
        f'<p class="lead">{escape(who)} {html.count(sum(sizes), "class", "classes")} of {escape(_data(first))} '
        f"that arrive in {html.count(len(sizes), 'batch', 'batches')} of {spread}; after every batch, "
        "accuracy is measured over all classes seen so far.</p>"
    )


def _results(records: Sequence[Record]) -> str:
    found = rows(records)
    body = []
    for index, (row, record) in enumerate(zip(found, records, strict=True)):
        cells = [f'<td class="best">{escape(c.text)}</td>' if c.best else html.td(c.text) for c in row.cells]
        body.append(html.row(_linked(row.method, record), cells, "first" if index == 0 else ""))
    notes = "".join(f'<p class="soft">{escape(row.method)}: {escape(row.note)}.</p>' for row in found if row.note)
    metrics = headline_metrics().values()
    meanings = "".join(f"<dt>{html.symbols(m.heading)}</dt><dd>{html.symbols(m.meaning)}</dd>" for m in metrics)
    heads = ["method", *(metric.heading for metric in metrics)]
    when = "after the whole stream" if all(map(finished, records)) else "so far"
    caption = f"Results {when}" + ("; the best of each column is marked." if len(records) > 1 else ".")
    return (
        f"<h2>Results</h2>{html.table(caption, heads, body)}{notes}{_resolution(records)}"
        f"<details><summary>What the columns mean</summary><dl>{meanings}</dl></details>"
    )


def _resolution(records: Sequence[Record]) -> str:
    """How fine the numbers are, which two decimals do not tell."""
    seeds, images = dict.fromkeys(str(record["config"]["seed"]) for record in records), sum(records[0]["total"])
    return (
        f'<p class="soft">{"Seed" if len(seeds) == 1 else "Seeds"} {escape(", ".join(seeds))}; {images:,} test images, '
        f"so one image is {100 / images:.2f} points of {html.symbols('A_T')}.</p>"
    )


def _curves(records: Sequence[Record]) -> str:
    lines = []
    for name, record in zip(labels(records), records, strict=True):
        values = record["metrics"]["A"]
        lines.append(f"{name}: {html.series(values)}")
    alt = "Line chart, accuracy in percent over all classes seen after each task. " + ". ".join(lines)
    caption = "Grey bars: how many classes each task brings. Each line ends with the accuracy over all classes."
    return "<h2>Accuracy as classes arrive</h2>" + html.figure(
        lambda width: accuracy_curves(records, **width), f"{alt}. Bars: new classes of each task.", caption
    )


def _stream(records: Sequence[Record]) -> str:
    first, names = records[0], labels(records)
    sizes = first["stream"]["sizes"]
    images = [task["images"] for task in max((r["tasks"] for r in records), key=len)]
    heads = ["task", "new classes", "classes seen", "training images", *(f"{name}\nA_t %" for name in names)]
    body = []
    for t, (task, size, seen) in enumerate(zip(task_names(first), sizes, accumulate(sizes), strict=True)):
        numbers = [str(size), str(seen), f"{images[t]:,}" if t < len(images) else "–"]
        numbers += [f"{r['metrics']['A'][t]:.1f}" if t < len(r["metrics"]["A"]) else "–" for r in records]
        body.append(html.row(escape(task), map(html.td, numbers)))
    caption = "Tasks in order of arrival, and the accuracy over all classes seen after each."
    return f"<h2>The stream</h2>{html.table(caption, heads, body)}{_class_names(first)}"


def _class_names(record: Record) -> str:
    classes, start, items = record.get("data", {}).get("classes") or [], 0, []
    if not classes:
        return ""
    for task, size in zip(task_names(record), record["stream"]["sizes"], strict=True):
        inside = ", ".join(str(name) for name in classes[start : start + size])
        items.append(f"<dt>{escape(task)}</dt><dd>{escape(inside)}</dd>")
        start += size
    return f"<details><summary>All class names</summary><dl>{''.join(items)}</dl></details>"


def _matrix(record: Record) -> str:
    name, matrix, tasks = labels([record])[0], record["metrics"]["matrix"], task_names(record)
    last = ", ".join(
        f"{task} {row[-1]:.1f}" for task, row in list(zip(tasks, matrix, strict=False))[: html.MOST_IN_ALT]
    )
    alt = f"Heat map, accuracy of each task after each task for {name}. After the last one, in percent: {last}."
    caption = "Along a row: how well one task's test images are still recognised, among all classes seen by then."
    body = [
        html.row(escape(task), (html.td("" if value is None else f"{value:.1f}") for value in row))
        for task, row in zip(tasks, matrix, strict=False)
    ]
    heads = ["task", *(f"after {task}" for task in tasks[: len(matrix)])]
    numbers = html.table(f"Percent right of each task, {name}", heads, body)
    return (
        f"<h2>What {escape(name)} keeps of each task</h2>"
        + html.figure(lambda width: accuracy_matrix(record, **width), alt, caption)
        + f"<details><summary>The same as numbers</summary>{numbers}</details>"
    )


def _merges(record: Record, name: str) -> str:
    """Which side led each merge and how far its directions were open; nothing for methods that do not say."""
    if not any("base" in (task.get("merge") or {}) for task in record["tasks"]):
        return ""
    body, before = [], 0
    for task in record["tasks"]:
        merge = task.get("merge") or {}
        body.append(html.row(escape(str(task["name"])), map(html.td, _merge_cells(task, merge, before))))
        before += task["classes"]
    heads = ["task", "classes before", "new classes", "base side", "align share", "gates,\nlowest to highest"]
    caption = (
        "The larger side is the base. The smaller one enters with its share, through gates that hold back the "
        "base's strongest directions (0 is closed, 1 is open)."
    )
    return f"<h2>What each merge of {escape(name)} did</h2>{html.table(caption, heads, body)}"


def _merge_cells(task: dict[str, Any], merge: dict[str, Any], before: int) -> list[str]:
    sizes = [str(before), str(task["classes"])]
    if "base" not in merge:
        return [*sizes, "not trained" if task.get("trained") is False else "taken whole", "–", "–"]
    side = {"accumulated": "what was known", "new": "the new task"}.get(merge["base"], str(merge["base"]))
    return [*sizes, side, f"{merge['align_share']:.3f}", f"{merge['gate_min']:.3f} – {merge['gate_max']:.3f}"]


# ---- how it is written ---------------------------------------------------------------------------------------------


def _linked(name: str, record: Record) -> str:
    paper = str(record.get("paper") or "")
    return f'<a href="{escape(paper)}">{escape(name)}</a>' if paper.startswith("https://") else escape(name)


def _data(record: Record) -> str:
    return str(record.get("data", {}).get("name") or record["config"].get("data", "the dataset"))
