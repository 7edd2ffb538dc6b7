# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown, LaTeX, CSV and the terminal, with the best numbers of each column and missing runs marked."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from onea.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as TerminalTable
    from rich.text import Text

Mark = Literal["best", "second"]
MISSING = "–"  # an empty cell
NOT_RUN = "not run"


@dataclass(frozen=True)
class Value:
    """A mean over seeds.

    Attributes:
        mean: the mean over finished seeds; None without any.
        std: sample standard deviation; None for fewer than two seeds.
        seeds: number of finished seeds.
        wanted: number of seeds of the experiment; if some are missing, the cell says how many.
        reported: the number in the paper, as printed, such as ``88.23 ± 0.48``; None if there is none.
        competes: whether it may be marked as the best of its column when it is complete.
    """

    mean: float | None = None
    std: float | None = None
    seeds: int = 0
    wanted: int = 0
    reported: str | None = None
    competes: bool = True

    @property
    def complete(self) -> bool:
        """Whether all seeds of the experiment are finished."""
        return self.mean is not None and self.seeds >= self.wanted

    @property
    def gap(self) -> str:
        """What is missing: ``not run`` or ``2/5 seeds``; empty if complete.

        >>> Value(mean=1.0, seeds=2, wanted=5).gap, Value(wanted=5).gap, Value().gap
        ('2/5 seeds', 'not run', '')
        """
        if self.complete or not self.wanted:
            return ""
        return f"{self.seeds}/{self.wanted} seeds" if self.mean is not None else NOT_RUN

    def text(self, digits: int) -> str:
        """Mean and deviation, such as ``88.23 ± 0.48``; empty without a mean.

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
        name: heading, such as ``A_T``.
        group: heading over neighbouring columns, such as a dataset.
        higher_is_better: whether the largest or the smallest number is the best.
        digits: number of decimals.
        align: right for numbers, left for text.
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
        name: the first cell.
        cells: one cell per column, or a single one for all columns.
        group: heading over neighbouring rows.
        note: a caveat about this row.
        link: address that the name links to.
        emphasised: whether the row is highlighted.
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
        title: title in one line.
        notes: caveats, such as another backbone or dataset than the paper's; the most important one first.
        corner: heading over the row names.
        mark_second: whether the second best number of a column is marked, too.
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
        """A table of numbers by row name and column index; missing numbers are empty cells."""
        filled = (Row(row, tuple(values.get((row, i), Value()) for i in range(len(columns)))) for row in rows)
        return cls(title, tuple(columns), tuple(filled), tuple(notes))

    @classmethod
    def from_texts(
        cls, title: str, headings: Sequence[str], lines: Iterable[Sequence[str]], text_columns: int = 1
    ) -> Table:
        """A table of formatted texts; the first ``text_columns`` are aligned left, the others are numbers."""
        columns = tuple(
            TableColumn(heading, align="left" if index < text_columns else "right")
            for index, heading in enumerate(headings)
        )
        return cls(title, columns[1:], tuple(Row(name, tuple(cells)) for name, *cells in lines), corner=headings[0])

    @property
    def values(self) -> dict[tuple[str, int], Value]:
        """The numbers by row name and column index."""
        return {(row.name, i): c for row in self.rows for i, c in enumerate(row.cells) if isinstance(c, Value)}

    @property
    def row_notes(self) -> list[str]:
        """The notes of the rows as sentences."""
        return [f"{row.name}: {row.note}." for row in self.rows if row.note]

    def cells(self, row: Row) -> Iterator[tuple[int, TableColumn, Cell]]:
        """Index, column and cell for each column of a row."""
        cells = row.cells * len(self.columns) if len(row.cells) == 1 else row.cells
        return zip(range(len(cells)), self.columns, cells, strict=True)

    def column_groups(self) -> list[tuple[str, int]]:
        """Name and number of columns of each group of neighbouring columns; empty if no group has a name."""
        groups = [(name, len(list(columns))) for name, columns in groupby(self.columns, key=attrgetter("group"))]
        return groups if any(name for name, _ in groups) else []

    def marks(self) -> dict[tuple[str, int], Mark]:
        """The best and second best complete cells of each column; numbers that are printed equally share a mark."""
        marks: dict[tuple[str, int], Mark] = {}
        values = self.values
        for index, column in enumerate(self.columns):
            rounded = {
                key: round(value.mean, column.digits)
                for key, value in values.items()
                if key[1] == index and value.competes and value.complete and value.mean is not None
            }
            if len(rounded) < 2:
                continue
            best = sorted(set(rounded.values()), reverse=column.higher_is_better)[: 1 + self.mark_second]
            marks |= {key: "best" if value == best[0] else "second" for key, value in rounded.items() if value in best}
        return marks


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
_MAX_WIDTH = 1000  # characters per line of an unlimited terminal
_COLOURS: dict[Mark, str] = {"best": "red", "second": "blue"}


def markdown(table: Table) -> str:
    """The table in Markdown: the best numbers in bold, the second best in italics."""
    marks = table.marks()
    heads = [_escape_markdown(f"{column.group} {column.name}".strip()) for column in table.columns]
    rules = ["---:" if column.align == "right" else "---" for column in table.columns]
    lines = [[_escape_markdown(table.corner), *heads], ["---", *rules]]
    for row in table.rows:
        cells = (_markdown_cell(c, column.digits, marks.get((row.name, i))) for i, column, c in table.cells(row))
        lines.append([_escape_markdown(row.name), *cells])
    body = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"**{_escape_markdown(table.title)}**\n\n{body}" + "".join(
        f"\n{_escape_markdown(note)}\n" for note in (*table.notes, *table.row_notes)
    )


def latex(table: Table) -> str:
    r"""The table in LaTeX with ``booktabs`` and ``xcolor``: best in red, second best in blue, reported in grey."""
    marks = table.marks()
    caption = " ".join(_escape_latex(text.rstrip(".") + ".") for text in (table.title, *table.notes, *table.row_notes))
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
        lines.append(" & ".join([_escape_latex(row.name), *cells]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


def csv_text(table: Table) -> str:
    """One line per cell with unrounded numbers; fields without a number are empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["row", "group", "column", "mean", "std", "seeds", "wanted", "reported"])
    for row in table.rows:
        for _, column, cell in table.cells(row):
            data = [cell.mean, cell.std, cell.seeds, cell.wanted, cell.reported] if isinstance(cell, Value) else [cell]
            writer.writerow([row.name, column.group, column.name, *data])
    return buffer.getvalue()


