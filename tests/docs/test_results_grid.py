# SPDX-License-Identifier: Apache-2.0
"""The runs of the results page: all of them are listed, valid, and stored in small files."""

from __future__ import annotations

import gzip
import json
import shlex
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from support.pages import script

from onea.options import parse_arguments
from onea.research.methods import METHODS
from onea.research.record import read_record_file, write_record
from onea.research.runs.config import RunConfig, make_config
from onea.research.runs.runner import run


@pytest.fixture(scope="module")
def grid() -> ModuleType:
    return script("results_grid", "tools")


def parse(command: str) -> tuple[RunConfig, Path]:
    """The configuration and the output folder of a listed command."""
    from onea.cli.app import app

    group: Any = typer.main.get_command(app)
    words = shlex.split(command, comments=True)
    assert words[:2] == ["onea", "run"]
    context = group.commands["run"].make_context("run", words[2:])
    values = {name: value for name, value in context.params.items() if value is not None}
    out = Path(values.pop("out"))
    names = set(RunConfig.__dataclass_fields__)
    config = make_config(
        {name: value for name, value in values.items() if name in names} | parse_arguments(context.args)
    )
    return config, out


def test_every_method_is_listed_on_both_streams_with_five_seeds(grid: ModuleType) -> None:
    count = Counter((job.config.method, job.config.data) for job in grid.jobs())
    assert len(grid.ROWS) == 9
    assert {method for method, _ in count} == {method for method, *_ in grid.ROWS} <= set(METHODS.builtin)
    assert {data for _, data in count} == {"folder:cifar100", "folder:cub200"}
    assert all(runs % 5 == 0 for runs in count.values())
    paths = [job.path for job in grid.jobs()]
    assert len(set(paths)) == len(paths)


def test_a_listed_command_has_the_configuration_and_folder_of_its_job(grid: ModuleType) -> None:
    for job in grid.jobs()[::29]:
        config, out = parse(job.command("made"))
        assert config.key() == job.config.key()
        assert out == Path("made") / job.path


def test_finished_records_are_collected_and_others_are_reported(
    grid: ModuleType, tiny_run: dict[str, Any], tmp_path: Path
) -> None:
    made, results = tmp_path / "made", tmp_path / "results"
    record = run(make_config(tiny_run), made / "methods/runs/elsewhere")
    named = record | {"config": record["config"] | {"data": "folder:cub200"}}
    write_record(made / "methods/runs/good", named)
    write_record(made / "methods/runs/running", named | {"status": "running"})
    write_record(made / "methods/runs/long", named | {"note": " ".join(map(str, range(10_000)))})
    problems = grid.collect(made, results)
    assert [line.split(":")[0].rsplit("/")[-1] for line in problems] == ["elsewhere", "long", "running"]
    (kept,) = results.rglob("record.json.gz")
    assert kept.parent.name == "good"
    assert read_record_file(kept) == read_record_file(made / "methods/runs/good/record.json")
    before = kept.read_bytes()
    grid.collect(made, results)
    assert kept.read_bytes() == before
    merges = [task.get("merge") for task in json.loads(gzip.decompress(before))["tasks"]]
    assert any(merge and "analysis" in merge for merge in merges), "the first seed keeps the analysis"


def test_further_seeds_leave_out_the_analysis_of_merges(
    grid: ModuleType, tiny_run: dict[str, Any], tmp_path: Path
) -> None:
    made, results = tmp_path / "made", tmp_path / "results"
    record = run(make_config(tiny_run | {"seed": 2}), made / "methods/runs/second")
    write_record(made / "methods/runs/second", record | {"config": record["config"] | {"data": "folder:cub200"}})
    assert not grid.collect(made, results)
    (kept,) = map(read_record_file, results.rglob("record.json.gz"))
    assert "analysis" not in json.dumps(kept["tasks"])
    assert kept["metrics"] == record["metrics"]
    assert [task["merge"]["base"] for task in kept["tasks"][1:]] == [t["merge"]["base"] for t in record["tasks"][1:]]


def test_earlier_runs_are_removed_when_all_seeds_have_been_run_again(
    grid: ModuleType, tiny_run: dict[str, Any], tmp_path: Path
) -> None:
    jobs = [job for job in grid.jobs() if (job.config.method, job.config.data) == ("one-a", "folder:cub200")]
    jobs = [job for job in jobs if job.group == "methods"]
    record = run(make_config(tiny_run), tmp_path / "run")
    for seed in (1, 2, 3):
        config = record["config"] | {"method": "one-a", "seed": seed}
        write_record(tmp_path / f"methods/runs/old-{seed}", record | {"config": config, "data": {"name": "cub200"}})
    for job in jobs[1:]:
        write_record(tmp_path / job.path, record)
    assert not list(grid.superseded(jobs, tmp_path))
    write_record(tmp_path / jobs[0].path, record)
    assert [folder.name for folder in grid.superseded(jobs, tmp_path)] == ["old-1", "old-2", "old-3"]


def test_missing_runs_start_in_the_given_order_of_methods(
    grid: ModuleType, tiny_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    merged = [make_config(tiny_run | {"kappa": kappa}) for kappa in (5.0, 9.0)]
    frozen = make_config({name: tiny_run[name] for name in tiny_run if name != "options"} | {"method": "simplecil"})
    listed = [grid.Job(config, "methods", 1.0) for config in (frozen, *merged)]
    monkeypatch.setattr(grid, "jobs", lambda: listed)
    monkeypatch.setattr(grid, "RESULTS", tmp_path / "results")
    assert grid.run_missing(tmp_path / "made", 1, ["one-a", "simplecil"]) == []
    finished = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("finished")]
    assert finished == [config.folder().name for config in (*merged, frozen)]
    records = [read_record_file(tmp_path / "made" / job.path / "record.json") for job in listed]
    assert [record["tasks"][0].get("training_shared", False) for record in records] == [False, False, True]
    assert not any("losses" in task for task in grid.shorten(records[2])["tasks"]), (
        "only the run that trained has losses"
    )
    assert all(task["losses"] for task in grid.shorten(records[1])["tasks"])


def test_unknown_method_is_an_error(
    grid: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["results_grid.py", "run", "--only", "one-a,two-a"])
    with pytest.raises(SystemExit, match="2"):
        grid.main()
    assert "no method two-a among the runs" in capsys.readouterr().err
