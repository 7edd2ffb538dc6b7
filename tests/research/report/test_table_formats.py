# SPDX-License-Identifier: Apache-2.0
"""Tables of experiments in every format: marks, gaps, escapes."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser

from rich.console import Console
from rich.table import Table as TerminalTable

from onea.presentation import tables
from onea.presentation.tables import Row, Table, TableColumn, Value
from onea.research.report import html

COLUMNS = (
    TableColumn("A_T", "CIFAR & co"),
    TableColumn("mean A", "CIFAR & co"),
    TableColumn("F", "CUB", higher_is_better=False),
)


def full(mean: float, reported: str | None = None) -> Value:
    return Value(mean, 0.5, 5, 5, reported)


def table(values: dict[tuple[str, int], Value], rows: tuple[str, ...] = ("a", "b", "c")) -> Table:
    return Table.from_values("A title", rows, COLUMNS, values, ("First note.", "Second note."))


def test_best_and_second_follow_the_direction_of_the_column() -> None:
    values = {(row, c): full(number) for c in (0, 2) for row, number in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    found = table(values).marks()
    assert found == {("c", 0): "best", ("b", 0): "second", ("a", 2): "best", ("b", 2): "second"}


def test_ties_share_a_mark_as_printed() -> None:
    values = {("a", 0): full(80.001), ("b", 0): full(80.004), ("c", 0): full(70.0)}
    assert table(values).marks() == {("a", 0): "best", ("b", 0): "best", ("c", 0): "second"}


def test_gaps_and_unfinished_cells_are_never_marked() -> None:
    values = {("a", 0): Value(99.0, 1.0, 2, 5), ("b", 0): full(80.0), ("c", 0): full(70.0), ("a", 1): full(60.0)}
    found = table(values).marks()
    assert found == {("b", 0): "best", ("c", 0): "second"}, "a lone number has nothing to be better than"


def test_markdown_marks_gaps_and_shows_the_papers_numbers() -> None:
    values = {
        ("a|b", 0): Value(99.0, 1.0, 2, 5, "88.23 ± 0.48"),
        ("a|b", 1): Value(wanted=5),
        ("c", 0): full(80.0),
        ("c", 1): Value(81.0, None, 1, 1),
    }
    lines = tables.markdown(table(values, ("a|b", "c"))).splitlines()
    assert lines[0] == "**A title**"
    assert lines[4] == "| a\\|b | 99.00 ± 1.00 (2/5 seeds) [paper: 88.23 ± 0.48] | (not run) | – |"
    assert lines[5] == "| c | 80.00 ± 0.50 | 81.00 | – |"
    assert lines[-3:] == ["First note.", "", "Second note."]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines[2:6]} == {5}


def test_latex_marks_red_and_blue_and_escapes() -> None:
    values = {("a_1 & 50 %", 0): full(90.0, "88.2 ± 0.5"), ("\\b{$", 0): full(80.0), ("\\b{$", 1): Value(wanted=5)}
    text = tables.latex(table(values, ("a_1 & 50 %", "\\b{$")))
    assert (
        r"a\_1 \& 50 \% & \textcolor{red}{\textbf{90.00 $\pm$ 0.50}} "
        r"{\scriptsize\textcolor{gray}{[88.2 $\pm$ 0.5]}} & -- & -- \\" in text
    )
    assert r"\textbackslash{}b\{\$ & \textcolor{blue}{\textbf{80.00 $\pm$ 0.50}} & \textit{(not run)} & -- \\" in text
    assert r"\multicolumn{2}{c}{CIFAR \& co} & \multicolumn{1}{c}{CUB} \\" in text
    assert r"\cmidrule(lr){2-3} \cmidrule(lr){4-4}" in text
    for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\begin{tabular}{lccc}"):
        assert text.count(rule) == 1
    rows = [line for line in text.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {3}


def test_csv_has_a_line_for_every_cell_and_reads_back() -> None:
    values = {('a "quoted", b', 0): Value(1 / 3, 0.25, 4, 5, "x ± y")}
    lines = list(csv.DictReader(io.StringIO(tables.csv_text(table(values, ('a "quoted", b', "c"))))))
    assert len(lines) == 6
    first = lines[0]
    assert first["row"] == 'a "quoted", b'
    assert (first["group"], first["column"]) == ("CIFAR & co", "A_T")
    assert (float(first["mean"]), float(first["std"])) == (1 / 3, 0.25)
    assert (first["seeds"], first["wanted"], first["reported"]) == ("4", "5", "x ± y")
    assert (lines[1]["mean"], lines[1]["seeds"]) == ("", "0")


class Cells(HTMLParser):
    """The cells of a table with their classes, and whether every tag closes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[list[str]] = []
        self.heads: list[dict[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        if tag == "td":
            self.cells.append([str(dict(attrs).get("class") or ""), ""])
        if tag == "th":
            self.heads.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            self.cells[-1][1] += data


def test_html_shows_marks_gaps_and_the_papers_numbers_and_escapes() -> None:
    evil = "<script>"
    values = {
        (evil, 0): full(90.0, evil),
        (evil, 1): Value(wanted=5),
        ("c", 0): full(80.0),
        ("c", 1): Value(70.0, 1.0, 2, 5),
    }
    text = html.render(table(values, (evil, "c")))
    assert evil not in text
    read = Cells(text)
    assert read.cells[2:] == [
        ["best", "90.00 ± 0.50paper <script>"],
        ["gap", "not run"],
        ["", "–"],
        ["second", "80.00 ± 0.50"],
        ["gap", "70.00 ± 1.00 (2/5 seeds)"],
        ["", "–"],
    ]
    assert {head.get("scope") for head in read.heads} == {"col", "colgroup", "row"}
    assert [head.get("colspan") for head in read.heads if head.get("scope") == "colgroup"] == ["2", "1"]
    assert text.count("<caption>") == 1
    assert text.index("First note.") < text.index("<table")


def printed(shown: TerminalTable, colour: bool = False) -> str:
    console = Console(width=100, record=True, file=io.StringIO(), color_system="standard" if colour else None)
    console.print(shown)
    return console.export_text(styles=colour)


def test_terminal_shows_marks_gaps_and_the_papers_numbers_and_escapes() -> None:
    evil = "[red]\x1b[2J"
    values = {(evil, 0): full(90.0, "88.2"), (evil, 1): Value(wanted=5), ("c", 0): full(80.0)}
    shown = table(values, (evil, "c"))
    text = printed(tables.terminal(shown))
    for expected in ("A title", "CIFAR & co", "90.00 ± 0.50", "paper 88.2", "not run", "–", "[red]\\u001b[2J"):
        assert expected in text
    assert "\x1b[1;32m90.00 ± 0.50" in printed(tables.terminal(shown), colour=True)


def test_without_colour_a_star_marks_the_best_is_explained_and_shifts_no_number() -> None:
    values = {("a", 0): full(90.0), ("b", 0): full(8.0), ("a", 1): full(70.0), ("b", 1): full(71.5)}
    text = printed(tables.terminal(table(values, ("a", "b")), star=True))
    first, second = (line for line in text.splitlines() if line.startswith(("a ", "b ")))
    assert re.findall(r"[\d.]+ ± [\d.]+\*?", first) == ["90.00 ± 0.50*", "70.00 ± 0.50"]
    assert re.findall(r"[\d.]+ ± [\d.]+\*?", second) == ["8.00 ± 0.50", "71.50 ± 0.50*"]
    assert [sign.start() for sign in re.finditer("±", first)] == [sign.start() for sign in re.finditer("±", second)]
    assert [line.rstrip() for line in text.splitlines() if "best" in line] == ["*: best of the column"]
    for plain in (tables.terminal(table(values)), tables.terminal(table({}), star=True)):
        assert "*" not in printed(plain)


def test_words_are_left_aligned_and_a_single_cell_spans_all_columns() -> None:
    columns = (TableColumn("one", align="left"), TableColumn("two", align="left"))
    words = Table("T", columns, (Row("same", ("x & y",), "G"), Row("other", ("a", "b"), "G", "a note")), corner="what")
    assert tables.markdown(words).splitlines()[2:] == [
        "| what | one | two |",
        "| --- | --- | --- |",
        "| same | x & y | x & y |",
        "| other | a | b |",
        "",
        "other: a note.",
    ]
    assert r"\begin{tabular}{lll}" in tables.latex(words)
    assert r"same & x \& y & x \& y \\" in tables.latex(words)
    assert [line.split(",")[3] for line in tables.csv_text(words).splitlines()[1:]] == ["x & y", "x & y", "a", "b"]
    text = html.render(words)
    assert '<table class="words">' in text
    assert '<th scope="rowgroup" colspan="3">G</th>' in text
    assert '<td colspan="2">x &amp; y</td>' in text
    assert not words.marks()
