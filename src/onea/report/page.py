"""One HTML page about runs on one stream: self-contained, no script, no request, light and dark, phone to desk."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from onea.report import style
from onea.report.curves import accuracy_curves, accuracy_matrix, task_names
from onea.report.tables import COLUMNS, Record, finished, labels, rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHONE = 4.2  # inches of a figure that is read on a phone
MOST_IN_ALT = 12  # tasks; beyond, a text alternative gives the ends and the table the rest
SHORT = 12  # characters of a digest that tell it apart

CSS = """
:root { color-scheme: light dark; --ink: #1d2530; --soft: #5a6472; --line: #dfe3e8; --page: #f6f7f9; --card: #ffffff;
  --mark: #00598c; --wash: #e6f1f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebef; --soft: #a3adba; --line: #333b46; --page: #12161c;
  --card: #1a2029; --mark: #7cc4f2; --wash: #16324a; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 2.8rem 0 .7rem; }
p { margin: .6rem 0; max-width: 46rem; }
.lead { font-size: 1.1rem; }
.soft, caption, summary, figcaption { color: var(--soft); font-size: .9rem; }
a { color: var(--mark); }
figure { margin: .8rem 0; background: #fff; border: 1px solid var(--line); border-radius: 12px; padding: .8rem; }
figure img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  margin: .8rem 0; }
.scroll:focus-visible, summary:focus-visible, a:focus-visible { outline: 2px solid var(--mark); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .8rem .9rem .3rem; caption-side: top; }
caption span { display: block; position: sticky; left: .9rem; max-width: min(46rem, calc(100vw - 4.2rem)); }
th, td { padding: .42rem .9rem; text-align: right; vertical-align: top; }
th { font-weight: 600; }
thead th { color: var(--soft); font-size: .82rem; line-height: 1.35; white-space: pre;
  vertical-align: bottom; border-bottom: 1px solid var(--line); }
tbody tr + tr > * { border-top: 1px solid var(--line); }
th[scope=row], th[scope=rowgroup], thead th:first-child, .words td, .words th { text-align: left; }
tbody th, tbody td { white-space: nowrap; }
tbody th[scope=row] { position: sticky; left: 0; background: var(--card); }
tbody th[scope=rowgroup] { color: var(--soft); font-size: .82rem; padding-top: 1.1rem; }
td.best { font-weight: 700; color: var(--mark); background: var(--wash); }
tr.first th { color: var(--mark); }
sub { line-height: 0; font-size: .75em; }
.words td { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .9rem; margin: .6rem 0;
  max-width: 46rem; }
dt { font-weight: 600; } dd { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
details { margin: .8rem 0; } summary { cursor: pointer; padding: .2rem 0; }
@media (max-width: 40rem) { main { padding-top: 1.4rem; } h1 { font-size: 1.5rem; } figure { padding: .4rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .45rem; } th, td { padding: .4rem .6rem; } }
@media print { body { background: #fff; } .scroll { overflow: visible; } }
"""


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
        _made(records),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


# ---- what it says --------------------------------------------------------------------------------------------------


def _lead(records: Sequence[Record]) -> str:
    first, sizes = records[0], records[0]["stream"]["sizes"]
    spread = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
    who = f"{len(records)} methods learn" if len(records) > 1 else f"{labels(records)[0]} learns"
    return (
        f'<p class="lead">{escape(who)} {_count(sum(sizes), "class", "classes")} of {escape(_data(first))} '
        f"that arrive in {_count(len(sizes), 'batch', 'batches')} of {spread}; after every batch, "
        "accuracy is measured over all classes seen so far.</p>"
    )


def _results(records: Sequence[Record]) -> str:
    found = rows(records)
    body = []
    for index, (row, record) in enumerate(zip(found, records, strict=True)):
        cells = [f'<td class="best">{escape(c.text)}</td>' if c.best else _td(c.text) for c in row.cells]
        body.append(_row(_linked(row.method, record), cells, "first" if index == 0 else ""))
    notes = "".join(f'<p class="soft">{escape(row.method)}: {escape(row.note)}.</p>' for row in found if row.note)
    meanings = "".join(f"<dt>{_symbols(c.title)}</dt><dd>{_symbols(c.meaning)}</dd>" for c in COLUMNS)
    heads = ["method", *(column.title for column in COLUMNS)]
    when = "after the whole stream" if all(map(finished, records)) else "so far"
    caption = f"Results {when}" + ("; the best of each column is marked." if len(records) > 1 else ".")
    return (
        f"<h2>Results</h2>{_table(caption, heads, body)}{notes}{_resolution(records)}"
        f"<details><summary>What the columns mean</summary><dl>{meanings}</dl></details>"
    )


def _resolution(records: Sequence[Record]) -> str:
    """How fine the numbers are, which two decimals do not tell."""
    seeds, images = dict.fromkeys(str(record["config"]["seed"]) for record in records), sum(records[0]["total"])
    return (
        f'<p class="soft">{"Seed" if len(seeds) == 1 else "Seeds"} {escape(", ".join(seeds))}; {images:,} test images, '
        f"so one image is {100 / images:.2f} points of {_symbols('A_T')}.</p>"
    )


def _curves(records: Sequence[Record]) -> str:
    lines = []
    for name, record in zip(labels(records), records, strict=True):
        values = record["metrics"]["A"]
        lines.append(f"{name}: {_series(values)}")
    alt = "Line chart, accuracy in percent over all classes seen after each task. " + ". ".join(lines)
    caption = "Grey bars: how many classes each task brings. Each line ends with the accuracy over all classes."
    return "<h2>Accuracy as classes arrive</h2>" + _figure(
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
        body.append(_row(escape(task), map(_td, numbers)))
    caption = "Tasks in order of arrival, and the accuracy over all classes seen after each."
    return f"<h2>The stream</h2>{_table(caption, heads, body)}{_class_names(first)}"


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
    last = ", ".join(f"{task} {row[-1]:.1f}" for task, row in list(zip(tasks, matrix, strict=False))[:MOST_IN_ALT])
    alt = f"Heat map, accuracy of each task after each task for {name}. After the last one, in percent: {last}."
    caption = "Along a row: how well one task's test images are still recognised, among all classes seen by then."
    body = [
        _row(escape(task), (_td("" if value is None else f"{value:.1f}") for value in row))
        for task, row in zip(tasks, matrix, strict=False)
    ]
    heads = ["task", *(f"after {task}" for task in tasks[: len(matrix)])]
    numbers = _table(f"Percent right of each task, {name}", heads, body)
    return (
        f"<h2>What {escape(name)} keeps of each task</h2>"
        + _figure(lambda width: accuracy_matrix(record, **width), alt, caption)
        + f"<details><summary>The same as numbers</summary>{numbers}</details>"
    )


def _merges(record: Record, name: str) -> str:
    """Which side led each merge and how far its directions were open; nothing for methods that do not say."""
    if not any("base" in (task.get("merge") or {}) for task in record["tasks"]):
        return ""
    body, before = [], 0
    for task in record["tasks"]:
        merge = task.get("merge") or {}
        body.append(_row(escape(str(task["name"])), map(_td, _merge_cells(task, merge, before))))
        before += task["classes"]
    heads = ["task", "classes before", "new classes", "base side", "align share", "gates,\nlowest to highest"]
    caption = (
        "The larger side is the base. The smaller one enters with its share, through gates that hold back the "
        "base's strongest directions (0 is closed, 1 is open)."
    )
    return f"<h2>What each merge of {escape(name)} did</h2>{_table(caption, heads, body)}"


def _merge_cells(task: Record, merge: Record, before: int) -> list[str]:
    sizes = [str(before), str(task["classes"])]
    if "base" not in merge:
        return [*sizes, "not trained" if task.get("trained") is False else "taken whole", "–", "–"]
    side = {"accumulated": "what was known", "new": "the new task"}.get(merge["base"], str(merge["base"]))
    return [*sizes, side, f"{merge['align_share']:.3f}", f"{merge['gate_min']:.3f} – {merge['gate_max']:.3f}"]


def _made(records: Sequence[Record]) -> str:
    names = labels(records)
    groups = {
        "Configuration": [record["config"] for record in records],
        "Options of the method": [record.get("options", {}) for record in records],
        "Images and network": [_inputs(record) for record in records],
        "Machine": [_machine(record) for record in records],
        "Versions": [_versions(record) for record in records],
        "Time": [_times(record) for record in records],
    }
    bodies = []
    for group, values in groups.items():
        keys = [
            key for key in dict.fromkeys(k for v in values for k in v) if any(v.get(key) is not None for v in values)
        ]
        lines = [_row(escape(key), _compared([v.get(key) for v in values])) for key in keys if key != "options"]
        if lines:
            head = f'<tr><th scope="rowgroup" colspan="{len(names) + 1}">{escape(group)}</th></tr>'
            bodies.append(f"<tbody>{head}{''.join(lines)}</tbody>")
    heads = [name.replace(" ", "\N{NO-BREAK SPACE}") for name in names]  # its columns are wide, one line will do
    caption = "Everything that the runs record about themselves; a value that spans the row holds for all of them."
    return f"<h2>How this was made</h2>{_frame(caption, ['', *heads], ''.join(bodies), 'words')}"


def _compared(values: Sequence[Any]) -> list[str]:
    """One wide cell where all records agree."""
    texts = ["–" if value is None else _plain(value) for value in values]
    if len(texts) > 1 and len(set(texts)) == 1:
        return [f'<td colspan="{len(texts)}">{escape(texts[0])}</td>']
    return [_td(text) for text in texts]


def _inputs(record: Record) -> Record:
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
        "input": f"{backbone['input']} px" if "input" in backbone else None,
    }


def _machine(record: Record) -> Record:
    runtime, environment = record.get("runtime", {}), record.get("environment", {})
    return {
        "accelerator": environment.get("accelerator"),
        **{name: environment.get(name) for name in ("processor", "cores", "platform")},
        **{name: runtime.get(name) for name in ("device", "precision", "threads")},
    }


def _versions(record: Record) -> Record:
    named = ("processor", "cores", "platform", "accelerator")
    return {name: value for name, value in record.get("environment", {}).items() if name not in named}


def _times(record: Record) -> Record:
    timings, dates = record["timings"], record.get("dates", {})
    return {
        "started": dates.get("started"),
        "resumed": ", ".join(dates.get("resumed") or []) or None,
        "finished": dates.get("finished") if finished(record) else "still running",
        "seconds learning": f"{sum(timings['learn_s']):.1f}",
        "seconds evaluating": f"{sum(timings['evaluate_s']):.1f}",
    }


# ---- how it is written ---------------------------------------------------------------------------------------------


def _figure(draw: Callable[[dict[str, float]], Figure], alt: str, caption: str) -> str:
    """A figure on a white card, drawn twice: shrunk to a phone, the wide one could not be read."""
    wide, narrow = _svg(draw({})), _svg(draw({"width": PHONE}))
    return (
        f'<figure><picture><source media="(max-width: 40rem)" srcset="{narrow}"><img src="{wide}" '
        f'alt="{escape(alt)}"></picture></figure><p class="soft">{escape(caption)}</p>'
    )


def _svg(figure: Figure) -> str:
    """A figure as a data address; as an image of its own its ids cannot clash with those of another."""
    import matplotlib

    buffer = io.BytesIO()
    # Letters as outlines need no font on the reader's side; a fixed salt and no date make equal pages equal bytes.
    with style.themed(), matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "onea"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", pad_inches=0.1, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _table(caption: str, heads: Sequence[str], body: Iterable[str]) -> str:
    return _frame(caption, heads, f"<tbody>{''.join(body)}</tbody>")


def _frame(caption: str, heads: Sequence[str], bodies: str, kind: str = "") -> str:
    """A table that scrolls inside its own frame, by keyboard too, where the screen is narrower."""
    cells = "".join(f'<th scope="col">{_symbols(_two_lines(h))}</th>' if h else "<td></td>" for h in heads)
    css = f' class="{kind}"' if kind else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table{css}>'
        f"<caption><span>{escape(caption)}</span></caption><thead><tr>{cells}</tr></thead>{bodies}</table></div>"
    )


def _row(head: str, cells: Iterable[str], kind: str = "") -> str:
    """A row of finished HTML: the first cell names it."""
    css = f' class="{kind}"' if kind else ""
    return f'<tr{css}><th scope="row">{head}</th>{"".join(cells)}</tr>'


def _td(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _symbols(text: str) -> str:
    """Escaped text in which A_T and A_t read as symbols."""
    return escape(text).replace("A_T", "A<sub>T</sub>").replace("A_t", "A<sub>t</sub>")


def _two_lines(head: str) -> str:
    """A heading that does not widen its column of short numbers more than it must.

    >>> _two_lines("weighted mean A %")
    'weighted\\nmean A %'
    """
    return head.replace(" ", "\n", 1) if len(head) > 10 and "\n" not in head else head


def _linked(name: str, record: Record) -> str:
    paper = str(record.get("paper") or "")
    return f'<a href="{escape(paper)}">{escape(name)}</a>' if paper.startswith("https://") else escape(name)


def _data(record: Record) -> str:
    return str(record.get("data", {}).get("name") or record["config"].get("data", "the dataset"))


def _series(values: Sequence[float]) -> str:
    texts = [f"{value:.1f}" for value in values]
    if len(texts) <= MOST_IN_ALT:
        return ", ".join(texts)
    return f"{texts[0]} after the first task, {min(values):.1f} at the lowest, {texts[-1]} after task {len(texts)}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
