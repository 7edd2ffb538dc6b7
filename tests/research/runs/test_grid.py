# SPDX-License-Identifier: Apache-2.0
"""Grids: no run is repeated, no finished task is lost, and a failed run does not stop the others."""

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.records import comparable_fields

from onea.errors import OneaError
from onea.learner.merged_adapter import AdapterCache
from onea.research.cli.display import GridDisplay, labels
from onea.research.record import read_record
from onea.research.runs import executors
from onea.research.runs.config import make_config
from onea.research.runs.executors import LocalProcesses, choose_executor
from onea.research.runs.grid import (
    Failure,
    GridProgress,
    InProcess,
    RecordStore,
    Result,
    RunJob,
    first_of_each_training,
    ignore_progress,
    run_grid,
    run_job,
    with_adapter_caches,
)
from onea.research.runs.runner import run
from onea.research.runs.setup import prepare
from onea.runtime import make_runtime

# A grid in a separate program, which is killed.
GRID = """
import json, sys
from onea.research.runs.config import make_config
from onea.research.runs.executors import LocalProcesses
from onea.research.runs.grid import GridProgress, run_grid
from onea.research.runs.grid import RecordStore

class Lines(GridProgress):
    def advance(self, config, task, tasks):
        print("at", config.seed, task, flush=True)
    def end(self, config, result):
        print("end", config.seed, flush=True)

if __name__ == "__main__":
    values, root = json.loads(sys.argv[1])
    run_grid([make_config(value) for value in values], RecordStore(root), LocalProcesses(2), Lines())
"""


@pytest.fixture
def quick_config(tiny_run):
    """A function from a seed and options to the configuration of a run without training."""
    values = {name: value for name, value in tiny_run.items() if name != "options"} | {"method": "simplecil"}
    return lambda seed=1, **more: make_config(values | {"seed": seed} | more)


@pytest.fixture
def store(tmp_path):
    return RecordStore(tmp_path / "store")


class CallRecorder(GridProgress):
    """Records all calls."""

    def __init__(self):
        self.starts, self.steps, self.ends = [], [], []

    def start(self, configs, finished):
        self.starts.append((len(configs), len(finished)))

    def advance(self, config, task, tasks):
        self.steps.append((config.seed, task, tasks))

    def end(self, config, result):
        self.ends.append((config.seed, result))


def slow_run(tiny_run, seed):
    """Values of a run whose tasks are long enough to be interrupted."""
    same = dict.fromkeys(("epochs", "min_epochs", "max_epochs"), 60)
    return tiny_run | {"seed": seed, "options": tiny_run["options"] | same}


def stamps(store):
    return {path: path.stat().st_mtime_ns for path in sorted(store.root.rglob("record.json"))}


def status(store, config):
    """The status in a record, which is there after the first task."""
    return read_record(store.folder(config))["status"]


def test_finished_runs_are_not_repeated(quick_config, store):
    first = run_grid([quick_config(1), quick_config(2), quick_config(1, threads=2)], store)
    assert [config.seed for config in first.finished] == [1, 2]
    assert (first.failed, first.skipped) == ((), ())
    before = stamps(store)
    calls = CallRecorder()
    again = run_grid([quick_config(2), quick_config(1), quick_config(3)], store, InProcess(), calls)
    assert [config.seed for config in again.finished] == [3]
    assert [config.seed for config in again.skipped] == [2, 1]
    assert {path: stamp for path, stamp in stamps(store).items() if path in before} == before
    assert calls.starts == [(3, 2)]
    assert calls.steps == [(3, 0, 0), (3, 0, 3), (3, 1, 3), (3, 2, 3)]
    assert [seed for seed, _ in calls.ends] == [3]
    assert calls.ends[0][1] == store.find(quick_config(3))


def test_a_store_finds_records_by_configuration(quick_config, store, tmp_path):
    assert store.folder(quick_config()) == store.root / quick_config().folder().name
    assert (store.find(quick_config()), store.failure(quick_config()), list(store.records())) == (None, None, [])
    run_grid([quick_config()], store)
    record = store.find(quick_config(threads=3))  # threads do not make another run
    assert record["status"] == "finished"
    assert store.find(quick_config(2)) is None
    nested = RecordStore(tmp_path)
    assert list(nested.records()) == [record], "records lie anywhere below the root"
    assert not [path for path in store.folder(quick_config()).iterdir() if path.name.startswith(".")]


