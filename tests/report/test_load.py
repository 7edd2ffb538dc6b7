# SPDX-License-Identifier: Apache-2.0
"""Records of runs that scored several classifiers: each becomes a row, and impossible counts are refused."""

from __future__ import annotations

import copy

import pytest
from record_tools import record

from onea.record_shape import can_be_shown
from onea.report.experiment_page import with_titles
from onea.report.load import by_classifier


@pytest.fixture
def compared():
    found = record("one-a", share=0.5)
    return found | {"classifiers": {"slda": record("one-a", share=0.9, seed=2)["correct"]}}


def test_every_classifier_becomes_a_record_of_its_own(compared):
    first, second = with_titles(by_classifier(compared))
    assert (first["title"], second["title"]) == ("One-A", "One-A, slda")
    assert second["metrics"]["A_T"] > first["metrics"]["A_T"]
    assert second["correct"] == compared["classifiers"]["slda"]
    assert can_be_shown(first)
    assert can_be_shown(second)


@pytest.mark.parametrize(
    "spoil",
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
def test_impossible_counts_are_refused(compared, spoil):
    assert can_be_shown(compared)
    spoil(compared["classifiers"])
    assert not can_be_shown(compared)


@pytest.mark.parametrize("options", [None, {}, {"classifier": "rgda"}])
def test_records_without_options_are_shown(compared, options):
    found = copy.deepcopy(compared)
    found["config"]["options"] = found["options"] = options
    assert can_be_shown(found)
    assert len(with_titles(by_classifier(found))) == 2


def test_options_that_are_none_are_refused(compared):
    compared["config"]["options"] = []
    assert not can_be_shown(compared)
