# SPDX-License-Identifier: Apache-2.0
"""Aggregation over seeds, and the comparison of two configurations."""

from __future__ import annotations

import glob
import io
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
import typer
from rich.console import Console
from support.records import NINE, record
from typer.testing import CliRunner

from onea.errors import OneaError
from onea.presentation.tables import Table, fit_terminal
from onea.research.cli.report import compare as command
from onea.research.record import write_record
from onea.research.record_metrics import metric
from onea.research.report.aggregate import curve, grid_table, over_seeds, settings
from onea.research.report.compare import compare
from onea.research.report.records import load_records
from onea.schedules import DatasetSize, training_defaults

Record = dict[str, Any]
SEEDS = (1, 2, 3, 4, 5)


def runs(method: str = "one-a", seeds: tuple[int, ...] = SEEDS, **extra: Any) -> list[Record]:
    return [record(method, seed=seed, **extra) for seed in seeds]


# ---- aggregation --------------------------------------------------------------------------------------------------


def test_records_are_grouped_by_configuration_without_the_seed() -> None:
    (setting,) = settings([*runs(), *runs("simplecil", share=0.5)])
    assert [group.name for group in setting.groups] == ["one-a", "simplecil"]
    assert setting.seeds == list(SEEDS)
    values = [made["metrics"]["A_T"] for made in runs()]
    found = over_seeds(setting.groups[0], metric("A_T"), wanted=5)
    assert (found.mean, found.std) == pytest.approx((fmean(values), stdev(values)))
    assert (found.seeds, found.wanted) == (5, 5)


def test_curves_have_the_deviation_of_every_step() -> None:
    (setting,) = settings(runs())
    lines = [made["metrics"]["A"] for made in runs()]
    values = curve(setting.groups[0])
    assert [value.mean for value in values] == pytest.approx(np.mean(lines, axis=0).tolist())
    assert [value.std for value in values] == pytest.approx(np.std(lines, axis=0, ddof=1).tolist())
    assert all(value.std is None for value in curve(settings(runs(seeds=(1,)))[0].groups[0]))


def test_preset_options_of_long_tailed_streams_do_not_separate_seeds() -> None:
    def tailed(seed: int, images: int, **asked: Any) -> Record:
        made = record(seed=seed)
        options = training_defaults(DatasetSize(images, sum(NINE), len(NINE)), asked.get("epochs")) | asked
        made["config"] |= {"preset": "auto", "long_tail": 0.02, "options": asked}
        made["stream"]["samples"] = [600, *([12] * (sum(NINE) - 1))]  # the same, whichever classes they are of
        made["data"]["task_images"] = images
        return made | {"options": {"rank": 64} | options}

    few, many = tailed(1, 4000), tailed(2, 8000)
    assert few["options"]["epochs"] != many["options"]["epochs"]
    ((group,),) = (setting.groups for setting in settings([few, many]))
    assert len(group.records) == 2
    asked = [tailed(seed, images, epochs=3) for seed, images in ((1, 4000), (2, 8000))]
    earlier = tailed(3, 4000)
    earlier["options"]["epochs"] = 40  # not what the rule gives
    (setting,) = settings([few, many, *asked, earlier])
    assert [(group.name, len(group.records)) for group in setting.groups] == [
        ("one-a", 2),
        ("one-a (epochs 3)", 2),
        ("one-a (epochs 40)", 1),
    ]


def test_names_of_configurations_contain_the_options_that_differ() -> None:
    sharp = runs(options={"rank": 64, "kappa": 20.0})
    soft = runs(options={"rank": 64, "kappa": 2.0})
    (setting,) = settings([*sharp, *soft])
    assert [group.name for group in setting.groups] == ["one-a (kappa 20)", "one-a (kappa 2)"]


def test_other_data_streams_and_networks_are_other_settings() -> None:
    network = {"name": "tiny", "sha256": "cd" * 32, "input": 84}
    made = [record(), record(sizes=(3, 2), names=()), record(backbone=network), record(seed=2)]
    found = settings(made)
    assert [len(setting.groups[0].records) for setting in found] == [2, 1, 1]
    assert len({setting.name for setting in found}) == 3


def test_missing_and_unfinished_runs_are_gaps() -> None:
    records = [*runs(), *runs("simplecil", seeds=(1, 2)), record("simplecil", seed=3, done=4)]
    table = grid_table(settings(records)[0])
    assert (table.values["one-a", 0].seeds, table.values["one-a", 0].wanted) == (5, 5)
    assert (table.values["simplecil", 0].seeds, table.values["simplecil", 0].wanted) == (2, 5)


def test_of_two_records_of_a_run_the_one_with_more_tasks_is_used() -> None:
    (setting,) = settings([record(done=3), record(), record()])
    assert [made["status"] for made in setting.groups[0].records] == ["finished"]


