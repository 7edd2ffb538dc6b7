# SPDX-License-Identifier: Apache-2.0
"""Runs of the present preset take the place of earlier ones, all at once, and a page says where both are shown."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from documented import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import evidence
import expected
import findings
import remarks
import reproduction
import result_tables
import written

from onea.methods import method_class
from onea.record import Record
from onea.runs.config import make_config
from onea.runs.options import options_of, shape_in

METHOD, DATA = "acmap", "cub200"


@pytest.fixture
def old() -> list[Record]:
    found = [record for record in evidence.records("methods/runs") if record["config"]["method"] == METHOD]
    before = [record for record in found if record["data"]["name"] == DATA and not evidence.is_current(record)]
    return before or pytest.skip("no run of an earlier preset is left")


def of_today(record: Record, seed: int, **changed: Any) -> Record:
    """The same run as the command of today would make it."""
    config = record["config"] | {"backbone": evidence.NETWORK, "seed": seed}
    values = {key: value for key, value in config.items() if key != "store"}
    options = dataclasses.asdict(options_of(make_config(values), shape_in(record)))
    return record | {"config": config, "options": options | changed}


def test_five_seeds_of_today_replace_all_earlier_ones_and_four_none(old: list[Record]) -> None:
    new = [of_today(old[0], seed) for seed in (1, 2, 3, 4)]
    for among in (new + old, old + new):
        assert evidence.select(among, METHOD, DATA, seeds=evidence.SEEDS).earlier
    whole = [*new, of_today(old[0], 5)]
    for among in (whole + old, old + whole):
        chosen = evidence.select(among, METHOD, DATA, seeds=evidence.SEEDS)
        assert not chosen.earlier
        assert list(chosen.seeds) == [1, 2, 3, 4, 5]


def test_elsewhere_they_must_have_the_seeds_of_those_they_replace(old: list[Record]) -> None:
    two = [old[0] | {"config": old[0]["config"] | {"seed": seed}} for seed in (1, 2)]
    assert evidence.select([*two, of_today(old[0], 1)], METHOD, DATA).earlier
    assert not evidence.select([*two, of_today(old[0], 1), of_today(old[0], 2)], METHOD, DATA).earlier


def test_runs_are_of_today_only_with_the_options_of_today(old: list[Record]) -> None:
    assert evidence.is_current(of_today(old[0], 1))
    rate = method_class(METHOD).base_rate
    assert rate
    assert not evidence.is_current(of_today(old[0], 1, learning_rate=2 * rate)), "a preset that has changed since"


@pytest.fixture
def _no_caches() -> Iterator[None]:
    cached = (evidence.main_runs, remarks._earlier_rows, findings.claims, reproduction.statuses)
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


def add_runs(new: Mapping[str, Sequence[Record]], monkeypatch: pytest.MonkeyPatch) -> None:
    """More records below docs/results, by folder."""
    real = evidence.records
    monkeypatch.setattr(evidence, "records", lambda folder: (*real(folder), *new.get(folder, ())))


def test_a_table_of_the_paper_counts_the_seeds_that_its_claims_have() -> None:
    """And not those of another preset beside them."""
    own = {each.experiment.name: each for each in reproduction.statuses()}
    for name in ("table3", "table5", "figure5", "figure6a", "figure6b"):
        counts = {claim.count for claim in findings.claims() if claim.source == name}
        assert {own[name].seeds} == set(map(str, counts)), name
    for claim in findings.claims():
        if own[claim.source].done:
            there, here = (
                str(text).replace("\xa0", " ").split(" to ") for text in (own[claim.source].seeds, claim.count)
            )
            assert int(there[0]) <= int(here[0]) <= int(here[-1]) <= int(there[-1]), claim


@pytest.mark.usefixtures("_no_caches")
def test_a_table_of_both_says_which_are_which(old: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    add_runs({"methods/runs": [of_today(old[0], seed) for seed in evidence.SEEDS]}, monkeypatch)
    lines = {line.split(" | ")[0]: line for line in result_tables.methods(DATA).splitlines()}
    assert "| ACMap" in lines
    earlier = [name for name in lines if name.endswith("†")]
    assert ("| **One-A** †" in earlier) == evidence.main_runs(DATA)["one-a"].earlier
    assert f"{remarks._earlier_rows()[0]} of the" in remarks.presets() or not earlier
    assert ("One-A †" in result_tables.rivals()) == ("| One-A †" in written.methods().replace("**", ""))


@pytest.mark.usefixtures("_no_caches")
def test_the_whole_grid_of_today_takes_over_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """README, pages and charts, on the day when its last record comes: no gap, no earlier run, no word of them."""
    new: dict[str, list[Record]] = {}
    for folder in ("methods/runs", "one-a-plus/runs"):
        for record in evidence.records(folder):
            if record["config"]["seed"] == 1 and not evidence.is_current(record):
                fresh = of_today(record, 1)
                moved = fresh["metrics"] | {"A_T": fresh["metrics"]["A_T"] / 2}
                same = (fresh | {"config": fresh["config"] | {"seed": seed}} for seed in evidence.SEEDS)
                new.setdefault(folder, []).extend(each | {"metrics": moved} for each in same)
    before = written.methods()
    add_runs(new, monkeypatch)
    evidence.main_runs.cache_clear()
    remarks._earlier_rows.cache_clear()
    found = {data: evidence.main_runs(data) for data in evidence.DATA}
    assert all(len(runs.records) == 5 and not runs.earlier for each in found.values() for runs in each.values())
    assert remarks.presets() == remarks.single_seeds() == ""
    readme = written.renewed((ROOT / "README.md").read_text("utf-8"))
    assert written.methods() in readme != before
    assert "†" not in readme
    assert "one seed" not in written.plus_and_one_a()
    for name, make in {**expected.GENERATED, **result_tables.GENERATED, **written.WRITTEN}.items():
        if not name.startswith("trials-"):
            assert "nan" not in make()
