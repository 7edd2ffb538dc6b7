# SPDX-License-Identifier: Apache-2.0
"""Runs that differ only in the merge (benchmarks/merging/merge_variants.py)."""

from __future__ import annotations

import csv
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.pages import script

MERGES = ("mean", "aligned", "gated", "even", "old-gated")


@pytest.fixture(scope="module")
def runs() -> ModuleType:
    return script("merge_variants", "benchmarks/merging")


def test_a_setting_is_run_with_every_merge_on_the_same_adapters(runs, tiny_run: dict[str, Any], tmp_path: Path) -> None:
    given = {key: value for key, value in tiny_run.items() if key != "method"} | {"sizes": "2,1,3"}
    file = runs.run_setting("large task late", 1, given, tmp_path / "found", tmp_path / "runs")
    text = file.read_text()
    found = {line["merge"]: line for line in csv.DictReader(text.splitlines())}
    assert list(found) == list(MERGES)
    assert {line["merges_new"] for line in found.values()} == {"1"}, (
        "the second merge has three classes on each side, and the new side wins a tie"
    )
    for line in found.values():
        assert float(line["fall_new"]) + float(line["fall_old"]) <= float(line["F"]) + 1e-3
        assert 0 < float(line["inside"]) <= 1
        assert len(",".join(line.values())) < 400
    assert float(found["gated"]["opening_up"]) < float(found["old-gated"]["opening_up"]) < 1
    assert found["aligned"]["opening_up"] == "1.0"
    before = file.stat().st_mtime_ns
    assert (
        runs.run_setting("large task late", 1, given, tmp_path / "found", tmp_path / "runs").stat().st_mtime_ns
        == before
    )
    assert runs.gather(tmp_path / "found", tmp_path / "all.csv") == len(MERGES)
    assert (tmp_path / "all.csv").read_text() == text


def test_every_listed_run_is_valid_and_has_a_large_first_task(runs) -> None:
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
