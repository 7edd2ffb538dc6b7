# SPDX-License-Identifier: Apache-2.0
"""Trackers: TensorBoard logs the values of the record, and a failing tracker stops no run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.records import comparable_fields
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onea.cli import main
from onea.errors import OneaError
from onea.research.record import read_record
from onea.research.runs.config import make_config
from onea.research.runs.runner import run
from onea.research.runs.tracking import Tracking, check_trackers, flat_parameters


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve of the event files directly in a folder."""
    accumulator = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def arguments(tiny_run) -> list[str]:
    values = {name: value for name, value in tiny_run.items() if name not in ("method", "options")} | tiny_run[
        "options"
    ]
    return [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def test_tensorboard_logs_the_values_of_the_record(tiny_run, tmp_path, monkeypatch, capsys):
    command = ["onea", "run", "one-a", "--out", str(tmp_path / "mine"), "--track", "tensorboard"]
    monkeypatch.setattr(sys, "argv", [*command, "--track-to", str(tmp_path / "logs"), *arguments(tiny_run)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    record = read_record(tmp_path / "mine")
    assert not (tmp_path / "mine" / "tracking").exists()
    assert record["config"] == make_config(tiny_run).identity(), "tracking is no part of a run"
    logged = curves(tmp_path / "logs" / "mine")
    losses = [loss for task in record["tasks"] for loss in task["losses"]]
    assert [value for _, value in logged["train/loss"]] == pytest.approx(losses, rel=1e-5)
    assert [value for _, value in logged["test/A_T"]] == pytest.approx(record["metrics"]["A"])
    assert logged["test/mean_A"][-1][1] == pytest.approx(record["metrics"]["mean_A"])
    assert logged["test/F"][-1][1] == pytest.approx(record["metrics"]["F"])
    assert len(logged["test/F"]) == 2, "there is no forgetting after the first task"
    assert [value for _, value in logged["time/learn_s"]] == pytest.approx(record["timings"]["learn_s"])
    assert [value for _, value in logged["stream/classes"]] == [3, 4, 6]
    steps = sorted(step for curve in ("train/loss", "test/A_T") for step, _ in logged[curve])
    assert steps == list(range(1, len(losses) + 4)), "one axis, each step once"
    (parameters_file,) = (tmp_path / "logs" / "mine").glob("*/hparams.yml")
    assert "options.rank: 4" in parameters_file.read_text()


def test_a_resumed_run_continues_its_curves_and_a_finished_one_logs_nothing(tiny_run, tmp_path):
    class Stop(Tracking):
        def end_task(self, task, accuracy):
            super().end_task(task, accuracy)
            raise KeyboardInterrupt

    config, folder = make_config(tiny_run), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt), Stop(["tensorboard"], folder) as tracking:
        run(config, folder, tracking)
    for _ in range(2):
        with Tracking(["tensorboard"], folder) as tracking:
            record = run(config, folder, tracking)
    logged = curves(folder / "tracking" / "run")
    assert [value for _, value in logged["test/A_T"]] == pytest.approx(record["metrics"]["A"])
    assert [value for _, value in logged["train/loss"]] == pytest.approx(
        [x for t in record["tasks"] for x in t["losses"]], rel=1e-5
    )
    whole = run(config, tmp_path / "whole")
    assert comparable_fields(record) == comparable_fields(whole), "nor does tracking change a result"


def test_a_failing_tracker_is_dropped(tiny_run, tmp_path, capsys):
    with Tracking(["tensorboard"], tmp_path / "run") as tracking:

        def fail(*_, **__):
            raise ConnectionError("the service is gone.")

        tracking._start = lambda name: type("Broken", (), {"store_init_configuration": fail})()
        record = run(make_config(tiny_run), tmp_path / "run", tracking)
    assert record["status"] == "finished"
    errors = capsys.readouterr().err
    assert errors.count("tracker 'tensorboard' failed and is dropped: ConnectionError: the service is gone") == 1


def test_unknown_and_missing_trackers_are_refused_before_anything_is_run(tmp_path, monkeypatch):
    from accelerate import tracking

    with pytest.raises(OneaError, match="There is no tracker 'tensorbord'; did you mean 'tensorboard'"):
        Tracking(["tensorbord"], tmp_path)
    assert check_trackers(["tensorboard", "tensorboard"]) == ["tensorboard"]
    assert "tensorboard" in check_trackers(["all"])
    monkeypatch.setattr(tracking, "get_available_trackers", list)
    with pytest.raises(OneaError, match=r"install it with: .* -m pip install 'tensorboard>="):
        Tracking(["tensorboard"], tmp_path)
    with pytest.raises(OneaError, match="'wandb' is not installed; install it with: pip install wandb"):
        Tracking(["wandb"], tmp_path)
    with pytest.raises(OneaError, match="No tracker is installed"):
        Tracking(["all"], tmp_path)
    assert not check_trackers([])


def test_parameters_are_flat_and_plain(tiny_run, tmp_path):
    record = run(make_config(tiny_run | {"method": "simplecil", "options": {}}), tmp_path)
    flat = flat_parameters(record)
    assert flat["method"] == "simplecil"
    assert flat["seed"] == 1
    assert all(isinstance(value, bool | int | float | str) for value in flat.values())