def test_other_and_damaged_files_are_skipped(quick_config, store):
    run_grid([quick_config()], store)
    record = store.find(quick_config())
    for name, content in {"a": "not JSON", "b": "[1]", "c": '{"format": 1}', "d": '{"format": 99}'}.items():
        (store.root / name).mkdir()
        (store.root / name / "record.json").write_text(content)
    (store.root / "notes.txt").write_text("mine")
    (store.root / "e" / "record.json").mkdir(parents=True)
    assert list(store.records()) == [record]
    for content in ("not JSON", '{"format": 2}', json.dumps(record | {"config": quick_config(2).identity()})):
        (store.folder(quick_config()) / "record.json").write_text(content)
        assert store.find(quick_config()) is None
        assert "delete" in str(store.failure(quick_config()))


def test_a_damaged_failure_file_is_reported(quick_config, store):
    store.save(Result(RunJob(quick_config(), store.folder(quick_config())), Failure("It rained.")))
    path = store.folder(quick_config()) / "failure.json"
    for change in ({"error": 5}, {"attempts": "x"}, {"attempts": []}, {"date": None}):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        assert str(store.failure(quick_config()))


def test_an_interrupted_run_is_resumed(tiny_run, store, monkeypatch):
    config = make_config(tiny_run)
    uninterrupted = run(config, store.root / "elsewhere")

    class Stop(GridProgress):
        def advance(self, config, task, tasks):
            if task == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_grid([config], store, progress=Stop())
    assert (status(store, config), store.find(config), store.failure(config)) == ("running", None, None)
    assert len(run_grid([config], store).finished) == 1
    record = store.find(config)
    assert len(record["dates"]["resumed"]) == 1
    assert comparable_fields(record) == comparable_fields(uninterrupted)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_is_recorded_and_other_runs_continue(quick_config, store, workers):
    bad = quick_config(2, holdout=0.99)
    calls = CallRecorder()
    outcome = run_grid([bad, quick_config(1)], store, choose_executor(workers), calls)
    assert [config.seed for config in outcome.finished] == [1]
    assert outcome.failed == (bad,)
    assert store.find(bad) is None
    failure = store.failure(bad)
    assert str(failure) == "holdout 0.99 leaves a class without training images; hold out less."
    assert dict(calls.ends)[2].error == failure.error
    content = json.loads((store.folder(bad) / "failure.json").read_text())
    assert content["config"]["seed"] == 2
    assert content["date"]


