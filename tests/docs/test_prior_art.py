# SPDX-License-Identifier: Apache-2.0
"""Maps and classifiers on the same adapters (benchmarks/merging/prior_art.py)."""

from __future__ import annotations

import csv
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.methods import prepared
from support.pages import script

from onea.research.runs.evaluation import predict_tasks


@pytest.fixture(scope="module")
def ablation() -> ModuleType:
    return script("prior_art", "benchmarks/merging")


@pytest.fixture
def config(tiny_run: dict[str, Any]) -> dict[str, Any]:
    tiny_run["options"] |= {"min_share": 0.0, "learning_rate": 0.3}
    options = {key: value for key, value in tiny_run.items() if key not in ("method", "options")} | tiny_run["options"]
    return options | {"sizes": "3,1,2"}


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


def test_every_map_is_scored_with_every_classifier_on_one_training(ablation, config, tmp_path, monkeypatch) -> None:
    runs, learn = [], ablation.ablate
    monkeypatch.setattr(ablation, "ablate", lambda *given: runs.append(given) or learn(*given))
    file, key = (
        tmp_path / "found.csv",
        {"data": "tiny", "backbone": "tiny", "image_size": 28, "tasks": 3, "options": ""},
    )
    assert ablation.table(file, key, ["merged"], [1], config, 40) == 30
    assert ablation.table(file, key, ["fresh", "merged"], [1], config, 40) == 60
    assert [given["start"] for given, _ in runs] == ["merged", "fresh"], "the first is not run again"
    text = file.read_text()
    assert ablation.table(file, key, ["fresh", "merged"], [1], config, 40) == 60
    assert (file.read_text(), len(runs)) == (text, 2)
    rows = rows_of(file)
    assert tuple(rows[0]) == ablation.COLUMNS
    assert {(row["map"], row["classifier"]) for row in rows} == {
        (name, kind) for name in ablation.MAPS for kind in ablation.CLASSIFIERS
    }
    assert {row["trained"] for row in rows} == {"2"}, "the task of one class is not trained"
    for row in rows:
        assert 0 <= float(row["A_T"]) <= 100
        assert row["many"] == "", "no task has ten classes"
        assert float(row["A_T"]) == pytest.approx((float(row["one"]) + 5 * float(row["few"])) / 6, abs=0.01)


@pytest.mark.parametrize("carry", ["none", "ridge", "sldc"])
@pytest.mark.parametrize("classifier", ["ncm", "slda", "rgda"])
def test_a_cell_equals_a_run_with_this_map_and_classifier(carry, classifier, ablation, config, tiny_run) -> None:
    found = {(row["map"], row["classifier"]): row["A_T"] for row in ablation.ablate(config | {"start": "fresh"}, 40)}
    options = tiny_run["options"] | {"carry": carry, "classifier": classifier, "guard": 0.0, "start": "fresh"}
    ready = prepared(tiny_run, "one-a-plus", options=options, sizes="3,1,2")
    for index in range(3):
        ready.method.learn(ready.task(index))
    accuracy = predict_tasks(ready.method, ready.test, ready.class_ranges(2), ready.seed).accuracy
    assert found[carry, classifier] == pytest.approx(accuracy, abs=1e-3)
