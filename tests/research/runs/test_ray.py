# SPDX-License-Identifier: Apache-2.0
"""Grids on Ray: one machine, lost workers, and a cluster of two nodes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.records import comparable_fields

from onea.errors import OneaError
from onea.research.record import read_record
from onea.research.runs.config import make_config
from onea.research.runs.executors import RayExecutor, choose_executor
from onea.research.runs.grid import GridProgress, RecordStore, run_grid


class Events(GridProgress):
    """Records events in order, and acts at the first one with this seed and task."""

    def __init__(self, trigger=None, action=None):
        self.events, self._at, self._act = [], trigger, action

    def advance(self, config, task, tasks):
        self.events.append((config.seed, task))
        if self._act and (config.seed, task) == self._at:
            action, self._act = self._act, None
            action()

    def end(self, config, result):
        self.events.append((config.seed, "end"))


@pytest.fixture
def configs(tiny_run):
    """Runs by seed, long enough to be interrupted."""
    options = tiny_run["options"] | {"epochs": 60, "min_epochs": 60, "max_epochs": 60}
    return {seed: make_config(tiny_run | {"seed": seed, "options": options}) for seed in (1, 2, 3)}


@pytest.fixture
def ray(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # the paths of sockets have a limit
    return pytest.importorskip("ray")


def all_comparable_fields(configs, store):
    return [comparable_fields(store.find(config)) for config in configs]


def workers(ray):
    """Processes of Ray tasks that this process has started, directly or not."""
    import psutil

    running = psutil.Process().children(recursive=True)
    return [process for process in running if "ray::_ray_task" in " ".join(process.cmdline())]


def test_error_message_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OneaError, match=r"pip install 'ray\[serve\]>="):
        choose_executor(on="ray:auto")


def test_a_grid_on_this_machine(ray, tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store, reference = RecordStore("relative"), RecordStore(tmp_path / "reference")
    good = [make_config(tiny_run | {"seed": seed}) for seed in (1, 2)]
    bad = make_config(tiny_run | {"seed": 3, "holdout": 0.99})
    progress = Events()
    outcome = run_grid([*good, bad], store, RayExecutor(), progress)
    assert not ray.is_initialized(), "the cluster that was started is stopped"
    assert {config.seed for config in outcome.finished} == {1, 2}
    assert outcome.failed == (bad,)
    assert "hold out less" in str(store.failure(bad))
    assert {(1, 0), (1, 2), (1, "end"), (2, "end"), (3, "end")} <= set(progress.events)
    run_grid(good, reference)
    assert all_comparable_fields(good, store) == all_comparable_fields(good, reference)
    assert len(run_grid(good, store, RayExecutor()).skipped) == 2


def test_ray_cannot_start_in_a_long_path(ray, configs, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("long" * 20)))
    with pytest.raises(OneaError, match="set RAY_TMPDIR to a short path"):
        run_grid([configs[1]], RecordStore(tmp_path), RayExecutor())
    assert not ray.is_initialized()


def test_an_address_without_a_cluster(ray, configs, tmp_path):
    with pytest.raises(OneaError, match="No Ray cluster answers at 'nonsense'"):
        run_grid([configs[1]], RecordStore(tmp_path), RayExecutor("nonsense"))


@pytest.mark.slow
def test_more_gpus_than_available_are_refused(ray, configs, tmp_path):
    with pytest.raises(OneaError, match="has 0; ask for fewer"):
        run_grid([configs[1]], RecordStore(tmp_path), RayExecutor(gpus=0.5))
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_lost_worker_is_retried(ray, configs, tmp_path):
    killed = []

    def kill():
        for process in workers(ray):
            killed.append(process.pid)
            process.kill()

    store, reference = RecordStore(tmp_path / "store"), RecordStore(tmp_path / "reference")
    runs = [configs[1], configs[2]]
    outcome = run_grid(runs, store, RayExecutor(), Events((1, 1), kill))
    assert killed
    assert len(outcome.finished) == 2
    assert store.find(configs[1])["dates"]["resumed"], "it was resumed after its first task"
    run_grid(runs, reference)
    assert all_comparable_fields(runs, store) == all_comparable_fields(runs, reference)


@pytest.mark.slow
def test_a_repeatedly_lost_worker_fails_its_run(ray, configs, tmp_path):
    class Killer(GridProgress):
        def advance(self, config, task, tasks):
            if config.seed == 1:
                for process in workers(ray):
                    process.kill()

    store = RecordStore(tmp_path)
    executor = RayExecutor(retries=1, cpus=os.cpu_count() or 1)  # one at a time
    outcome = run_grid([configs[1], configs[2]], store, executor, Killer())
    assert [config.seed for config in outcome.failed] == [1]
    assert [config.seed for config in outcome.finished] == [2]
    assert "Ray lost the worker of the run 2 times" in str(store.failure(configs[1]))


@pytest.mark.slow
def test_an_interrupted_grid_leaves_the_cluster_as_it_was(ray, configs, tmp_path):
    def stop():
        raise KeyboardInterrupt

    store = RecordStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_grid(list(configs.values()), store, RayExecutor(), Events((1, 1), stop))
    assert not ray.is_initialized()
    assert read_record(store.folder(configs[1]))["status"] == "running"
    assert workers(ray) == []


@pytest.fixture
def cluster(ray, tmp_path_factory):
    """A head and a second node with one core each; address and the two processes."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    port = 20000 + os.getpid() % 10000
    address = f"127.0.0.1:{port}"
    log = (tmp_path_factory.mktemp("ray") / "log").open("w")
    temporary = Path("/tmp") / f"ray-test-{os.getpid()}"  # short: the paths of sockets have a limit
    shared = {"stdout": log, "stderr": log, "start_new_session": True}
    head = [*command, "--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    nodes = [subprocess.Popen([*head, f"--temp-dir={temporary}"], **shared)]
    try:
        wait_for(lambda: nodes_alive(ray, address) == 1)
        nodes.append(subprocess.Popen([*command, f"--address={address}", "--node-ip-address=127.0.0.1"], **shared))
        wait_for(lambda: nodes_alive(ray, address) == 2)
        yield address, nodes
    finally:
        for node in nodes:
            kill_node(node)
        log.close()
        shutil.rmtree(temporary, ignore_errors=True)


def kill_node(node):
    """Kill all processes of a node, which are in the group of its first process."""
    with suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait(30)


def nodes_alive(ray, address):
    try:
        ray.init(address=address, logging_level="CRITICAL", log_to_driver=False)
        return sum(node["Alive"] for node in ray.nodes())
    except (ConnectionError, RuntimeError, ValueError):
        return 0
    finally:
        ray.shutdown()


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the cluster did not come up"
        time.sleep(1)


@pytest.mark.slow
@pytest.mark.parametrize("node_is_lost", [False, True])
def test_two_nodes(cluster, configs, tmp_path, node_is_lost):
    address, nodes = cluster
    store, reference = RecordStore(tmp_path / "store"), RecordStore(tmp_path / "reference")
    runs = list(configs.values())
    progress = Events((2, 1), (lambda: kill_node(nodes[1])) if node_is_lost else None)
    outcome = run_grid(runs, store, RayExecutor(address), progress)
    assert len(outcome.finished) == 3
    starts = [event for event in progress.events if event[1] in (0, "end")]
    first_end = next(index for index, event in enumerate(starts) if event[1] == "end")
    assert len({seed for seed, _ in starts[:first_end]}) >= 2, "each node has one core, so both had a run"
    run_grid(runs, reference)
    assert all_comparable_fields(runs, store) == all_comparable_fields(runs, reference)
