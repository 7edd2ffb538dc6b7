# SPDX-License-Identifier: Apache-2.0
"""Figures, tables and the page of records with one to forty tasks, finished or not."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text
from support.records import NAMES, NINE, Reader, Record, method_lines, record

from onea.errors import OneaError
from onea.presentation.tables import markdown
from onea.research.cli.demo import _prepare_folder
from onea.research.record import write_record
from onea.research.record_metrics import headline_metrics
from onea.research.report.aggregate import results_table
from onea.research.report.curves import accuracy_curves, spread
from onea.research.report.heat_maps import accuracy_matrix
from onea.research.report.records import labels
from onea.research.report.run_page import provenance, run_page
from onea.research.streams import make_stream


def three() -> list[Record]:
    return [record(), record("simplecil", share=0.5), record("running-mean", share=0.78)]


def forty(done: int | None = None) -> Record:
    return record(sizes=make_stream(classes=200, tasks=40).sizes, names=(), done=done)


def one() -> Record:
    return record(sizes=(5,), names=("only",))


# ---- figures ------------------------------------------------------------------------------------------------------


def test_every_method_has_its_line_and_every_task_its_bar() -> None:
    records = three()
    top, bottom = accuracy_curves(records).axes
    assert [list(line.get_ydata()) for line in method_lines(top)] == [r["metrics"]["A"] for r in records]
    assert [bar.get_height() for bar in bottom.patches] == list(NINE)
    assert [text.get_text() for text in bottom.texts] == [f"+{size}" for size in NINE]
    assert [label.get_text() for label in bottom.get_xticklabels()][1] == "greek\n15"


def test_the_first_record_is_emphasised() -> None:
    first, *others = method_lines(accuracy_curves(three()).axes[0])
    assert all(first.get_linewidth() > other.get_linewidth() for other in others)
    assert all(first.get_zorder() >= other.get_zorder() for other in others)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_names_at_the_ends_of_lines_do_not_overlap(count: int) -> None:
    figure = accuracy_curves([record(f"method-{i}", share=0.8) for i in range(count)])
    figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in figure.axes[0].texts), key=lambda box: box.y0)
    assert len(boxes) == count
    assert not any(low.overlaps(high) for low, high in pairwise(boxes))


@pytest.mark.parametrize("width", [4.2, 8.6])
@pytest.mark.parametrize("sizes", [(5,), (3, 1), NINE, make_stream(classes=200, tasks=40).sizes])
def test_tick_labels_do_not_overlap(width: float, sizes: tuple[int, ...]) -> None:
    figure = accuracy_curves([record(sizes=sizes, names=NAMES if sizes == NINE else ())], width)
    figure.draw_without_rendering()
    ticks = [tick for tick in figure.axes[1].get_xticklabels() if tick.get_text()]
    if any(tick.get_rotation() for tick in ticks):
        return  # slanted names have overlapping boxes without touching
    boxes = [tick.get_window_extent() for tick in ticks]
    assert not any(left.overlaps(right) for left, right in pairwise(boxes))


def test_a_dollar_sign_in_a_name_is_not_a_formula() -> None:
    names = ("$x_{$", "b")
    made = [record("$\\frac{$", sizes=(2, 3), names=names), record("b", sizes=(2, 3), names=names)]
    for figure in (accuracy_curves(made), accuracy_curves(made, 4.2), accuracy_matrix(made[0])):
        figure.draw_without_rendering()  # a formula that does not end would fail here
        assert any("x_{" in text.get_text() for text in figure.findobj(Text))


def test_different_streams_and_no_records_are_errors() -> None:
    with pytest.raises(OneaError, match="different task sizes"):
        accuracy_curves([record(), one()])
    with pytest.raises(OneaError, match="at least one"):
        accuracy_curves([])


@pytest.mark.parametrize(("made", "numbers"), [(one(), 1), (record(), 45), (forty(), 0), (record(done=3), 6)])
def test_matrix_has_numbers_if_there_is_room(made: Record, numbers: int) -> None:
    figure = accuracy_matrix(made)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert len(axes.texts) == numbers
    assert len(figure.axes) == (1 if numbers else 2), "a scale of colours stands in for the numbers"
    drawn = axes.images[0].get_array()
    assert [
        [None if hidden else value for value, hidden in zip(*pair, strict=True)]
        for pair in zip(drawn.data.tolist(), np.ma.getmaskarray(drawn).tolist(), strict=True)
    ] == made["metrics"]["matrix"]


def test_spread_keeps_order_and_gap() -> None:
    values = [10.0, 10.0, 10.5, 30.0, 31.0]
    placed = spread(values, 2.0)
    assert placed == sorted(placed)
    assert all(high - low >= 2.0 - 1e-9 for low, high in pairwise(placed))
    assert spread([1.0, 9.0], 2.0) == [1.0, 9.0]
    assert spread([], 2.0) == []


# ---- tables -------------------------------------------------------------------------------------------------------


def best(records: list[Record], title: str) -> list[bool]:
    table = results_table(records)
    column, marks = [column.name for column in table.columns].index(title), table.marks()
    assert set(marks.values()) <= {"best"}, "the second best is not marked here"
    return [(row.name, column) in marks for row in table.rows]


def test_the_best_of_each_column_is_marked() -> None:
    records = three()
    for title, key, pick in (("A_T %", "A_T", max), ("mean A %", "mean_A", max), ("F", "F", min)):
        values = [r["metrics"][key] for r in records]
        assert best(records, title) == [value == pick(values) for value in values]
    assert best(records[::-1], "A_T %") == best(records, "A_T %")[::-1]


def test_equal_numbers_are_both_marked_and_a_single_record_is_not() -> None:
    assert best([record(), record("copy")], "A_T %") == [True, True]
    assert not results_table([record()]).marks()


def test_a_running_record_is_shown_but_never_best() -> None:
    records = [record(), record("simplecil", share=0.5), record("early", share=1.0, done=3)]
    assert best(records, "A_T %") == [True, False, False]
    assert results_table(records).rows[2].note == "still running: 3 of 9 tasks"


def test_shared_training_has_a_note_and_no_mark() -> None:
    records = three()
    for task in records[2]["tasks"]:
        task["training_shared"] = True
    records[2]["timings"]["learn_s"] = [0.1] * 9
    assert best(records, "training s") == [True, True, False]
    assert "9 of 9 adapters were trained by another run" in results_table(records).rows[2].note
    assert results_table(records).rows[0].note == ""
    assert "0.9 (9 of 9 adapters were trained by another run; their training time" in str(provenance(records))


def test_one_task_has_no_forgetting() -> None:
    assert None in [value.mean for value in results_table([one()]).values.values()]


def test_markdown() -> None:
    lines = markdown(results_table([record(note="a | b\nc"), record("simplecil", share=0.5)])).splitlines()
    assert lines[2].startswith("| method | A_T % |")
    assert f"**{record()['metrics']['A_T']:.2f}**" in lines[4]
    assert lines[6:] == ["", "one-a: a \\| b c."]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines[2:6]} == {len(headline_metrics()) + 2}


def test_labels_of_equal_methods_are_unique() -> None:
    made = [record(), record(seed=2), record(seed=2), record("x", title="Running mean")]
    assert labels(made) == ["one-a (seed 1)", "one-a (seed 2)", "one-a (seed 2) #2", "Running mean"]


# ---- the page -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "records", [three(), [one()], [forty(), forty(done=7)], [record(done=1)]], ids=["nine", "one", "forty", "partial"]
)
def test_page_is_self_contained(records: list[Record]) -> None:
    read = Reader(run_page(records, "A page"))
    assert read.having("html") == [{"lang": "en"}]
    assert not read.having("script")
    assert not read.having("link")
    assert all(str(image["src"]).startswith("data:image/") for image in read.having("img"))
    assert all(str(source["srcset"]).startswith("data:image/") for source in read.having("source"))
    assert not read.having("a"), "no record has a link to a paper"
    assert "A page" in read.text
    for made in records:
        assert f"{made['metrics']['A_T']:.2f}" in read.text


def test_tables_and_figures_are_accessible() -> None:
    records = three()
    read = Reader(run_page(records, "A page"))
    assert len(read.having("table")) == len(read.having("caption")) >= 4
    assert all(head.get("scope") in ("col", "row", "rowgroup") for head in read.having("th"))
    curves, matrix = (str(image["alt"]) for image in read.having("img"))
    for made in records:
        assert ", ".join(f"{value:.1f}" for value in made["metrics"]["A"]) in curves
    assert f"music {records[0]['metrics']['matrix'][-1][-1]:.1f}" in matrix


def test_only_papers_are_linked() -> None:
    made = [record(paper="https://arxiv.org/abs/1"), record("bad", paper="javascript:alert(1)")]
    assert [link["href"] for link in Reader(run_page(made, "A page")).having("a")] == ["https://arxiv.org/abs/1"]


def test_everything_is_escaped() -> None:
    evil = '<script>alert("x")</script>'
    made = record(method=evil, sizes=(2, 3), names=(evil, "b"), note=evil, paper=f'https://x/"{evil}')
    made["data"]["classes"][0] = evil
    made["data"]["name"] = evil
    made["config"][evil] = evil
    made["options"][evil] = {evil: evil}
    made["environment"]["processor"] = evil
    made["tasks"][1]["merge"] = {"base": evil, "align_share": 0.5, "gate_min": 0.1, "gate_max": 0.9}
    text = run_page([made, record("plain", sizes=(2, 3), names=(evil, "b"))], evil)
    read = Reader(text)
    assert not read.having("script")
    assert "<script" not in text
    assert read.text.count(evil) > 8


def test_merges_of_a_record_are_shown() -> None:
    made = record()
    for index, task in enumerate(made["tasks"]):
        base = "new" if index == 1 else "accumulated"
        task["merge"] = {"base": base, "align_share": 0.267, "gate_min": 0.123, "gate_max": 0.646} if index else {}
    text = Reader(run_page([made], "A page")).text
    assert "Merges of one-a" in text
    assert "adopted" in text
    assert "the new adapter" in text
    assert "0.123 – 0.646" in text
    assert "Merges of" not in Reader(run_page(three(), "A page")).text


def test_provenance_is_shown() -> None:
    text = Reader(run_page(three(), "A page")).text
    for expected in ("toy", "ffffffffffff", "tiny", "abababababab", "chip", "fp32", "2026-01-01", "600 for training"):
        assert expected in text
    assert "f" * 13 not in text


def test_the_same_records_give_the_same_page() -> None:
    assert run_page([one()], "A page") == run_page([one()], "A page")


def test_a_fresh_demo_deletes_its_own_runs_and_nothing_else(tmp_path: Path) -> None:
    ours, foreign, stray = tmp_path / "one-a", tmp_path / "simplecil", tmp_path / "running-mean"
    for folder, method in ((ours, "one-a"), (foreign, "ties")):
        folder.mkdir()
        write_record(folder, record(method))
        (folder / "state-009.safetensors").write_bytes(b"")
        (folder / "thesis.txt").write_text("keep me")
    stray.mkdir()
    (stray / "state-001.safetensors").write_bytes(b"")
    before = sorted(tmp_path.rglob("*"))
    _prepare_folder(tmp_path, fresh=False)
    assert sorted(tmp_path.rglob("*")) == before
    _prepare_folder(tmp_path, fresh=True)
    gone = {ours / "record.json", ours / "state-009.safetensors"}
    assert sorted(tmp_path.rglob("*")) == sorted({*before, ours / "lock"} - gone)  # a lock stays, see onea.locks


def test_file_at_the_path_of_the_demo_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(OneaError, match="--out"):
        _prepare_folder(tmp_path / "taken", fresh=False)


def test_importing_reports_and_the_demo_loads_nothing_heavy() -> None:
    code = (
        "import sys, onea.research.cli.demo, onea.research.report.run_page; "
        "print([m for m in ('numpy', 'matplotlib', 'torch', 'rich.live') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