FORMATS = {"md": markdown, "tex": latex, "csv": csv_text}


def terminal_style() -> dict[str, Any]:
    """The arguments of ``rich.table.Table`` for all tables in a terminal."""
    from rich.box import SIMPLE_HEAD

    return {
        "box": SIMPLE_HEAD,
        "padding": (0, 1, 0, 0),
        "show_edge": False,
        "title_justify": "left",
        "caption_justify": "left",
    }


def terminal(table: Table, *, star: bool = False, no_wrap: bool = False) -> TerminalTable:
    """The table for a terminal without its notes, with the best number of each column in green.

    Args:
        table: the table.
        star: whether the best numbers also have a star, which a caption explains.
        no_wrap: whether numbers stay on one line.
    """
    from rich.padding import Padding
    from rich.table import Table as TerminalTable

    shown = TerminalTable(title=_terminal_text(table.title, "table.title") if table.title else None, **terminal_style())
    shown.add_column(_terminal_text(table.corner), overflow="fold")  # long names are wrapped, not cut
    for column in table.columns:
        heading = _terminal_text(f"{column.group}\n{column.name}".strip())
        number = column.align == "right"
        shown.add_column(heading, justify=column.align, no_wrap=no_wrap and number, overflow="fold")
    best_cells = {position for position, mark in table.marks().items() if mark == "best"}
    starred = {index for _, index in best_cells} if star else set()
    for row in table.rows:
        cells: list[Text | Padding] = [_terminal_text(row.name)]
        for index, column, cell in table.cells(row):
            best = (row.name, index) in best_cells
            text = _terminal_text(_terminal_cell(cell, column.digits, star and best), "bold green" if best else "")
            # Cells without a star are padded, so that decimal points are aligned.
            cells.append(Padding(text, (0, 1, 0, 0)) if index in starred and not best else text)
        shown.add_row(*cells)
    if starred:
        shown.caption = "*: best of the column"
    return shown


def fit_terminal(table: Table, console: Console) -> TerminalTable:
    """The table for this terminal: numbers are wrapped only if the terminal is too narrow; otherwise rich cuts them."""
    shown = terminal(table, no_wrap=True)
    unlimited = console.options.update(max_width=_MAX_WIDTH)  # otherwise the measured width is limited
    return shown if console.measure(shown, options=unlimited).minimum <= console.width else terminal(table)


def _terminal_text(text: str, style: str = "") -> Text:
    """Text without control characters or markup."""
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
        return _escape_markdown(cell)
    sign, number = {"best": "**", "second": "*", None: ""}[mark], cell.text(digits)
    parts = [f"{sign}{number}{sign}" if number else "", f"({cell.gap})" if cell.gap else ""]
    parts.append(f"[paper: {_escape_markdown(cell.reported)}]" if cell.reported else "")
    return " ".join(part for part in parts if part) or MISSING


def _latex_heads(table: Table) -> list[str]:
    names = (table.corner, *(column.name for column in table.columns))
    heads = " & ".join(map(_escape_latex, names)) + " \\\\"
    groups = table.column_groups()
    if not groups:
        return [heads]
    spans, rules, start = [""], [], 2
    for group, count in groups:
        spans.append(f"\\multicolumn{{{count}}}{{c}}{{{_escape_latex(group)}}}")
        rules.append(f"\\cmidrule(lr){{{start}-{start + count - 1}}}")
        start += count
    return [" & ".join(spans) + " \\\\", " ".join(rules), heads]


def _latex_cell(cell: Cell, digits: int, mark: Mark | None) -> str:
    if isinstance(cell, str):
        return _escape_latex(cell)
    number = _escape_latex(cell.text(digits))
    if mark:
        number = f"\\textcolor{{{_COLOURS[mark]}}}{{\\textbf{{{number}}}}}"
    parts = [number, f"\\textit{{({cell.gap})}}" if cell.gap else ""]
    parts.append(f"{{\\scriptsize\\textcolor{{gray}}{{[{_escape_latex(cell.reported)}]}}}}" if cell.reported else "")
    return " ".join(part for part in parts if part) or _escape_latex(MISSING)


def _escape_latex(text: str) -> str:
    """Text with escaped special characters, and metrics as formulas.

    >>> _escape_latex("50 % of A_T & more")
    '50 \\\\% of $A_T$ \\\\& more'
    """
    safe = "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))
    return safe.replace("A\\_T", "$A_T$").replace("A\\_t", "$A_t$")


def _escape_markdown(text: str) -> str:
    """Text on one line with the special characters of Markdown escaped."""
    escaped = " ".join(text.split()).replace("\\", "\\\\")
    for sign in "|*`<[":
        escaped = escaped.replace(sign, f"\\{sign}")
    return escaped
