# SPDX-License-Identifier: Apache-2.0
"""HTML pages of text, tables and figures; all text is escaped."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from onea.presentation import style
from onea.presentation.tables import MISSING, Mark, Row, Table, Value

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Text:
    """A paragraph: the introduction of a page, small print, or an important note."""

    text: str
    kind: Literal["lead", "soft", "note"] = "soft"


@dataclass(frozen=True)
class Terms:
    """Terms and their meanings."""

    meanings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Picture:
    """A figure.

    Attributes:
        heading: heading above the figure.
        draw: function that returns the figure; called without arguments, and with ``width`` in inches for phones.
        alt: text alternative.
        caption: text below the figure.
        name: name of its image file, without suffix.
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
    """Blocks that are hidden until a reader opens them."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    """Blocks below a heading.

    Attributes:
        level: level of the heading in HTML.
        apart: draw a line above the section.
    """

    heading: str
    blocks: Sequence[Block]
    level: Literal[2, 3] = 2
    apart: bool = False


Block = Text | Terms | Table | Picture | Details | Section


def remarks(texts: Sequence[str]) -> list[Block]:
    """Notes as paragraphs, the first one emphasised."""
    return [Text(text, "note" if index == 0 else "soft") for index, text in enumerate(texts)]


PHONE = 4.2  # width in inches of figures on phones
MAX_IN_ALT = 12  # values in a text alternative; of longer series, only the first, the lowest and the last


def document(title: str, blocks: Sequence[Block]) -> str:
    """A self-contained page without scripts, for light and dark themes and screens of any width."""
    css = (resources.files("onea.research.report") / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join([f"<h1>{with_subscripts(title)}</h1>", *map(render, blocks)])
        + "\n</main>\n</body>\n</html>\n"
    )


def render(block: Block) -> str:
    """The HTML of a block."""
    match block:
        case Text(text, kind):
            return f'<p class="{kind}">{with_subscripts(text)}</p>'
        case Terms(meanings):
            items = (
                f"<dt>{with_subscripts(term)}</dt><dd>{with_subscripts(meaning)}</dd>" for term, meaning in meanings
            )
            return f"<dl>{''.join(items)}</dl>"
        case Table():
            return _table(block)
        case Picture():
            return _picture(block)
        case Details(summary, blocks):
            return f"<details><summary>{with_subscripts(summary)}</summary>{_blocks(blocks)}</details>"
        case Section(heading, blocks, level, apart):
            return f"<h{level}{_class('part' if apart else '')}>{with_subscripts(heading)}</h{level}>{_blocks(blocks)}"


def _picture(picture: Picture) -> str:
    """A figure in a wide version and one for phones, on which the wide one would be illegible."""
    wide, narrow = _data_url(picture.draw()), _data_url(picture.draw(width=PHONE))
    caption = render(Text(picture.caption)) if picture.caption else ""
    return (
        f'<figure><picture><source media="(max-width: 40rem)" srcset="{narrow}"><img src="{wide}" '
        f'alt="{escape(picture.alt)}"></picture></figure>{caption}'
    )


def _data_url(figure: Figure) -> str:
    """A figure as an SVG in a ``data:`` URL, so that the ids of several figures on a page cannot clash."""
    import matplotlib

    buffer = io.BytesIO()
    # Text as paths needs no fonts on the reader's machine; a fixed salt and no date make pages reproducible.
    with style.theme(), matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "onea"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", pad_inches=0.1, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _table(table: Table) -> str:
    """A table that scrolls in its frame on narrow screens, by keyboard as well."""
    marks, bodies = table.marks(), []
    for group, rows in groupby(table.rows, key=lambda row: row.group):
        width = len(table.columns) + 1
        head = f'<tr><th scope="rowgroup" colspan="{width}">{with_subscripts(group)}</th></tr>' if group else ""
        bodies.append(f"<tbody>{head}{''.join(_row(table, row, marks) for row in rows)}</tbody>")
    words = "words" if all(column.align == "left" for column in table.columns) else ""
    return (
        f'{_blocks(remarks(table.notes))}<div class="scroll" role="region" tabindex="0" '
        f'aria-label="{escape(table.title)}"><table{_class(words)}><caption><span>{with_subscripts(table.title)}</span></caption>'
        f"<thead>{_heads(table)}</thead>{''.join(bodies)}</table></div>"
    )


def _heads(table: Table) -> str:
    corner = _head(table.corner) if table.corner else "<td></td>"
    names = f"<tr>{corner}{''.join(_head(column.name) for column in table.columns)}</tr>"
    groups = table.column_groups()
    spans = "".join(f'<th scope="colgroup" colspan="{count}">{with_subscripts(group)}</th>' for group, count in groups)
    return f"<tr><td></td>{spans}</tr>{names}" if groups else names


def _head(name: str) -> str:
    return f'<th scope="col">{with_subscripts(two_lines(name))}</th>'


def _row(table: Table, row: Row, marks: Mapping[tuple[str, int], Mark]) -> str:
    name = f'<a href="{escape(row.link)}">{with_subscripts(row.name)}</a>' if row.link else with_subscripts(row.name)
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
    return "".join(map(render, blocks))


def with_subscripts(text: str) -> str:
    """Escaped text with subscripts in A_T and A_t."""
    return escape(text).replace("A_T", "A<sub>T</sub>").replace("A_t", "A<sub>t</sub>")


def two_lines(head: str) -> str:
    """A long heading broken after its first word, because the numbers below are short.

    >>> two_lines("weighted mean A %")
    'weighted\\nmean A %'
    """
    return head.replace(" ", "\n", 1) if len(head) > 10 and "\n" not in head else head


def series(values: Sequence[float]) -> str:
    """Numbers for a text alternative: all values if there are few, otherwise the first, the lowest and the last."""
    texts = [f"{value:.1f}" for value in values]
    if len(texts) <= MAX_IN_ALT:
        return ", ".join(texts)
    return f"{texts[0]} after the first task, {min(values):.1f} at the lowest, {texts[-1]} after task {len(texts)}"
