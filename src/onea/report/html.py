# SPDX-License-Identifier: Apache-2.0
"""The look of every page and the pieces it is put together from; they return finished, escaped HTML."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from onea.report import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHONE = 4.2  # inches of a figure that is read on a phone
MOST_IN_ALT = 12  # tasks; beyond, a text alternative gives the ends and the table the rest

CSS = """
:root { color-scheme: light dark; --ink: #1d2530; --soft: #5a6472; --line: #dfe3e8; --page: #f6f7f9; --card: #ffffff;
  --mark: #00598c; --wash: #e6f1f8; --calm: #f2f4f7; --warn: #9a4d00; --hatch: #eadfd2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebef; --soft: #a3adba; --line: #333b46; --page: #12161c;
  --card: #1a2029; --mark: #7cc4f2; --wash: #16324a; --calm: #232b36; --warn: #f0b06a;
  --hatch: #453a2c; } }
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
tbody th[scope=row] { position: sticky; left: 0; background: var(--card); white-space: normal; min-width: 8rem;
  max-width: 20rem; overflow-wrap: break-word; }
tbody th[scope=rowgroup] { color: var(--soft); font-size: .82rem; padding-top: 1.1rem; }
td.best { font-weight: 700; color: var(--mark); background: var(--wash); }
tr.first th { color: var(--mark); }
sub { line-height: 0; font-size: .75em; }
.words td { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .9rem; margin: .6rem 0;
  max-width: 46rem; }
dt { font-weight: 600; } dd { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
details { margin: .8rem 0; } summary { cursor: pointer; padding: .2rem 0; }
td.second { font-weight: 600; background: var(--calm); }
td.gap { color: var(--warn); background: repeating-linear-gradient(135deg, transparent 0 6px, var(--hatch) 6px 7px); }
td .paper { display: block; color: var(--soft); font-size: .8rem; font-weight: 400; }
thead tr:first-child th[colspan] { text-align: center; }
.note { border-left: 3px solid var(--warn); padding: .1rem 0 .1rem .8rem; }
.part { border-top: 1px solid var(--line); margin-top: 3rem; padding-top: 1.2rem; }
h3 { font-size: 1.02rem; line-height: 1.35; margin: 2rem 0 .5rem; }
@media (max-width: 40rem) { main { padding-top: 1.4rem; } h1 { font-size: 1.5rem; } figure { padding: .4rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .45rem; } th, td { padding: .4rem .6rem; }
  tbody th[scope=row] { min-width: 7.5rem; max-width: 9.5rem; font-size: .85rem; } }
@media print { body { background: #fff; } .scroll { overflow: visible; } }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page around its parts; empty ones are left out."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def figure(draw: Callable[[dict[str, Any]], Figure], alt: str, caption: str) -> str:
    """A figure on a white card, drawn twice: shrunk to a phone, the wide one could not be read."""
    wide, narrow = svg(draw({})), svg(draw({"width": PHONE}))
    return (
        f'<figure><picture><source media="(max-width: 40rem)" srcset="{narrow}"><img src="{wide}" '
        f'alt="{escape(alt)}"></picture></figure>' + (f'<p class="soft">{escape(caption)}</p>' if caption else "")
    )


def svg(figure: Figure) -> str:
    """A figure as a data address; as an image of its own its ids cannot clash with those of another."""
    import matplotlib

    buffer = io.BytesIO()
    # Letters as outlines need no font on the reader's side; a fixed salt and no date make equal pages equal bytes.
    with style.themed(), matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "onea"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", pad_inches=0.1, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def table(caption: str, heads: Sequence[str], body: Iterable[str]) -> str:
    """A table of finished rows with one body."""
    return frame(caption, heads, f"<tbody>{''.join(body)}</tbody>")


def frame(caption: str, heads: Sequence[str], bodies: str, kind: str = "") -> str:
    """A table that scrolls inside its own frame, by keyboard too, where the screen is narrower."""
    cells = "".join(f'<th scope="col">{symbols(two_lines(h))}</th>' if h else "<td></td>" for h in heads)
    css = f' class="{kind}"' if kind else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table{css}>'
        f"<caption><span>{escape(caption)}</span></caption><thead><tr>{cells}</tr></thead>{bodies}</table></div>"
    )


def row(head: str, cells: Iterable[str], kind: str = "") -> str:
    """A row of finished HTML: the first cell names it."""
    css = f' class="{kind}"' if kind else ""
    return f'<tr{css}><th scope="row">{head}</th>{"".join(cells)}</tr>'


def td(text: str) -> str:
    """A cell."""
    return f"<td>{escape(text)}</td>"


def symbols(text: str) -> str:
    """Escaped text in which A_T and A_t read as symbols."""
    return escape(text).replace("A_T", "A<sub>T</sub>").replace("A_t", "A<sub>t</sub>")


def two_lines(head: str) -> str:
    """A heading that does not widen its column of short numbers more than it must.

    >>> two_lines("weighted mean A %")
    'weighted\\nmean A %'
    """
    return head.replace(" ", "\n", 1) if len(head) > 10 and "\n" not in head else head


def series(values: Sequence[float]) -> str:
    """Numbers as a text alternative tells them: all of a few, else the ends and the lowest."""
    texts = [f"{value:.1f}" for value in values]
    if len(texts) <= MOST_IN_ALT:
        return ", ".join(texts)
    return f"{texts[0]} after the first task, {min(values):.1f} at the lowest, {texts[-1]} after task {len(texts)}"


def count(number: int, one: str, many: str) -> str:
    """A number with its noun.

    >>> count(1, "class", "classes"), count(1200, "class", "classes")
    ('1 class', '1,200 classes')
    """
    return f"{number:,} {one if number == 1 else many}"
