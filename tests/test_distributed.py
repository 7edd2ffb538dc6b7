# SPDX-License-Identifier: Apache-2.0
"""A run on two processes gives the same result as on one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onea.distributed import Processes
from onea.research.runs.config import make_config
from onea.research.runs.runner import run


@given(st.integers(1, 20), st.integers(1, 6))
def test_shards_interleave_to_the_whole_batch(length, count):
    batch = torch.arange(length)
    shards = [Processes(rank, count).shard(batch) for rank in range(count)]
    assert len({len(shard) for shard in shards}) == 1
    assert torch.equal(torch.stack(shards).T.flatten()[:length], batch)


def launch(values: dict, out: Path) -> subprocess.CompletedProcess[str]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in values["options"].items()]
    rest = [f"--{name}={value}" for name, value in values.items() if name not in ("method", "options")]
    # What `accelerate launch` calls; on a machine without GPUs that command itself needs MPI.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "onea", "run"]
    command = [sys.executable, *launcher, values["method"], *rest, *options, "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


@pytest.mark.parametrize(
    "method", ["one-a", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mos", "one-a-plus", "tuna"))]
)
def test_two_processes_equal_one(method, tiny_run, tmp_path):
    """Equal predictions except for at most one image, and losses up to 0.1 %; without dropout, as its masks differ."""
    options = tiny_run["options"] | {"dropout": 0.0, "batch_size": 7}
    if method in ("mos", "tuna"):
        options = {name: value for name, value in options.items() if not name.endswith("_epochs")} | {
            "alignment_epochs": 2
        }
    values = tiny_run | {"method": method, "options": options, "device": "cpu"}
    done = launch(values, tmp_path / "two")
    assert done.returncode == 0, done.stderr[-2000:]
    two = json.loads((tmp_path / "two/record.json").read_text())
    one = run(make_config(values), tmp_path / "one")
    assert two["runtime"]["processes"] == 2
    for task_of_one, task_of_two in zip(one["tasks"], two["tasks"], strict=True):
        assert task_of_two.get("losses", []) == pytest.approx(task_of_one.get("losses", []), rel=1e-3)
    for mine, theirs in zip(one["correct"], two["correct"], strict=True):
        assert sum(abs(a - b) for a, b in zip(mine, theirs, strict=True)) <= 1
    assert done.stdout.count("record: ") == 1, "only the first process reports"