def test_an_unexpected_error_keeps_its_traceback_until_the_run_succeeds(quick_config, store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("onea.research.runs.runner.summarise", lambda *_: 1 / 0)
        outcome = run_grid([quick_config(1), quick_config(2)], store)
    assert len(outcome.failed) == 2
    failure = store.failure(quick_config())
    assert failure.error == "ZeroDivisionError: division by zero"
    assert "summarise" in failure.details
    assert len(run_grid([quick_config(1)], store).finished) == 1, "a failed run is tried again"
    assert (status(store, quick_config()), store.failure(quick_config())) == ("finished", None)
    assert not (store.folder(quick_config()) / "failure.json").exists()
    (store.folder(quick_config(2)) / "failure.json").write_text("{}")
    assert "cannot be read; run it again" in str(store.failure(quick_config(2)))


def test_an_unwritable_folder_fails_only_its_own_run(quick_config, store):
    store.root.mkdir()
    store.folder(quick_config(1)).write_text("a file where a folder should be")
    outcome = run_grid([quick_config(1), quick_config(2)], store)
    assert [config.seed for config in outcome.failed] == [1]
    assert [config.seed for config in outcome.finished] == [2]


def test_two_grids_do_not_repeat_the_same_run(quick_config, store):
    """The second one waits for the first if both make the same run, and does not repeat it."""
    job = RunJob(quick_config(), store.folder(quick_config()))
    learning, results = threading.Event(), []

    def on_progress(_job, task, _tasks):
        if task == 1 and not learning.is_set():
            learning.set()
            time.sleep(0.5)

    first = threading.Thread(target=lambda: results.append(run_job(job, on_progress)))
    first.start()
    assert learning.wait(60)
    steps = []
    second = run_job(job, lambda _, task, tasks: steps.append((task, tasks)))
    first.join()
    assert (second.failure, second.record) == (None, results[0].record)
    assert steps == [(0, 0)], "the second one learned no task"


def test_a_killed_worker_is_retried(tiny_run, store):
    victim = make_config(slow_run(tiny_run, 1))
    killed = []

    class Killer(CallRecorder):
        def advance(self, config, task, tasks):
            super().advance(config, task, tasks)
            if (config.seed, task) == (1, 1) and not killed:
                child = next(child for child in multiprocessing.active_children())
                killed.append(child.pid)
                os.kill(child.pid, signal.SIGKILL)

    calls = Killer()
    outcome = run_grid([victim], store, LocalProcesses(1), calls)
    assert outcome.finished == (victim,)
    assert killed
    record = store.find(victim)
    assert len(record["dates"]["resumed"]) == 1, "it was resumed after its last task"
    assert comparable_fields(record) == comparable_fields(run(victim, store.root / "uninterrupted"))
    assert calls.steps.count((1, 0, 0)) == 2


def test_a_repeatedly_killed_worker_fails_only_its_own_run(tiny_run, quick_config, store):
    victim = make_config(slow_run(tiny_run, 1))

    class Killer(CallRecorder):
        def advance(self, config, task, tasks):
            super().advance(config, task, tasks)
            if config.seed == 1:
                for child in multiprocessing.active_children():
                    child.kill()

    calls = Killer()
    outcome = run_grid([victim, quick_config(2)], store, LocalProcesses(1, retries=1), calls)
    assert [config.seed for config in outcome.failed] == [1]
    assert [config.seed for config in outcome.finished] == [2]
    assert store.failure(victim).attempts == 2
    assert "signal 9" in str(store.failure(victim))
    assert calls.steps.count((1, 0, 0)) == 2


def test_a_killed_worker_does_not_fail_other_runs_with_the_same_training(tiny_run, store):
    """The killed run fails; the next one of its group trains its adapters itself."""
    victim, next_one = (make_config(slow_run(tiny_run, 1) | {"kappa": kappa}) for kappa in (3.0, 9.0))

    class Killer(CallRecorder):
        def advance(self, config, task, tasks):
            super().advance(config, task, tasks)
            if config.key() == victim.key() and task == 1:
                for child in multiprocessing.active_children():
                    child.kill()

    outcome = run_grid([victim, next_one], store, LocalProcesses(2, retries=0, share_adapters=True), Killer())
    assert outcome.failed == (victim,)
    assert outcome.finished == (next_one,)


def test_closing_the_generator_terminates_the_processes(tiny_run, quick_config, tmp_path):
    endless = dict.fromkeys(("epochs", "min_epochs", "max_epochs"), 100_000)  # so that the quick run ends first
    values = tiny_run | {"seed": 2, "options": tiny_run["options"] | endless}
    jobs = [RunJob(quick_config(1), tmp_path / "1"), RunJob(make_config(values), tmp_path / "2")]
    with closing(LocalProcesses(2).run(jobs)) as results:
        assert next(results).job is jobs[0]
        assert len(multiprocessing.active_children()) == 1
    assert multiprocessing.active_children() == []


def start_grid(values, root):
    arguments = [sys.executable, "-c", GRID, json.dumps([values, str(root)])]
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def interrupted_grid(tiny_run, quick_config, store, number):
    """Send a signal to a grid when one run is finished and another has begun to learn; returns its process."""
    fast = tiny_run | {"method": "simplecil", "options": {}}
    values = [fast | {"seed": 2}, slow_run(tiny_run, 1), fast | {"seed": 3}]
    with start_grid(values, store.root) as grid:
        lines: list[str] = []
        while not {"end 2", "at 1 1"} <= set(lines):
            line = grid.stdout.readline()
            assert line, grid.stderr.read()
            lines.append(line.strip())
        assert "end 1" not in lines
        if number == signal.SIGKILL:
            grid.kill()
        else:
            os.killpg(grid.pid, number)  # as a terminal does
        # The workers hold the other end of the pipe too: it closes when the last of them has died with the grid.
        _, error = grid.communicate(timeout=30)
    return [make_config(value) for value in values], grid.returncode, error


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_an_interrupted_grid_does_not_repeat_finished_runs(number, tiny_run, quick_config, store, tmp_path):
    configs, code, error = interrupted_grid(tiny_run, quick_config, store, number)
    assert code == (-9 if number == signal.SIGKILL else -2), error
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in error
    assert (status(store, configs[0]), status(store, configs[1])) == ("finished", "running")
    before, finished = stamps(store), store.find(configs[0])
    outcome = run_grid(configs, store)
    assert configs[0] in outcome.skipped
    assert store.find(configs[0])["dates"] == finished["dates"]
    assert stamps(store)[store.folder(configs[0]) / "record.json"] == before[store.folder(configs[0]) / "record.json"]
    assert len(store.find(configs[1])["dates"]["resumed"]) == 1
    uninterrupted = RecordStore(tmp_path / "uninterrupted")
    run_grid(configs, uninterrupted)
    assert [comparable_fields(store.find(config)) for config in configs] == [
        comparable_fields(uninterrupted.find(config)) for config in configs
    ]


def test_ctrl_c_keeps_finished_runs(quick_config, store):
    class Stop(GridProgress):
        def end(self, config, result):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_grid([quick_config(1), quick_config(2)], store, progress=Stop())
    assert status(store, quick_config(1)) == "finished"
    assert not store.folder(quick_config(2)).exists()


@pytest.mark.parametrize("kind", [InProcess, partial(LocalProcesses, 2)], ids=["one process", "two"])
def test_shared_adapters_change_nothing_but_the_time(tiny_run, tmp_path, kind):
    other = tiny_run | {"options": tiny_run["options"] | {"kappa": 9.0}}
    configs = [make_config(value) for value in (tiny_run, other, other | {"normalise": "none"})]
    separate, shared = RecordStore(tmp_path / "separate"), RecordStore(tmp_path / "shared")
    run_grid(configs, separate)
    run_grid(configs, shared, kind(share_adapters=True))

    def results(store):
        records = [comparable_fields(store.find(config)) for config in configs]
        shared_flags = [[task.pop("training_shared", False) for task in record["tasks"]] for record in records]
        return records, shared_flags

    assert results(shared)[0] == results(separate)[0]
    assert results(shared)[1] == [[False] * 3, [True] * 3, [False] * 3], "other images are not the same training"


def test_adapter_caches_are_freed_after_the_last_job_that_needs_them(tiny_run, tmp_path):
    def config(seed, method="one-a", **options):
        values = tiny_run | {"seed": seed, "method": method}
        return make_config(values | {"options": values["options"] | options})

    mixed = [config(1), config(2), config(1, rank=5), config(1, kappa=9.0), config(3), config(2, "running-mean")]
    alone = make_config(
        {"method": "simplecil", **{k: v for k, v in tiny_run.items() if k not in ("method", "options")}}
    )
    with_caches = list(with_adapter_caches([RunJob(run_config, tmp_path) for run_config in [*mixed, alone]]))
    assert [job.config for job, _ in with_caches] == [mixed[index] for index in (0, 3, 1, 5, 2, 4)] + [alone]
    adapter_caches = [adapter_cache for _, adapter_cache in with_caches]
    assert adapter_caches[0] is adapter_caches[1]
    assert adapter_caches[2] is adapter_caches[3]
    assert adapter_caches[0] is not adapter_caches[2]
    assert adapter_caches[4:] == [None] * 3, "no other job has their training"
    assert first_of_each_training([*mixed, alone]) == [mixed[0], mixed[1], mixed[2], mixed[4], alone]

    walk = with_adapter_caches([RunJob(run_config, tmp_path) for run_config in mixed])
    first = weakref.ref(next(walk)[1])
    assert next(walk)[1] is first()
    next(walk)
    gc.collect()
    assert first() is None, "freed after the last job with that training"


def test_shared_adapters_are_copied_from_host_memory(tiny_run):
    adapter_cache = AdapterCache()
    ready = prepare(make_config(tiny_run), make_runtime("cpu"), adapter_cache)
    own, shared_copy = (ready.method.learner._train(ready.method.merged, ready.task(0), None, None) for _ in range(2))
    assert shared_copy.report["training_shared"]
    ((cached, _),) = adapter_cache.values()
    for name, value in cached.items():
        assert value.device.type == "cpu"
        assert torch.equal(value, own.tensors[name])
        assert len({value.data_ptr(), own.tensors[name].data_ptr(), shared_copy.tensors[name].data_ptr()}) == 3


def test_training_is_shared_by_default_only_within_one_process():
    assert choose_executor(1).share_adapters
    assert not choose_executor(1, share_training=False).share_adapters
    assert not choose_executor(2).share_adapters
    assert choose_executor(2, share_training=True).share_adapters
    with pytest.raises(OneaError, match="leave out --share-training"):
        choose_executor(on="ray", share_training=True)


def test_each_process_gets_a_gpu_and_its_part_of_the_threads(quick_config, store, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    monkeypatch.setattr(executors, "available_cores", lambda: 8)
    started = []

    class Pipe:
        close = staticmethod(lambda: None)

    class Context:
        def Pipe(self):  # noqa: N802
            return Pipe(), Pipe()

        def Process(self, target, args, daemon):  # noqa: N802
            started.append((args[0][0].config.threads, args[2]["CUDA_VISIBLE_DEVICES"]))
            return self

        def start(self):
            pass

    monkeypatch.setattr(executors.multiprocessing, "get_context", lambda _: Context())
    pool, busy = LocalProcesses(), []
    for config in (quick_config(1, threads=0), quick_config(2, threads=0), quick_config(3, threads=1)):
        busy.append(pool._start(deque([RunJob(config, store.folder(config))]), busy))
    assert started == [(4, "3"), (4, "5"), (1, "3")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert executors.visible_gpus() == []


def test_choice_of_executor(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert isinstance(choose_executor(), InProcess)
    assert isinstance(choose_executor(2), LocalProcesses)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert isinstance(choose_executor(), LocalProcesses)
    assert isinstance(choose_executor(1), InProcess)
    with pytest.raises(OneaError, match="at least 1"):
        choose_executor(0)
    with pytest.raises(OneaError, match="leave out --workers"):
        choose_executor(2, on="ray:auto")


def test_labels_contain_only_the_differences(quick_config):
    first, second = quick_config(1, gamma=0.1), quick_config(2, gamma=0.5)
    data = first.data.split("/")[-1]
    assert labels([first, second])[second.key()] == f"simplecil {data} seed 2, gamma 0.5"
    assert labels([first])[first.key()] == f"simplecil {data} seed 1"


def display(terminal):
    text = io.StringIO()
    return GridDisplay(Console(file=text, force_terminal=terminal, width=120, highlight=False)), text


def test_progress_lines_without_a_terminal(quick_config, store):
    run_grid([quick_config(1)], store)
    grid_display, text = display(terminal=False)
    with grid_display:
        run_grid([quick_config(1), quick_config(2), quick_config(3, holdout=0.99)], store, progress=grid_display)
    lines = text.getvalue().splitlines()
    assert lines[0] == "3 runs, 1 of them finished earlier"
    assert lines[1].startswith("2/3  simplecil")
    assert "seed 2: A_T " in lines[1]
    assert "left)" in lines[1]
    assert "seed 3, holdout 0.99 failed: holdout 0.99 leaves" in lines[2]
    assert len(lines) == 3


def test_live_display(quick_config, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("onea.research.cli.display.time.perf_counter", lambda: now[0])
    configs = [quick_config(seed) for seed in range(1, 6)]
    grid_display, _ = display(terminal=True)

    def render():
        console = Console(file=io.StringIO(), width=120)
        console.print(grid_display._draw())
        return console.file.getvalue()

    grid_display.start(configs, configs[:1])
    assert "1 of 5 runs  1 finished earlier" in render()
    grid_display.advance(configs[1], 0, 0)
    assert "preparing" in render()
    assert "left" not in render(), "there is no estimate yet"
    grid_display.advance(configs[1], 2, 4)  # half of it was learned by an earlier grid
    grid_display.advance(configs[1], 3, 4)
    now[0] += 10
    assert "task 4 of 4" in render()
    assert "10 s so far, about 2 min left" in render()  # 10 s for a quarter of a run, 3.25 runs left: 130 s
    grid_display.end(configs[1], {"metrics": {"A_T": 50.0, "mean_A": 60.0}})
    grid_display.advance(configs[2], 0, 0)
    grid_display.end(configs[2], Failure("It failed; try again."))
    assert "3 of 5 runs  1 failed  1 finished earlier" in render()
    assert "about 40 s left" in render()  # 10 s for half a run, 2 runs left


def test_the_live_display_leaves_only_failures(quick_config, store):
    grid_display, text = display(terminal=True)
    with grid_display:
        run_grid([quick_config(1), quick_config(2, holdout=0.99)], store, progress=grid_display)
    written = text.getvalue()
    assert "2 runs" in written
    assert "seed 2, holdout 0.99 failed: holdout 0.99 leaves" in written
    assert "A_T" not in written


def test_progress_is_optional(quick_config, tmp_path):
    job = RunJob(quick_config(), tmp_path)
    assert ignore_progress(job, 1, 2) is None
    results = list(InProcess().run([job]))
    assert [result.failure for result in results] == [None]
    assert Path(tmp_path / "record.json").exists()
