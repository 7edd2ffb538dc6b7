# SPDX-License-Identifier: Apache-2.0
"""The table of every report, and its forms: Markdown, LaTeX, CSV and in a terminal.

The best and the second best number of a column are marked, and missing runs are shown as such.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from onea.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as TerminalTable
    from rich.text import Text

Mark = Literal["best", "second"]
MISSING = "–"  # where a number could be and none is
NOT_RUN = "not run"


@dataclass(frozen=True)
class Value:
    """A number over seeds.

    Attributes:
        mean: over the seeds that have been run; None while there is none.
        std: sample deviation over seeds; None for fewer than two.
        seeds: how many were run.
        wanted: how many the experiment asks for; fewer are a gap to mark.
        reported: what the paper prints, as it prints it, such as ``88.23 ± 0.48``; None where it prints nothing.
        competes: whether it may be the best of its column once it is complete.
    """

    mean: float | None = None
    std: float | None = None
    seeds: int = 0
    wanted: int = 0
    reported: str | None = None
    competes: bool = True

    @property
    def complete(self) -> bool:
        """Whether every seed that the experiment asks for has been run."""
        return self.mean is not None and self.seeds >= self.wanted

    @property
    def gap(self) -> str:
        """What is missing: ``not run``, ``2/5 seeds``, or nothing.

        >>> Value(mean=1.0, seeds=2, wanted=5).gap, Value(wanted=5).gap, Value().gap
        ('2/5 seeds', 'not run', '')
        """
        if self.complete or not self.wanted:
            return ""
        return f"{self.seeds}/{self.wanted} seeds" if self.mean is not None else NOT_RUN

    def text(self, digits: int) -> str:
        """The number as it is printed, ``88.23 ± 0.48``; empty where there is none.

        >>> Value(mean=88.234, std=0.4777, seeds=5, wanted=5).text(2)
        '88.23 ± 0.48'
        """
        if self.mean is None:
            return ""
        spread = "" if self.std is None else f" ± {self.std:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


Cell = Value | str


@dataclass(frozen=True)
class TableColumn:
    """One column.

    Attributes:
        name: such as ``A_T``.
        group: heading over neighbouring columns, such as a dataset.
        higher_is_better: which of its numbers are marked.
        digits: of its numbers, behind the decimal point.
        align: numbers stand on the right, words on the left.
    """

    name: str
    group: str = ""
    higher_is_better: bool = True
    digits: int = 2
    align: Literal["left", "right"] = "right"


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        name: its first cell.
        cells: one for each column, or a single one that holds for all of them.
        group: heading over neighbouring rows.
        note: what a reader must know about this row.
        link: an address behind the name.
        emphasised: whether the report is about this row more than about the others.
    """

    name: str
    cells: tuple[Cell, ...]
    group: str = ""
    note: str = ""
    link: str = ""
    emphasised: bool = False


