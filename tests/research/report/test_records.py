# SPDX-License-Identifier: Apache-2.0
"""Records of runs with several classifiers: each becomes a row, and impossible counts are errors."""

from __future__ import annotations

import copy

import pytest
from support.records import record

from onea.errors import OneaError
from onea.research.record import is_reportable, write_record
from onea.research.report.aggregate import best_first, setting_names, settings
from onea.research.report.experiment_page import with_titles
from onea.research.report.records import load_records, split_by_classifier, with_default_options


@pytest.fixture
def compared():
    found = record("one-a", share=0.5)
    return found | {"classifiers": {"slda": record("one-a", share=0.9, seed=2)["correct"]}}


def test_every_classifier_becomes_a_separate_record(compared):
    first, second = with_titles(split_by_classifier(compared))
    assert (first["title"], second["title"]) == ("One-A", "One-A, slda")
    assert second["metrics"]["A_T"] > first["metrics"]["A_T"]
    assert second["correct"] == compared["classifiers"]["slda"]
    assert is_reportable(first)
    assert is_reportable(second)


@pytest.mark.parametrize(
    "damage",
    [
        lambda counts: counts["slda"].pop(),
        lambda counts: counts["slda"][0].pop(),
        lambda counts: counts["slda"][0].__setitem__(0, 11),
        lambda counts: counts["slda"][0].__setitem__(0, -1),
        lambda counts: counts["slda"][0].__setitem__(0, "many"),
        lambda counts: counts.__setitem__("slda", None),
        lambda counts: counts.__setitem__("slda", {}),
    ],
)
def test_impossible_counts_make_a_record_invalid(compared, damage):
    assert is_reportable(compared)
    damage(compared["classifiers"])
    assert not is_reportable(compared)


@pytest.mark.parametrize("options", [None, {}, {"classifier": "rgda"}])
def test_records_without_options_are_shown(compared, options):
    found = copy.deepcopy(compared)
    found["config"]["options"] = found["options"] = options
    assert is_reportable(found)
    assert len(with_titles(split_by_classifier(found))) == 2


def test_options_of_another_type_make_a_record_invalid(compared):
    compared["config"]["options"] = []
    assert not is_reportable(compared)


def test_options_of_methods_that_are_not_installed_are_unchanged():
    (found,) = with_default_options([record("somebody-elses") | {"options": {"own": 1}}])
    assert found["options"] == {"own": 1}


def test_rows_of_classifiers_contain_the_options_that_differ(compared):
    usual = compared | {"options": {"min_share": 0.25}}
    other = compared | {"options": {"min_share": 1.0}, "classifiers": {"ranpac": compared["correct"]}}
    records = with_titles(
        with_default_options([record for run in (usual, other) for record in split_by_classifier(run)])
    )
    assert {group.name for setting in settings(records) for group in setting.groups} == {
        "One-A (min_share 0.25)",
        "One-A (min_share 1)",
        "One-A, slda (min_share 0.25)",
        "One-A, ranpac (min_share 1)",
    }


def test_rows_are_in_order_of_their_mean_over_seeds():
    lucky = [record("simplecil", seed=1, share=0.9), record("simplecil", seed=2, share=0.3)]
    steady = [record("mos", seed=seed, share=0.8) for seed in (1, 2)]
    assert [made["config"]["method"] for made in best_first([*lucky, *steady])] == ["mos"] * 2 + ["simplecil"] * 2


def test_names_of_streams_with_given_sizes_contain_them():
    plain, given = record(sizes=(1, 2, 3), names=()), record(sizes=(1, 2, 3), names=())
    given["config"] |= {"sizes": "1,2,3", "order": "given"}
    assert "3 tasks of 1 to 3 classes" in setting_names([plain])[0]
    assert "3 tasks of 1, 2, 3 classes" in setting_names([given])[0]


def test_records_without_options_are_grouped():
    records = with_default_options([record("somebody-elses", seed=seed) | {"options": None} for seed in (1, 2)])
    ((group,),) = (setting.groups for setting in settings(records))
    assert len(group.records) == 2


def test_patterns_match_runs_rather_than_other_files(tmp_path):
    for seed in (1, 2):
        write_record(tmp_path / f"run-{seed}", record(seed=seed))
        (tmp_path / f"run-{seed}" / "failure.json").write_text("{}")
    (tmp_path / "report.html").write_text("a report of both")
    for pattern in ("*", "r*", "run-*/*"):
        assert [made["config"]["seed"] for made in load_records(tmp_path / pattern)] == [1, 2]
    (tmp_path / "run-1" / "record.json").rename(tmp_path / "first.json")
    assert [made["config"]["seed"] for made in load_records(tmp_path / "first.*")] == [1]
    with pytest.raises(OneaError, match="damaged"):
        load_records(tmp_path / "report.*")
