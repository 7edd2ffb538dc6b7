# SPDX-License-Identifier: Apache-2.0
"""A table of an experiment as Markdown, LaTeX, CSV and HTML; gaps are marked in all of them, numbers speak alike."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Literal

from onea.report.grid_table import Column, GridTable, Value
from onea.report.html import row as html_row
from onea.report.html import symbols, two_lines

Mark = Literal["best", "second"]
EMPTY = Value()
GAP = "not run"

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
_COLOURS: dict[Mark, str] = {"best": "red", "second": "blue"}


def complete(value: Value) -> bool:
    """Whether every seed that the experiment asks for has been run."""
    return value.mean is not None and value.seeds >= value.wanted


def marks(table: GridTable) -> dict[tuple[str, int], Mark]:
    """The best and the second best of each column, among complete cells and as printed; equal numbers share a mark."""
    found: dict[tuple[str, int], Mark] = {}
    for index, column in enumerate(table.columns):
        fair = {}
        for name in table.rows:
            value = table.values.get((name, index), EMPTY)
            if value.mean is not None and complete(value):
                fair[name] = round(value.mean, column.digits)
        if len(fair) < 2:
            continue
        ranked = sorted(set(fair.values()), reverse=column.higher_is_better)
        for name, number in fair.items():
            if number in ranked[:2]:
                found[name, index] = "best" if number == ranked[0] else "second"
    return found


def number_text(value: Value, digits: int) -> str:
    """Our number as it is printed, ``88.23 ± 0.48``; empty where there is none.

    >>> number_text(Value(mean=88.234, std=0.4777, seeds=5, wanted=5), 2)
    '88.23 ± 0.48'
    """
    if value.mean is None:
        return ""
    spread = "" if value.std is None else f" ± {value.std:.{digits}f}"
    return f"{value.mean:.{digits}f}{spread}"


def gap_text(value: Value) -> str:
    """What is missing: ``not run``, ``2/5 seeds``, or nothing.

    >>> gap_text(Value(mean=1.0, seeds=2, wanted=5)), gap_text(Value(wanted=5)), gap_text(Value())
    ('2/5 seeds', 'not run', '')
    """
    if value.seeds >= value.wanted and (value.mean is not None or not value.wanted):
        return ""
    return f"{value.seeds}/{value.wanted} seeds" if value.mean is not None else GAP


def markdown(table: GridTable) -> str:
    """The table in Markdown: best in bold, second best in italics, gaps and reported numbers in words."""
    marked = marks(table)
    heads = [_plain(f"{c.group} {c.name}".strip()) for c in table.columns]
    lines = [["", *heads], ["---", *["---:"] * len(heads)]]
    for name in table.rows:
        cells = []
        for index, column in enumerate(table.columns):
            value = table.values.get((name, index), EMPTY)
            sign = {"best": "**", "second": "*", None: ""}[marked.get((name, index))]
            number = number_text(value, column.digits)
            parts = [f"{sign}{number}{sign}" if number else "", f"({gap})" if (gap := gap_text(value)) else ""]
            parts.append(f"[paper: {_plain(value.reported)}]" if value.reported else "")
            cells.append(" ".join(part for part in parts if part) or "–")
        lines.append([_plain(name), *cells])
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"**{_plain(table.title)}**\n\n{rows}" + "".join(f"\n{_plain(note)}\n" for note in table.notes)


def latex(table: GridTable) -> str:
    r"""The table for a paper: needs ``booktabs`` and ``xcolor``; best red and second blue, reported numbers in grey."""
    marked = marks(table)
    caption = " ".join(_latex(text.rstrip(".") + ".") for text in (table.title, *table.notes))
    lines = [
        "% needs \\usepackage{booktabs} and \\usepackage{xcolor}",
        "\\begin{table}[t]",
        "\\centering",
        f"\\caption{{{caption} \\textcolor{{red}}{{Red}} is best, \\textcolor{{blue}}{{blue}} is second best.}}",
        f"\\begin{{tabular}}{{l{'c' * len(table.columns)}}}",
        "\\toprule",
        *_latex_heads(table.columns),
        "\\midrule",
    ]
    for name in table.rows:
        cells = [
            _latex_cell(table.values.get((name, index), EMPTY), column.digits, marked.get((name, index)))
            for index, column in enumerate(table.columns)
        ]
        lines.append(" & ".join([_latex(name), *cells]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


def csv_text(table: GridTable) -> str:
    """One line per cell, numbers unrounded; an empty field is a number that does not exist."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["row", "group", "column", "mean", "std", "seeds", "wanted", "reported"])
    for name in table.rows:
        for index, column in enumerate(table.columns):
            value = table.values.get((name, index), EMPTY)
            numbers = [value.mean, value.std, value.seeds, value.wanted, value.reported]
            writer.writerow([name, column.group, column.name, *numbers])
    return buffer.getvalue()