@dataclass(frozen=True)
class Table:
    """Rows by columns.

    Attributes:
        title: one line.
        notes: what a reader must know, the first one most of all (another backbone or dataset than the paper's).
        corner: heading over the names of the rows.
        mark_second: whether the second best of a column is marked too.
    """

    title: str
    columns: tuple[TableColumn, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    corner: str = ""
    mark_second: bool = True

    @classmethod
    def from_values(
        cls,
        title: str,
        rows: Sequence[str],
        columns: Sequence[TableColumn],
        values: Mapping[tuple[str, int], Value],
        notes: Sequence[str] = (),
    ) -> Table:
        """A table of numbers by row name and column index; a missing one is an empty cell."""
        every = (Row(row, tuple(values.get((row, i), Value()) for i in range(len(columns)))) for row in rows)
        return cls(title, tuple(columns), tuple(every), tuple(notes))

    @classmethod
    def from_texts(cls, title: str, heads: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> Table:
        """A table of finished texts; so many columns from the left hold words, the others numbers."""
        columns = tuple(
            TableColumn(head, align="left" if index < left else "right") for index, head in enumerate(heads)
        )
        return cls(title, columns[1:], tuple(Row(name, tuple(cells)) for name, *cells in lines), corner=heads[0])

    @property
    def values(self) -> dict[tuple[str, int], Value]:
        """The numbers by row name and column index."""
        return {(row.name, i): c for row in self.rows for i, c in enumerate(row.cells) if isinstance(c, Value)}

    @property
    def row_notes(self) -> list[str]:
        """The notes of single rows as sentences."""
        return [f"{row.name}: {row.note}." for row in self.rows if row.note]

    def cells(self, row: Row) -> Iterator[tuple[int, TableColumn, Cell]]:
        """Every column of a row: its index, itself and its cell."""
        every = row.cells * len(self.columns) if len(row.cells) == 1 else row.cells
        return zip(range(len(every)), self.columns, every, strict=True)

    def column_groups(self) -> list[tuple[str, int]]:
        """Neighbouring columns of one group: its name and how many they are; nothing where no group has a name."""
        groups = [(name, len(list(inside))) for name, inside in groupby(self.columns, key=lambda column: column.group)]
        return groups if any(name for name, _ in groups) else []

    def marks(self) -> dict[tuple[str, int], Mark]:
        """The best and the second best of each column, among complete cells and as printed; equal ones share a mark."""
        found: dict[tuple[str, int], Mark] = {}
        values = self.values
        for index, column in enumerate(self.columns):
            fair = {
                key: round(value.mean, column.digits)
                for key, value in values.items()
                if key[1] == index and value.competes and value.complete and value.mean is not None
            }
            if len(fair) < 2:
                continue
            ranked = sorted(set(fair.values()), reverse=column.higher_is_better)[: 1 + self.mark_second]
            found |= {key: "best" if value == ranked[0] else "second" for key, value in fair.items() if value in ranked}
        return found


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "±": r"$\pm$",
    "–": "--",
    "×": r"$\times$",
    "γ": r"$\gamma$",
    "κ": r"$\kappa$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
_WIDEST = 1000  # columns of a terminal
_COLOURS: dict[Mark, str] = {"best": "red", "second": "blue"}


def markdown(table: Table) -> str:
    """The table in Markdown: best in bold, second best in italics, gaps and reported numbers in words."""
    marks = table.marks()
    heads = [_plain(f"{column.group} {column.name}".strip()) for column in table.columns]
    rules = ["---:" if column.align == "right" else "---" for column in table.columns]
    lines = [[_plain(table.corner), *heads], ["---", *rules]]
    for row in table.rows:
        cells = (_markdown_cell(c, column.digits, marks.get((row.name, i))) for i, column, c in table.cells(row))
        lines.append([_plain(row.name), *cells])
    body = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"**{_plain(table.title)}**\n\n{body}" + "".join(
        f"\n{_plain(note)}\n" for note in (*table.notes, *table.row_notes)
    )


def latex(table: Table) -> str:
    r"""The table for a paper: needs ``booktabs`` and ``xcolor``; best red and second blue, reported numbers in grey."""
    marks = table.marks()
    caption = " ".join(_latex(text.rstrip(".") + ".") for text in (table.title, *table.notes, *table.row_notes))
    lines = [
        "% needs \\usepackage{booktabs} and \\usepackage{xcolor}",
        "\\begin{table}[t]",
        "\\centering",
        f"\\caption{{{caption} \\textcolor{{red}}{{Red}} is best, \\textcolor{{blue}}{{blue}} is second best.}}",
        f"\\begin{{tabular}}{{l{''.join('c' if column.align == 'right' else 'l' for column in table.columns)}}}",
        "\\toprule",
        *_latex_heads(table),
        "\\midrule",
    ]
    for row in table.rows:
        cells = (_latex_cell(c, column.digits, marks.get((row.name, i))) for i, column, c in table.cells(row))
        lines.append(" & ".join([_latex(row.name), *cells]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


def csv_text(table: Table) -> str:
    """One line per cell, numbers unrounded; an empty field is a number that does not exist."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["row", "group", "column", "mean", "std", "seeds", "wanted", "reported"])
    for row in table.rows:
        for _, column, cell in table.cells(row):
            told = [cell.mean, cell.std, cell.seeds, cell.wanted, cell.reported] if isinstance(cell, Value) else [cell]
            writer.writerow([row.name, column.group, column.name, *told])
    return buffer.getvalue()


BY_ENDING = {"md": markdown, "tex": latex, "csv": csv_text}


def terminal_style() -> dict[str, Any]:
    """How tables look in a terminal, all alike: what ``rich.table.Table`` takes."""
    from rich.box import SIMPLE_HEAD

    return {
        "box": SIMPLE_HEAD,
        "padding": (0, 1, 0, 0),
        "show_edge": False,
        "title_justify": "left",
        "caption_justify": "left",
    }


def terminal(table: Table, *, star: bool = False, no_wrap: bool = False) -> TerminalTable:
    """The table for a terminal, the best of each column in green.

    Args:
        table: shown without its notes.
        star: whether the best are also marked by a star, where there is no colour, and a line below says so.
        no_wrap: whether numbers stay on one line.
    """
    from rich.padding import Padding
    from rich.table import Table as TerminalTable

    shown = TerminalTable(title=_words(table.title, "table.title") if table.title else None, **terminal_style())
    shown.add_column(_words(table.corner), overflow="fold")  # a name that is too long is shown on two lines, not cut
    for column in table.columns:
        heading = _words(f"{column.group}\n{column.name}".strip())
        number = column.align == "right"
        shown.add_column(heading, justify=column.align, no_wrap=no_wrap and number, overflow="fold")
    bests = {place for place, mark in table.marks().items() if mark == "best"}
    starred = {index for _, index in bests} if star else set()
    for row in table.rows:
        cells: list[Text | Padding] = [_words(row.name)]
        for index, column, cell in table.cells(row):
            best = (row.name, index) in bests
            words = _words(_terminal_cell(cell, column.digits, star and best), "bold green" if best else "")
            # Room for the star that a cell does not have keeps decimal points below each other.
            cells.append(Padding(words, (0, 1, 0, 0)) if index in starred and not best else words)
        shown.add_row(*cells)
    if starred:
        shown.caption = "*: best of the column"
    return shown


def fit_terminal(table: Table, console: Console) -> TerminalTable:
    """The table for this terminal: numbers stay on one line where there is room, and are never cut where there is not.

    rich cuts what may not be wrapped, from the left column on, without a word.
    """
    shown = terminal(table, no_wrap=True)
    anywhere = console.options.update(max_width=_WIDEST)  # otherwise no table needs more than there is
    return shown if console.measure(shown, options=anywhere).minimum <= console.width else terminal(table)


def _words(text: str, style: str = "") -> Text:
    """Text that means nothing to a terminal or to rich."""
    from rich.text import Text

    return Text("\n".join(map(printable, text.split("\n"))), style)


def _terminal_cell(cell: Cell, digits: int, star: bool) -> str:
    if isinstance(cell, str):
        return cell
    number = cell.text(digits)
    parts = [f"{number}*" if star else number, cell.gap, f"paper {cell.reported}" if cell.reported else ""]
    return "\n".join(part for part in parts if part) or MISSING


def _markdown_cell(cell: Cell, digits: int, mark: Mark | None) -> str:
    if isinstance(cell, str):
        return _plain(cell)
    sign, number = {"best": "**", "second": "*", None: ""}[mark], cell.text(digits)
    parts = [f"{sign}{number}{sign}" if number else "", f"({cell.gap})" if cell.gap else ""]
    parts.append(f"[paper: {_plain(cell.reported)}]" if cell.reported else "")
    return " ".join(part for part in parts if part) or MISSING


def _latex_heads(table: Table) -> list[str]:
    names = " & ".join(_latex(name) for name in (table.corner, *(column.name for column in table.columns))) + " \\\\"
    groups = table.column_groups()
    if not groups:
        return [names]
    spans, rules, start = [""], [], 2
    for group, count in groups:
        spans.append(f"\\multicolumn{{{count}}}{{c}}{{{_latex(group)}}}")
        rules.append(f"\\cmidrule(lr){{{start}-{start + count - 1}}}")
        start += count
    return [" & ".join(spans) + " \\\\", " ".join(rules), names]


def _latex_cell(cell: Cell, digits: int, mark: Mark | None) -> str:
    if isinstance(cell, str):
        return _latex(cell)
    number = _latex(cell.text(digits))
    if mark:
        number = f"\\textcolor{{{_COLOURS[mark]}}}{{\\textbf{{{number}}}}}"
    parts = [number, f"\\textit{{({cell.gap})}}" if cell.gap else ""]
    parts.append(f"{{\\scriptsize\\textcolor{{gray}}{{[{_latex(cell.reported)}]}}}}" if cell.reported else "")
    return " ".join(part for part in parts if part) or _latex(MISSING)


def _latex(text: str) -> str:
    """Text that LaTeX prints as it is, with the metrics as formulas.

    >>> _latex("50 % of A_T & more")
    '50 \\\\% of $A_T$ \\\\& more'
    """
    safe = "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))
    return safe.replace("A\\_T", "$A_T$").replace("A\\_t", "$A_t$")


def _plain(text: str) -> str:
    """Text that cannot end a Markdown cell, a line or an emphasis."""
    escaped = " ".join(text.split()).replace("\\", "\\\\")
    for sign in "|*`<[":
        escaped = escaped.replace(sign, f"\\{sign}")
    return escaped
