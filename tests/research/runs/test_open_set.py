# SPDX-License-Identifier: Apache-2.0
"""Runs with --open-set: future classes are the unseen ones, and the rest of the record does not change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.methods import prepared
from support.records import comparable_fields, record
from support.tiny import Stopped

from onea.research.cli.run import print_summary
from onea.research.record import is_reportable, is_resumable
from onea.research.record_metrics import headline_metrics, metric
from onea.research.report.aggregate import grid_table, results_table, settings
from onea.research.report.compare import compare
from onea.research.report.experiment_page import with_titles
from onea.research.report.records import split_by_classifier
from onea.research.report.run_page import run_page
from onea.research.runs.config import RunConfig, make_config
from onea.research.runs.evaluation import open_set_auroc, predict_tasks
from onea.research.runs.runner import run

AREAS = [80.0, 75.0, 70.0, 65.0, 60.0, 55.0, 52.0, 51.0, None]
MEAN = 63.5


def expected(scores: torch.Tensor, labels: torch.Tensor, seen: int) -> float:
    """The share of pairs in which the image of a class seen has the larger score, in percent."""
    largest = scores.max(1).values.tolist()
    known = [value for value, label in zip(largest, labels.tolist(), strict=True) if label < seen]
    unknown = [value for value, label in zip(largest, labels.tolist(), strict=True) if label >= seen]
    assert min(abs(a - b) for a in known for b in unknown) > 1e-5, (
        "otherwise rounding in batches of other sizes could decide"
    )
    larger = sum((a > b) + 0.5 * (a == b) for a in known for b in unknown)
    return 100 * larger / (len(known) * len(unknown))


@pytest.mark.parametrize("method", ["one-a", "simplecil", "ease", "l2p", "sequential"])
def test_auroc_uses_the_largest_score(method, tiny_run):
    ready = prepared(tiny_run, method)
    images, labels = ready.test.images.test_views(ready.test.rows), ready.test.labels[ready.test.rows]
    for index, seen in enumerate((3, 4)):
        ready.method.learn(ready.task(index))
        results = [
            predict_tasks(ready.method, ready.test, ranges, ready.seed)
            for ranges in (ready.class_ranges(index), ready.later_class_ranges(index))
        ]
        assert sorted(results[0].labels.tolist()) == sorted(labels[labels < seen].tolist())
        assert sorted(results[1].labels.tolist()) == sorted(labels[labels >= seen].tolist())
        assert open_set_auroc(*results) == pytest.approx(expected(ready.method.scores(images), labels, seen))
    assert not ready.later_class_ranges(2)
    assert open_set_auroc(results[0], None) is None


def test_open_set_adds_only_the_auroc_to_a_record(tiny_run, tmp_path):
    tiny_run["options"] |= {"compare_classifiers": "slda"}
    plain = run(make_config(tiny_run), tmp_path / "plain")
    open_set_record = run(make_config(tiny_run | {"open_set": True}), tmp_path / "open_set_record")
    assert "open_set" not in plain
    *areas, last = open_set_record["open_set"]
    assert len(areas) == 2
    assert all(0 <= area <= 100 for area in areas)
    assert last is None, "there are no future classes"
    open_set_fields = {"config": plain["config"] | {"open_set": True}, "open_set": open_set_record["open_set"]}
    assert comparable_fields(open_set_record) == comparable_fields(plain) | open_set_fields
    assert is_resumable(open_set_record)
    assert metric("open_set").value(open_set_record) == pytest.approx(sum(areas) / 2)
    further = split_by_classifier(open_set_record)[1]
    assert metric("open_set").value(further) is None, "it is measured for the first classifier only"


def test_an_interrupted_run_has_the_same_record(tiny_run, tmp_path):
    config = make_config(tiny_run | {"open_set": True})
    whole = run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "parts", Stopped())
    resumed = run(config, tmp_path / "parts")
    assert resumed["dates"]["resumed"]
    assert comparable_fields(resumed) == comparable_fields(whole)


def test_a_single_task_has_no_unseen_classes(tiny_run, tmp_path):
    results = run(
        make_config(tiny_run | {"method": "simplecil", "options": {}, "sizes": "6", "open_set": True}), tmp_path
    )
    assert results["open_set"] == [None]
    assert metric("open_set").value(results) is None
    assert is_resumable(results)


def test_open_set_is_part_of_the_key_only_if_it_is_on():
    assert RunConfig(open_set=False).identity() == RunConfig().identity()
    assert RunConfig(open_set=True).identity() == RunConfig().identity() | {"open_set": True}


def test_tables_show_the_metric_of_records_that_have_it():
    plain, open_set_record = record("simplecil"), record(open_set=AREAS)
    assert metric("open_set").value(open_set_record) == MEAN
    column_names = {
        name: [column.name for column in results_table(records).columns]
        for name, records in {"plain": [plain], "both": [open_set_record, plain]}.items()
    }
    assert "open-set AUROC %" not in column_names["plain"]
    assert set(column_names["both"]) - set(column_names["plain"]) == {"open-set AUROC %"}
    assert [m.title for m in headline_metrics([open_set_record]).values()].count("open-set AUROC") == 1
    for records, shown in (([plain], False), ([open_set_record, plain], True)):
        (setting,) = settings(with_titles(records))
        assert ("open-set AUROC %" in [column.name for column in grid_table(setting).columns]) is shown
        assert ("open-set AUROC" in run_page(records, "A page")) is shown
    assert f"{MEAN:.2f}" in run_page([open_set_record], "A page")
    row = next(
        row for row in compare([open_set_record], [record(open_set=[90.0] * 8 + [None])]).rows if "open-set" in row.name
    )
    assert row.mean == 90 - MEAN
    assert not [row for row in compare([open_set_record], [record()]).rows if "open-set" in row.name]


def test_the_summary_shows_every_step(capsys):
    print_summary(record(open_set=AREAS), Path("somewhere"))
    output = capsys.readouterr().out
    assert "open-set" in output
    assert all(f"{area:.2f}" in output for area in AREAS[:-1])
    print_summary(record(), Path("somewhere"))
    assert "open-set" not in capsys.readouterr().out


@pytest.mark.parametrize("invalid", [[80.0], [101.0] * 9, [-1.0] * 9, ["80"] * 9, 80.0, {"1": 80.0}, [True] * 9])
def test_impossible_aurocs_are_refused(invalid):
    assert is_reportable(record(open_set=AREAS))
    assert is_reportable(record(open_set=[]))
    assert is_reportable(record(open_set=None))
    assert not is_reportable(record(open_set=invalid))