def html(table: GridTable) -> str:
    """The table as a fragment of a page that has our style sheet; it scrolls in its own frame, by keyboard too."""
    marked = marks(table)
    body = []
    for name in table.rows:
        cells = [
            _html_cell(table.values.get((name, index), EMPTY), column.digits, marked.get((name, index)))
            for index, column in enumerate(table.columns)
        ]
        body.append(html_row(symbols(name), cells))
    caption = f"<caption><span>{symbols(table.title)}</span></caption><thead>{_html_heads(table.columns)}</thead>"
    return (
        f'{html_notes(table.notes)}<div class="scroll" role="region" tabindex="0" aria-label="{escape(table.title)}">'
        f"<table>{caption}<tbody>{''.join(body)}</tbody></table></div>"
    )


def html_notes(notes: Sequence[str]) -> str:
    """What a reader must know, the first one most of all."""
    return "".join(
        f'<p class="{"note" if index == 0 else "soft"}">{symbols(note)}</p>' for index, note in enumerate(notes)
    )


def grouped(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Neighbouring columns of one group: its name and how many they are."""
    return [(group, len(list(inside))) for group, inside in groupby(columns, key=lambda column: column.group)]


def _html_heads(columns: Sequence[Column]) -> str:
    names = "".join(f'<th scope="col">{symbols(two_lines(column.name))}</th>' for column in columns)
    groups = grouped(columns)
    if not any(group for group, _ in groups):
        return f"<tr><td></td>{names}</tr>"
    spans = "".join(f'<th scope="colgroup" colspan="{count}">{symbols(group)}</th>' for group, count in groups)
    return f"<tr><td></td>{spans}</tr><tr><td></td>{names}</tr>"


def _html_cell(value: Value, digits: int, mark: Mark | None) -> str:
    number, gap = number_text(value, digits), gap_text(value)
    kind = mark or ("gap" if gap else "")
    paper = f'<span class="paper">paper {escape(value.reported)}</span>' if value.reported else ""
    text = " ".join(part for part in (number, f"({gap})" if gap and number else gap) if part)
    css = f' class="{kind}"' if kind else ""
    return f"<td{css}>{escape(text) or ('' if paper else '–')}{paper}</td>"


def _latex_heads(columns: Sequence[Column]) -> list[str]:
    names = " & ".join(["", *(_latex(column.name) for column in columns)]) + " \\\\"
    groups = grouped(columns)
    if not any(group for group, _ in groups):
        return [names]
    spans, rules, start = [""], [], 2
    for group, count in groups:
        spans.append(f"\\multicolumn{{{count}}}{{c}}{{{_latex(group)}}}")
        rules.append(f"\\cmidrule(lr){{{start}-{start + count - 1}}}")
        start += count
    return [" & ".join(spans) + " \\\\", " ".join(rules), names]


def _latex_cell(value: Value, digits: int, mark: Mark | None) -> str:
    number, gap = _latex(number_text(value, digits)), gap_text(value)
    if mark:
        number = f"\\textcolor{{{_COLOURS[mark]}}}{{\\textbf{{{number}}}}}"
    parts = [number, f"\\textit{{({gap})}}" if gap else ""]
    parts.append(f"{{\\scriptsize\\textcolor{{gray}}{{[{_latex(value.reported)}]}}}}" if value.reported else "")
    return " ".join(part for part in parts if part) or "--"


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
