# SPDX-License-Identifier: Apache-2.0
"""The two surprises: runs that differ in the merge alone, and what the page makes of them."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import ROOT
from support.pages import script

sys.path.insert(0, str(ROOT / "tools/docs"))
import decisions
import remarks
import reproduction
import result_tables

MERGES = ("mean", "aligned", "gated", "even", "old-gated")


@pytest.fixture(scope="module")
def runs() -> ModuleType:
    return script("surprises", "benchmarks/merging")


def rows(setting: str, **by_merge: dict[str, float]) -> list[dict[str, str]]:
    """Five seeds of a setting: what each merge has of each column, with a deviation that pairs share."""
    found = []
    for seed in range(1, 6):
        for merge in MERGES:
            told = {"A_T": 50.0, "F": 10.0, "fall_new": 4.0, "fall_old": 6.0} | by_merge.get(
                merge.replace("-", "_"), {}
            )
            own = 0.1 * ((seed * len(merge)) % 3)  # what pairs do not share
            line = {"data": "cub200", "setting": setting, "seed": str(seed), "merge": merge, "merges_new": "1"}
            line |= {name: str(value + 3 * seed + own) for name, value in told.items()}
            found.append(line | {"inside": "0.3", "chance": "0.1667"})
    return found


def test_alignment_is_found_to_help_where_it_does_and_nowhere_else() -> None:
    nowhere = decisions.alignment(rows("rank 4"))
    assert "No setting found" in nowhere.words
    assert "Not run yet" not in nowhere.words
    assert [line[0] for line in nowhere.rows][-1] == "CUB-200, rank 4"
    helps = decisions.alignment(rows("rank 4") + rows("balanced", aligned={"A_T": 52.0}))
    assert "helps in 1 of 4 settings**: CUB-200, balanced (+2.0 points" in helps.words
    hurts = decisions.alignment(rows("rank 4", aligned={"A_T": 48.0}))
    assert "No setting found" in hurts.words
    assert "It costs 2.0 points in: CUB-200, rank 4." in hurts.words


def test_what_each_part_adds_is_told_by_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = {"shuffled": 2.0, "descending": 8.0, "one class first": 7.0, decisions.LATE: 6.0, "balanced": 1.0}
    made = [line for name, gain in gains.items() for line in rows(name, gated={"A_T": 50 + gain})]
    monkeypatch.setattr(decisions, "rows", lambda: made)
    told = remarks.in_short()
    assert "On CUB-200 gates add between 1.0 and 8.0 points: most where a large task meets many small ones" in told
    assert "(descending 8.0, one class first 7.0, large task late 6.0)" in told
    assert "Alignment helps in none of 7 settings on both datasets." in told
    made += rows("rank 4", gated={"A_T": 59.0}, aligned={"A_T": 48.0})
    told = remarks.in_short()
    assert "between 1.0 and 11.0 points." in told, "another setting gains most: nothing is said of large tasks"
    assert "in none of 8 settings on both datasets and costs 2.0 points in 1 of them." in told
    made.clear()
    assert "CUB-200" not in remarks.in_short()


def test_the_title_is_answered_first() -> None:
    less, more, harm = {"F": 7.0}, {"F": 13.0}, {"fall_new": 8.0}
    mostly = decisions.gates_forget(rows("descending", gated=less) + rows(decisions.LATE, gated=harm))
    assert mostly.startswith("**Mostly no.** On CUB-200 gates lower forgetting in 1 of 2 settings and raise it in")
    assert "hold back the old knowledge (+4.0 points" in mostly
    no = decisions.gates_forget(rows("descending", gated=less))
    assert no == "**No.** On CUB-200 gates lower forgetting in 1 of 1 settings and raise it in none."
    assert decisions.gates_forget(rows("descending", gated=more)).startswith("**Yes.**")
    both = rows("descending", gated=more) + rows("balanced", gated=less)
    assert decisions.gates_forget(both).startswith("**It depends.** On CUB-200 gates lower forgetting in 1 of 2")
    assert decisions.gates_forget(rows("descending")).startswith("**Undecided.**")


def test_gates_that_only_shorten_the_step_are_told_from_gates_whose_directions_matter() -> None:
    new_base = {"F": 13.0, "fall_new": 7.0}
    length = decisions.explained(rows(decisions.LATE, gated=new_base, even=new_base))
    assert "raise forgetting in merges onto the new task" in length
    assert "The length of the step explains it" in length
    direction = decisions.explained(rows(decisions.LATE, gated=new_base))
    assert "not only that the step is shorter: a step of the same length in which all" in direction
    assert "forgets 3.0 points less (" in direction
    old_base = decisions.explained(rows(decisions.LATE, gated={"F": 13.0, "fall_old": 9.0}))
    assert "raise forgetting in merges onto what was learned before" in old_base
    price = decisions.explained(rows(decisions.LATE, gated=new_base | {"A_T": 56.0}, old_gated={"A_T": 54.0}))
    assert "less accurate over all classes: A_T changes by +6.0" in price
    assert "less accurate" not in direction
    nothing = decisions.explained(rows(decisions.LATE))
    assert "in neither kind of merge is the change decided" in nothing
    assert "undecided" in nothing


def test_the_page_says_what_has_not_been_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert reproduction._alone("table8").startswith("One-A alone on CUB-200, n = ")
    assert reproduction._alone("table10") == ""
    monkeypatch.setattr(decisions, "FILE", tmp_path / "none.csv")
    decisions.rows.cache_clear()
    try:
        assert result_tables.GENERATED["surprise-gating"]().startswith("Not run yet")
        assert result_tables.GENERATED["surprise-gating-answer"]().startswith("Not run yet")
        shown = result_tables.GENERATED["surprise-alignment"]()
        assert "Not run yet: other streams" in shown
        assert reproduction._alone("table8") == ""
        assert "CIFAR-100, 10 tasks, shuffled" in shown, "what the committed records say is there"
        assert "CUB-200, " not in shown.partition("|")[2]
    finally:
        decisions.rows.cache_clear()


def test_one_seed_decides_nothing() -> None:
    single = [line for line in rows(decisions.LATE, gated={"F": 13.0}, aligned={"A_T": 60.0}) if line["seed"] == "1"]
    assert (
        "No setting found where alignment helps** (2 settings with more than one seed)"
        in decisions.alignment(single).words
    )
    assert "in neither kind" in decisions.explained(single)


def test_committed_runs_lose_more_to_gates_where_the_new_task_is_the_base() -> None:
    """The parts of the split add up to the whole but for tasks that were better at some time in between."""
    answer = decisions.gating_in_records()
    assert "raise forgetting in merges onto the new task" in answer.words
    assert [line[0] for line in answer.rows] == ["10 tasks", "20 tasks"]


def test_a_setting_is_run_with_every_merge_on_the_same_adapters(runs, tiny_run: dict[str, Any], tmp_path: Path) -> None:
    given = {key: value for key, value in tiny_run.items() if key != "method"} | {"sizes": "2,1,3"}
    file = runs.make("large task late", 1, given, tmp_path / "found", tmp_path / "runs")
    text = file.read_text()
    found = {line["merge"]: line for line in csv.DictReader(text.splitlines())}
    assert list(found) == list(MERGES)
    assert {line["merges_new"] for line in found.values()} == {"1"}, (
        "three classes meet three, and a tie is the new one"
    )
    for line in found.values():
        assert float(line["fall_new"]) + float(line["fall_old"]) <= float(line["F"]) + 1e-3
        assert 0 < float(line["inside"]) <= 1
        assert len(",".join(line.values())) < 400
    assert float(found["gated"]["opening_up"]) < float(found["old-gated"]["opening_up"]) < 1
    assert found["aligned"]["opening_up"] == "1.0"
    before = file.stat().st_mtime_ns
    assert runs.make("large task late", 1, given, tmp_path / "found", tmp_path / "runs").stat().st_mtime_ns == before
    assert runs.gather(tmp_path / "found", tmp_path / "all.csv") == len(MERGES)
    assert (tmp_path / "all.csv").read_text() == text


def test_every_listed_run_can_be_made_and_first_tasks_say_something(runs) -> None:
    from onea.research.runs.config import make_config
    from onea.research.streams import make_stream

    commands = runs.jobs("folder:cub200", "--out found")
    assert len(commands) == len(set(commands)) == sum(len(setting.seeds) for setting in runs.SETTINGS.values())
    for name, setting in runs.SETTINGS.items():
        for merge in setting.merges:
            make_config({"method": "one-a", **setting.options, **runs.MERGES[merge]})
        stream = {key: value for key, value in setting.options.items() if key in ("tasks", "order")}
        if "sizes" in setting.options:
            assert sum(map(int, setting.options["sizes"].split(","))) == 200, name
        elif setting.options.get("stream") != "balanced":
            firsts = [make_stream(classes=200, seed=seed, **stream).sizes[0] for seed in setting.seeds]
            assert min(firsts) >= 10, name
