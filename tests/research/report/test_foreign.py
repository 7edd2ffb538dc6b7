# SPDX-License-Identifier: Apache-2.0
"""Results of others in reports: in the right table, aggregated like ours, and never ranked."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from support.records import Reader, record

from onea.errors import OneaError
from onea.research.report.aggregate import settings
from onea.research.report.experiment_page import write_report
from onea.research.report.foreign import not_shown, read_results

NINE_TASKS = "9 tasks of 1 to 11 classes"
HEAD = "method,dataset,stream,seed,A_T,A_mean\n"


@pytest.fixture
def results(tmp_path: Path) -> Any:
    def read(text: str, head: str = HEAD) -> Any:
        (tmp_path / "foreign.csv").write_text(head + text, "utf-8")
        return read_results(tmp_path / "foreign.csv")

    return read


def test_rows_are_aggregated_over_seeds_and_not_ranked(results, tmp_path):
    foreign = results(f"Theirs,toy,{NINE_TASKS},1,97,98\nTheirs,toy,{NINE_TASKS},2,99,\n")
    records = [record(seed=seed) for seed in (1, 2)] + [record("simplecil", share=0.5, seed=seed) for seed in (1, 2)]
    write_report(records, tmp_path, "Report", foreign)
    lines = list(csv.DictReader((tmp_path / "table.csv").open()))
    theirs = {line["column"]: line for line in lines if line["row"] == "Theirs (reported)"}
    assert [theirs["A_T %"][name] for name in ("mean", "std", "seeds")] == ["98.0", "1.4142135623730951", "2"]
    assert [theirs["mean A %"][name] for name in ("mean", "std", "seeds")] == ["98.0", "", "1"]
    assert theirs["F"]["mean"] == ""
    table = (tmp_path / "table.md").read_text("utf-8")
    (line,) = [line for line in table.splitlines() if "Theirs" in line]
    assert line.startswith("| Theirs (reported) | 98.00 ± 1.41 | 98.00 | – |"), "no mark for the best, no gap"
    assert "not measured here" in table
    assert "**" in next(line for line in table.splitlines() if "one-a" in line)
    page = Reader((tmp_path / "report.html").read_text("utf-8")).text
    assert page.count("Theirs (reported)") == 1
    assert page.count("not measured here") == 1
    assert "4 runs with 2 seeds" in page


def test_rows_are_only_in_the_table_of_their_dataset_and_stream(results, tmp_path):
    other = record(sizes=(3, 2), names=())
    foreign = results(f"Theirs,toy,2 tasks of 2 to 3 classes,1,50,\nTheirs,cub200,{NINE_TASKS},1,60,\n")
    write_report([record(), other], tmp_path, "Report", foreign)
    nine, two = (tmp_path / "table.md").read_text("utf-8").split("**toy: 2 tasks")
    assert "Theirs" not in nine
    assert two.count("Theirs") == 1
    (sentence,) = not_shown(foreign, settings([record(), other]))
    assert f"'cub200' with the stream '{NINE_TASKS}' are not shown, because no table has these" in sentence
    assert f"(toy: {NINE_TASKS}; toy: 2 tasks of 2 to 3 classes)" in sentence


def test_a_name_of_two_streams_is_not_shown_but_one_of_two_networks_is(results, tmp_path):
    foreign = results("Theirs,toy,2 tasks of 1 to 4 classes,1,50,\n")
    sizes = {"sizes": (4, 1), "names": ()}
    twice = [record(**sizes), record(**sizes, backbone={"name": "other", "sha256": "cd" * 32, "input": 84})]
    write_report(twice, tmp_path, "Report", foreign)
    assert (tmp_path / "table.md").read_text("utf-8").count("Theirs") == 2
    assert not not_shown(foreign, settings(twice))
    changed = record(**sizes, data=record(**sizes)["data"] | {"fingerprint": "0" * 64})
    write_report([twice[0], changed], tmp_path, "Report", foreign)
    assert "Theirs" not in (tmp_path / "table.md").read_text("utf-8")
    assert "different streams have that name" in not_shown(foreign, settings([twice[0], changed]))[0]


def test_a_report_without_results_has_no_note(tmp_path):
    write_report([record()], tmp_path, "Report")
    assert "reported" not in (tmp_path / "table.md").read_text("utf-8")


def test_the_command_lists_what_is_not_shown(onea, tmp_path):
    from onea.research.record import write_record

    (tmp_path / "runs").mkdir()
    write_record(tmp_path / "runs", json.loads(json.dumps(record())))
    Path("foreign.csv").write_text(HEAD + f"Theirs,toy,{NINE_TASKS},1,50,\nTheirs,toy,3 tasks,1,50,\n")
    code, out, err = onea("report", "runs", "--results", "foreign.csv", "--out", "report")
    assert code == 0
    assert len(out.splitlines()) == 5
    assert (len(err.splitlines()), "'3 tasks' are not shown" in err) == (1, True)
    assert "Theirs (reported)" in Path("report/table.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("text", "head", "message"),
    [
        ("a,b,c,1,50,60,x\n", HEAD.strip() + ",F\n", "unknown column 'F'"),
        ("a,b,c,1\n", "method,dataset,stream,seed\n", "no column 'A_T'"),
        ("a,b,c,1,5,5\n", "method,dataset,stream,seed,A_T,A_T\n", "two columns of the same name"),
        ("", "", "no column 'method'"),
        ("a,b,c,1,high,\n", HEAD, "Line 2 of .* has A_T 'high'; write a number of percent"),
        ("a,b,c,1,101,\n", HEAD, "A_T '101'"),
        ("a,b,c,1,nan,\n", HEAD, "A_T 'nan'"),
        ("a,b,c,1,50,-1\n", HEAD, "A_mean '-1'"),
        ("a,b,c,1,,\n", HEAD, "Line 2 of .* has no A_T"),
        ("a,b,c,1.5,50,\n", HEAD, "the seed '1.5'"),
        ("a,b,c,99999999999,50,\n", HEAD, "the seed '99999999999'"),
        (",b,c,1,50,\n", HEAD, "has no method"),
        ("a,b,1, 2 classes,1,50,\n", HEAD, "more values than columns"),
        ("a,b,c,1,50,\n\na,b,c,1,60,\n", HEAD, "Line 4 of .* repeats"),
    ],
)
def test_a_wrong_row_gets_one_sentence(text, head, message, results):
    with pytest.raises(OneaError, match=message):
        results(text, head)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "table.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OneaError, match="not a CSV file"):
        read_results(tmp_path / "table.csv")
    with pytest.raises(OneaError, match="cannot be read"):
        read_results(tmp_path / "missing.csv")


def test_quotes_and_a_byte_order_mark_are_accepted(results):
    (result,) = results('"A, b",toy, "3 tasks of 3, 1, 2 classes",1,50.5,60\n', "\ufeff" + HEAD)
    assert (result.method, result.stream) == ("A, b", "3 tasks of 3, 1, 2 classes")
    assert result.metrics == {"A_T": 50.5, "mean_A": 60.0}
