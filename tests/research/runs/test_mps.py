# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's Multi-Process Service around a grid, with a fake program that records its calls."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from onea.research.runs import executors
from onea.research.runs.executors import LocalProcesses, multi_process_service

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the service exists on Linux")

PROGRAM = """#!/bin/sh
echo "$1 $(if [ -z "$1" ]; then cat; fi) pipes=$CUDA_MPS_PIPE_DIRECTORY gpus=$CUDA_VISIBLE_DEVICES" >> "$LOG"
[ -d "$CUDA_MPS_PIPE_DIRECTORY" ] && [ -d "$CUDA_MPS_LOG_DIRECTORY" ]
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The recorded calls; the program is on the path, and clients can connect."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    log = tmp_path / "calls"
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("LOG", str(log))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(executors, "_DEFAULT_FOLDER", tmp_path / "nvidia-mps")
    monkeypatch.setattr(executors, "_CLIENT_TEST", "import os; assert os.environ['CUDA_MPS_PIPE_DIRECTORY']")
    return lambda: log.read_text().splitlines() if log.exists() else []


def test_it_is_started_and_stopped_with_new_folders(calls):
    with multi_process_service() as clients:
        pipes = clients["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(pipes).is_dir()
        assert Path(clients["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
        assert calls() == [f"-d  pipes={pipes} gpus="], "the service sees all GPUs"
    assert calls()[1:] == [f" quit pipes={pipes} gpus="]
    assert not Path(pipes).parent.exists()


def test_it_quits_when_the_grid_fails(calls):
    with pytest.raises(KeyboardInterrupt), multi_process_service():
        raise KeyboardInterrupt
    assert len(calls()) == 2


def test_nothing_is_started_if_it_is_running_or_missing(calls, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
        with multi_process_service() as clients:
            assert clients == {}
    with multi_process_service(enabled=False) as clients:
        assert clients == {}
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with multi_process_service() as clients:
            assert clients == {}
    executors._DEFAULT_FOLDER.mkdir()
    (executors._DEFAULT_FOLDER / "control").touch()
    with multi_process_service() as clients:
        assert clients == {}
    assert calls() == []


@pytest.mark.parametrize("client_test", ["raise SystemExit(1)", "import time; time.sleep(9)"])
def test_the_service_is_not_used_if_clients_cannot_connect(calls, client_test, monkeypatch):
    monkeypatch.setattr(executors, "_CLIENT_TEST", client_test)
    monkeypatch.setattr(executors, "_MPS_TIMEOUT", 2)
    with multi_process_service() as clients:
        assert clients == {}
    assert [line.split()[0] for line in calls()] == ["-d", "quit"]


def test_a_service_that_does_not_start_is_not_stopped(calls, monkeypatch):
    monkeypatch.setattr(executors, "_LOGS", "OTHER")  # so that the program finds no folder of logs
    with multi_process_service() as clients:
        assert clients == {}
    assert len(calls()) == 1


@pytest.mark.parametrize(
    ("gpus", "workers", "jobs", "enabled"),
    [(["0"], 2, 2, True), (["0"], 2, 1, False), (["0", "1"], 2, 5, False), (["0", "1"], 3, 5, True), ([], 4, 5, False)],
)
def test_it_is_started_if_runs_share_a_gpu(gpus, workers, jobs, enabled, monkeypatch):
    requests = []
    monkeypatch.setattr(executors, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(executors, "multi_process_service", lambda enabled: requests.append(enabled) or no_service())
    monkeypatch.setattr(LocalProcesses, "_run", lambda *_: iter(()))
    list(LocalProcesses(workers).run([None] * jobs))
    assert requests == [enabled]


def no_service():
    return multi_process_service(enabled=False)
