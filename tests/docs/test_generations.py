# SPDX-License-Identifier: Apache-2.0
"""Runs of the present preset take the place of earlier ones, all at once, and a page says where both are shown."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "tools/docs"))
import evidence
import expected
import findings
import remarks
import reproduction
import result_tables
import written

from onea.research.record import Record
from onea.research.runs.config import make_config
from onea.research.runs.setup import options_of, shape_of_record


@dataclasses.dataclass(frozen=True)
class Earlier:
    """Runs of an earlier preset, of one method on one dataset."""

    method: str
    data: str
    records: tuple[Record, ...]


@pytest.fixture(scope="module")
def old() -> Earlier:
    """Of whichever method has such runs among the committed records: new ones replace them, method by method."""
    before: dict[tuple[str, str], list[Record]] = {}
    for record in evidence.records("methods/runs"):
        if not evidence.is_current(record):
            before.setdefault((record["config"]["method"], record["data"]["name"]), []).append(record)
    if not before:
        pytest.skip("among the committed records, no run of an earlier preset is left of any method")
    (method, data), records = min(before.items(), key=lambda item: item[0])
    return Earlier(method, data, tuple(records))


def of_today(record: Record, seed: int, **changed: Any) -> Record:
    """The same run as the command of today would make it."""
    config = record["config"] | {"backbone": evidence.NETWORK, "seed": seed}
    values = {key: value for key, value in config.items() if key != "store"}
    options = dataclasses.asdict(options_of(make_config(values), shape_of_record(record)))
    return record | {"config": config, "options": options | changed}


def test_five_seeds_of_today_replace_all_earlier_ones_and_four_none(old: Earlier) -> None:
    before = [*old.records]
    new = [of_today(before[0], seed) for seed in (1, 2, 3, 4)]
    for among in (new + before, before + new):
        assert evidence.select(among, old.method, old.data, seeds=evidence.SEEDS).earlier
    whole = [*new, of_today(before[0], 5)]
    for among in (whole + before, before + whole):
        chosen = evidence.select(among, old.method, old.data, seeds=evidence.SEEDS)
        assert not chosen.earlier
        assert list(chosen.seeds) == [1, 2, 3, 4, 5]


def test_elsewhere_they_must_have_the_seeds_of_those_they_replace(old: Earlier) -> None:
    one = old.records[0]
    two = [one | {"config": one["config"] | {"seed": seed}} for seed in (1, 2)]
    assert evidence.select([*two, of_today(one, 1)], old.method, old.data).earlier
    assert not evidence.select([*two, of_today(one, 1), of_today(one, 2)], old.method, old.data).earlier


def test_runs_are_of_today_only_with_the_options_of_today(old: Earlier) -> None:
    today = of_today(old.records[0], 1)
    assert evidence.is_current(today)
    name = next(name for name, value in today["options"].items() if type(value) in (int, float))
    changed = of_today(old.records[0], 1, **{name: 2 * today["options"][name] + 1})
    assert not evidence.is_current(changed), "a preset that has changed since"


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
    for name in ("table3", "table5", "figure5", "figure6a", "figure6b", "figure7"):
        counts = {claim.count for claim in findings.claims() if claim.source == name}
        assert {own[name].seeds} == set(map(str, counts)), name
    for claim in findings.claims():
        if own[claim.source].done:
            there, here = (
                str(text).replace("\xa0", " ").split(" to ") for text in (own[claim.source].seeds, claim.count)
            )
            assert int(there[0]) <= int(here[0]) <= int(here[-1]) <= int(there[-1]), claim


@pytest.mark.usefixtures("_no_caches")
def test_a_table_of_both_says_which_are_which(old: Earlier, monkeypatch: pytest.MonkeyPatch) -> None:
    title = evidence.main_runs(old.data)[old.method].title
    row = f"| **{title}**" if old.method in evidence.HIGHLIGHTED else f"| {title}"
    assert f"\n{row} † | " in result_tables.methods(old.data)
    evidence.main_runs.cache_clear()
    add_runs({"methods/runs": [of_today(old.records[0], seed) for seed in evidence.SEEDS]}, monkeypatch)
    lines = {line.split(" | ")[0]: line for line in result_tables.methods(old.data).splitlines()}
    assert row in lines
    earlier = [name for name in lines if name.endswith("†")]
    assert ("| **One-A** †" in earlier) == evidence.main_runs(old.data)["one-a"].earlier
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