# ---- compared -------------------------------------------------------------------------------------------------------


def test_differences_are_paired_by_seed_with_the_interval_of_student_s_t() -> None:
    first, second = runs("simplecil", share=0.5), runs(share=0.8)
    found = compare(first, second[::-1])
    row = found.rows[0]
    expected = [b["metrics"]["A_T"] - a["metrics"]["A_T"] for a, b in zip(first, second, strict=True)]
    assert row.differences == pytest.approx(expected)
    assert row.mean == pytest.approx(row.second - row.first)
    half = 2.776445 * stdev(expected) / 5**0.5
    assert row.interval == pytest.approx((row.mean - half, row.mean + half))
    assert found.seeds == SEEDS
    assert found.notes == ()


def test_one_seed_has_a_note_instead_of_an_interval() -> None:
    found = compare(runs("a", seeds=(1,)), runs("b", seeds=(1, 2)))
    assert all(row.interval is None for row in found.rows)
    assert "One common seed (1)" in found.notes[0]
    assert any("second side" in note and "2" in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"name": "other", "fingerprint": "e" * 64, "train_images": 600, "test_images": 500}}, "the dataset"),
        ({"sizes": (25, 25), "names": ()}, "the task sizes"),
        ({"stream": None}, "the class order"),
        ({"total": [9] * 50}, "the test images"),
    ],
)
def test_different_data_or_streams_are_errors(change: dict[str, Any], words: str) -> None:
    other = record("b", **({} if change == {"stream": None} else change))
    if change == {"stream": None}:
        other["stream"] = other["stream"] | {"class_order": other["stream"]["class_order"][::-1]}
    with pytest.raises(OneaError, match=f"seed 1 differ in {words}"):
        compare([record("a")], [other])


def test_no_common_seed_and_several_configurations_are_errors() -> None:
    with pytest.raises(OneaError, match="share no finished seed"):
        compare(runs(seeds=(1,)), runs(seeds=(2,)))
    with pytest.raises(OneaError, match="first side has 2 configurations"):
        compare([*runs(), *runs("b")], runs())
    with pytest.raises(OneaError, match="share no finished seed"):
        compare([record(done=2)], [record()])


# ---- on the command line --------------------------------------------------------------------------------------------


def write(folder: Path, records: list[Record]) -> None:
    for made in records:
        place = folder / f"{made['config']['method']}-{made['config']['seed']}"
        place.mkdir(parents=True)
        write_record(place, made)


def call(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})


def test_a_narrow_terminal_cuts_no_number_and_no_name() -> None:
    lines = [("class-balanced A_T %", "87.50", "88.25", "+0.75", "-0.25 to +1.75", "3 of 5")]
    table = Table.from_texts("", ("metric", "first", "second", "difference", "95 % interval", "better in"), lines)
    for width in (40, 50, 80):
        console = Console(width=width, file=io.StringIO())
        console.print(fit_terminal(table, console))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert all(number in shown for number in ("87.50", "88.25", "+0.75"))
        assert "".join(line[:5].strip() for line in shown.splitlines()).count("class")
        assert ("-0.25 to +1.75" in shown) == (width == 80)  # numbers are on one line where there is room


def test_compare_prints_differences_of_folders_and_patterns(tmp_path: Path) -> None:
    first, second = runs("simplecil", share=0.5), runs(share=0.8)
    write(tmp_path, [*first, *second])
    root = glob.escape(str(tmp_path))
    done = call(f"{root}/simplecil-*", f"{root}/one-a-*")
    assert done.exit_code == 0, done.output
    gap = fmean(b["metrics"]["A_T"] - a["metrics"]["A_T"] for a, b in zip(first, second, strict=True))
    assert f"{gap:+.2f}" in done.output
    assert "5 of 5" in done.output
    assert "Student's t over 5 paired seeds" in done.output
    single = call(str(tmp_path / "simplecil-1"), str(tmp_path / "one-a-1" / "record.json"))
    assert "one seed" in single.output


def test_missing_records_are_errors(tmp_path: Path) -> None:
    with pytest.raises(OneaError, match="does not exist"):
        load_records(tmp_path / "nothing")
    with pytest.raises(OneaError, match=r"no record\.json in or below"):
        load_records(tmp_path)
    (tmp_path / "record.json").write_text('{"format": 99}')
    with pytest.raises(OneaError, match="not a record"):
        load_records(tmp_path)


def test_patterns_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "runs", runs(seeds=(1, 2)))
    monkeypatch.chdir(tmp_path)
    assert len(load_records("runs/one-a-*")) == 2
    assert len(load_records("runs")) == 2
