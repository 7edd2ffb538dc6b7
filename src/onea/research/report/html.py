# SPDX-License-Identifier: Apache-2.0
"""Pages of text, tables and figures as HTML, and their look; all text is escaped."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from onea.presentation import style
from onea.presentation.tables import MISSING, Mark, Row, Table, Value

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Text:
    """A paragraph: the first one of a page, small print, or an important note."""

    text: str
    kind: Literal["lead", "soft", "note"] = "soft"


@dataclass(frozen=True)
class Terms:
    """Terms, each with what it means."""

    meanings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Picture:
    """A figure.

    Attributes:
        heading: above it.
        draw: returns the figure; is called with nothing and, for phones, with ``width`` in inches.
        alt: what it shows, for those who do not see it.
        caption: how to read it.
        name: of a file with it, without suffix.
    """

    heading: str
    draw: Callable[..., Figure]
    alt: str
    caption: str = ""
    name: str = ""

    def section(self, level: Literal[2, 3] = 2) -> Section:
        """The picture below its heading."""
        return Section(self.heading, [self], level)


@dataclass(frozen=True)
class Details:
    """Blocks that a reader opens on demand."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    """Blocks below a heading.

    Attributes:
        level: of the heading, as in HTML.
        apart: whether a line sets it off from what comes before.
    """

    heading: str
    blocks: Sequence[Block]
    level: Literal[2, 3] = 2
    apart: bool = False


@dataclass(frozen=True)
class Page:
    """A whole page."""

    title: str
    blocks: Sequence[Block]


Block = Text | Terms | Table | Picture | Details | Section


def remarks(texts: Sequence[str]) -> list[Text]:
    """Paragraphs of notes, the first one emphasised."""
    return [Text(text, "note" if index == 0 else "soft") for index, text in enumerate(texts)]


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
h1, h2, h3, p, li { overflow-wrap: anywhere; }
p { margin: .6rem 0; max-width: 46rem; }
.lead { font-size: 1.1rem; }
.soft, caption, summary, figcaption { color: var(--soft); font-size: .9rem; }
a { color: var(--mark); }
figure { margin: .8rem 0; background: #fff; border: 1px solid var(--line); border-radius: 12px; padding: .8rem; }
figure img { display: block; width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { figure { filter: invert(.9) hue-rotate(180deg); border-color: #cfcfcf; } }
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


def document(page: Page) -> str:
    """A whole page: self-contained, no script, no request, light and dark, phone to desk."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(page.title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join([f"<h1>{symbols(page.title)}</h1>", *map(block, page.blocks)])
        + "\n</main>\n</body>\n</html>\n"
    )


def block(part: Block) -> str:
    """A part of a page, escaped."""
    match part:
        case Text(text, kind):
            return f'<p class="{kind}">{symbols(text)}</p>'
        case Terms(meanings):
            return f"<dl>{''.join(f'<dt>{symbols(t)}</dt><dd>{symbols(meaning)}</dd>' for t, meaning in meanings)}</dl>"
        case Table():
            return table(part)
        case Picture():
            return picture(part)
        case Details(summary, blocks):
            return f"<details><summary>{symbols(summary)}</summary>{_blocks(blocks)}</details>"
        case Section(heading, blocks, level, apart):
            return f"<h{level}{_class('part' if apart else '')}>{symbols(heading)}</h{level}>{_blocks(blocks)}"


def picture(picture: Picture) -> str:
    """A figure on a card of its own, drawn twice: shrunk to a phone, the wide one could not be read."""
    wide, narrow = svg(picture.draw()), svg(picture.draw(width=PHONE))
    caption = block(Text(picture.caption)) if picture.caption else ""
    return (
        f'<figure><picture><source media="(max-width: 40rem)" srcset="{narrow}"><img src="{wide}" '
        f'alt="{escape(picture.alt)}"></picture></figure>{caption}'
    )


def svg(figure: Figure) -> str:
    """A figure as a data address; as an image of its own its ids cannot clash with those of another."""
    import matplotlib

    buffer = io.BytesIO()
    # Letters as outlines need no font on the reader's side; a fixed salt and no date make equal pages equal bytes.
    with style.theme(), matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "onea"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", pad_inches=0.1, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def table(table: Table) -> str:
    """A table that scrolls inside its own frame, by keyboard too, where the screen is narrower."""
    marks, bodies = table.marks(), []
    for group, rows in groupby(table.rows, key=lambda row: row.group):
        width = len(table.columns) + 1
        head = f'<tr><th scope="rowgroup" colspan="{width}">{symbols(group)}</th></tr>' if group else ""
        bodies.append(f"<tbody>{head}{''.join(_row(table, row, marks) for row in rows)}</tbody>")
    words = "words" if all(column.align == "left" for column in table.columns) else ""
    return (
        f'{_blocks(remarks(table.notes))}<div class="scroll" role="region" tabindex="0" '
        f'aria-label="{escape(table.title)}"><table{_class(words)}><caption><span>{symbols(table.title)}</span></caption>'
        f"<thead>{_heads(table)}</thead>{''.join(bodies)}</table></div>"
    )


def _heads(table: Table) -> str:
    corner = _head(table.corner) if table.corner else "<td></td>"
    names = f"<tr>{corner}{''.join(_head(column.name) for column in table.columns)}</tr>"
    groups = table.column_groups()
    spans = "".join(f'<th scope="colgroup" colspan="{count}">{symbols(group)}</th>' for group, count in groups)
    return f"<tr><td></td>{spans}</tr>{names}" if groups else names


def _head(name: str) -> str:
    return f'<th scope="col">{symbols(two_lines(name))}</th>'


def _row(table: Table, row: Row, marks: Mapping[tuple[str, int], Mark]) -> str:
    name = f'<a href="{escape(row.link)}">{symbols(row.name)}</a>' if row.link else symbols(row.name)
    span = f' colspan="{len(table.columns)}"' if len(row.cells) == 1 < len(table.columns) else ""
    cells = (
        _number(cell, table.columns[index].digits, marks.get((row.name, index)))
        if isinstance(cell, Value)
        else f"<td{span}>{escape(cell)}</td>"
        for index, cell in enumerate(row.cells)
    )
    return f'<tr{_class("first" if row.emphasised else "")}><th scope="row">{name}</th>{"".join(cells)}</tr>'


def _number(value: Value, digits: int, mark: Mark | None) -> str:
    number, gap = value.text(digits), value.gap
    paper = f'<span class="paper">paper {escape(value.reported)}</span>' if value.reported else ""
    text = " ".join(part for part in (number, f"({gap})" if gap and number else gap) if part)
    return f"<td{_class(mark or ('gap' if gap else ''))}>{escape(text) or ('' if paper else MISSING)}{paper}</td>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _blocks(blocks: Sequence[Block]) -> str:
    return "".join(map(block, blocks))


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
    """Numbers for a text alternative: all of a few, else the ends and the lowest."""
    texts = [f"{value:.1f}" for value in values]
    if len(texts) <= MOST_IN_ALT:
        return ", ".join(texts)
    return f"{texts[0]} after the first task, {min(values):.1f} at the lowest, {texts[-1]} after task {len(texts)}"
