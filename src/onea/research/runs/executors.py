# SPDX-License-Identifier: Apache-2.0
"""Executors of a grid: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from onea.distributed import import_ray, ray_cluster
from onea.errors import OneaError, truncate
from onea.research.runs.grid import (
    Executor,
    Failure,
    InProcess,
    OnProgress,
    Result,
    RunJob,
    group_by_training,
    ignore_progress,
    run_job,
    with_adapter_caches,
)

_MOST_WORKERS = 256  # processes, each with a network of its own
_PATIENCE = 30  # seconds for a process to end by itself after its result


@dataclass(frozen=True)
class _Worker:
    jobs: deque[RunJob]  # that it has not finished; the first is under way
    process: BaseProcess
    gpu: str | None


class LocalProcesses(Executor):
    """A few runs at a time, each in a process of its own: memory is measured per run and always given back.

    Runs that share adapters follow each other in one process.

    Args:
        workers: how many at a time; by default one per GPU, or one per four cores where there is no GPU.
        retries: how often a run is taken up again after its process has died (killed, or out of memory).
        share_adapters: train an adapter once for all runs that differ only in how they merge it.
    """

    def __init__(self, workers: int | None = None, retries: int = 2, share_adapters: bool = False) -> None:
        if workers is not None and not 1 <= workers <= _MOST_WORKERS:
            raise OneaError(f"workers is {truncate(workers)}; it must be at least 1 and at most {_MOST_WORKERS}.")
        self._gpus = visible_gpus()
        self._workers = workers or len(self._gpus) or max(1, _cores() // 4)
        self._retries = retries
        self.share_adapters = share_adapters

    def run(self, jobs: Sequence[RunJob], on_progress: OnProgress = ignore_progress) -> Generator[Result, None, None]:
        """Results as they finish."""
        shared = len(self._gpus) and min(self._workers, len(jobs)) > len(self._gpus)
        with multi_process_service(bool(shared)) as service:
            yield from self._run(jobs, on_progress, service)

    def _run(
        self, jobs: Sequence[RunJob], on_progress: OnProgress, service: Mapping[str, str]
    ) -> Generator[Result, None, None]:
        groups = group_by_training(jobs) if self.share_adapters else [(job,) for job in jobs]
        waiting, deaths = deque(map(deque, groups)), Counter[str]()
        active: dict[Connection, _Worker] = {}
        try:
            while waiting or active:
                while waiting and len(active) < self._workers:
                    connection, worker = self._start(waiting.popleft(), active.values(), service)
                    active[connection] = worker
                    on_progress(worker.jobs[0], 0, 0)
                for ready in wait(list(active)):
                    ready = cast(Connection, ready)  # on Windows another class of the same kind
                    left = active[ready].jobs
                    job = left[0]
                    try:
                        message = ready.recv()
                    except (EOFError, OSError):  # it has died without a word
                        key, code = job.config.key(), _end(ready, active.pop(ready))
                        deaths[key] += 1
                        if deaths[key] > self._retries:
                            yield Result(left.popleft(), Failure(_obituary(code, deaths[key]), attempts=deaths[key]))
                        if left:
                            waiting.append(left)
                        continue
                    if isinstance(message, tuple):
                        on_progress(job, *message)
                        continue
                    left.popleft()
                    if left:
                        on_progress(left[0], 0, 0)
                    else:
                        _end(ready, active.pop(ready))
                    yield Result(job, message)
        finally:
            for worker in active.values():
                worker.process.kill()  # a run may be killed at any moment; all it has finished is on disk
            for connection, worker in active.items():
                _end(connection, worker)

    def _start(
        self, jobs: deque[RunJob], busy: Collection[_Worker], service: Mapping[str, str] | None = None
    ) -> tuple[Connection, _Worker]:
        used = Counter(worker.gpu for worker in busy)
        gpu = min(self._gpus, key=lambda name: used[name]) if self._gpus else None
        threads = max(1, _cores() // self._workers)
        given = [
            dataclasses.replace(job, config=dataclasses.replace(job.config, threads=job.config.threads or threads))
            for job in jobs
        ]
        context = multiprocessing.get_context("spawn")  # a forked CUDA context does not work
        ours, theirs = context.Pipe()
        settings = {**(service or {}), **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
        process = context.Process(target=_work, args=(given, theirs, settings), daemon=True)
        process.start()
        theirs.close()  # so that its death closes the pipe
        return ours, _Worker(jobs, process, gpu)


def choose_executor(workers: int | None = None, ray: str | None = None, share_training: bool | None = None) -> Executor:
    """The executor that a command line asks for.

    Args:
        workers: processes on this machine; by default one per GPU. One worker is this process.
        ray: address of a Ray cluster (``host:port``), ``auto`` for the one that runs here, ``local`` for a new one.
        share_training: train an adapter once for all runs that differ only in the merge; by default where one worker
            makes all runs.
    """
    count = max(1, len(visible_gpus())) if workers is None else workers
    if share_training and ray is not None:
        raise OneaError("Runs of a Ray cluster cannot share their training; leave out --share-training.")
    if ray is not None:
        if workers is not None:
            raise OneaError("A Ray cluster has its own workers; leave out the number of workers.")

        return RayExecutor(None if ray == "local" else ray)
    if count == 1:
        return InProcess(share_adapters=share_training is not False)
    return LocalProcesses(count, share_adapters=bool(share_training))


def visible_gpus() -> list[str]:
    """The GPUs this process may use, as CUDA names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def _work(jobs: Sequence[RunJob], connection: Connection, settings: Mapping[str, str]) -> None:
    """The life of a worker process: one run, or several that share their adapters."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; who started us decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.update(settings)  # read when CUDA starts, which is later
    for job, adapter_cache in with_adapter_caches(jobs):
        connection.send(run_job(job, lambda _, task, tasks: connection.send((task, tasks)), adapter_cache).failure)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is on disk; to take torch down in order takes seconds


def _die_with_parent() -> None:
    """A grid that was killed must not leave runs behind that compete with those of its successor."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _end(connection: Connection, worker: _Worker) -> int | None:
    """Take leave of a process, by force if it stays; its exit code."""
    connection.close()
    worker.process.join(_PATIENCE)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
    code = worker.process.exitcode
    worker.process.close()
    return code


def _obituary(code: int | None, deaths: int) -> str:
    how = f"by signal {-code}" if code is not None and code < 0 else f"with exit status {code}"
    return f"The process of the run ended {how}, {deaths} times; if memory ran out, use fewer workers."


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_PROGRAM = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_USUAL_PLACE = Path("/tmp/nvidia-mps")  # where a service of the whole machine listens
_SECONDS = 30
# The least that a run will do: become a client of the service. Without it, every run would fail instead.
_TRIAL = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
raise SystemExit(1 if failed or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) else 0)
"""


@contextlib.contextmanager
def multi_process_service(wanted: bool = True) -> Iterator[Mapping[str, str]]:
    """Run the service, and give the environment of its clients; an empty one where there is none of our own."""
    program = shutil.which(_PROGRAM)
    if not wanted or program is None or _PIPES in os.environ or (_USUAL_PLACE / "control").exists():
        yield {}
        return
    place = Path(tempfile.mkdtemp(prefix="onea-mps-"))
    clients = {_PIPES: str(place / "pipe"), _LOGS: str(place / "log")}
    # Of the service itself: it would count the GPUs that it may see anew, and clients name them as we do.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | clients
    try:
        for folder in clients.values():
            Path(folder).mkdir()
        started = _succeeds([program, "-d"], environment)
        try:
            yield clients if started and _succeeds([sys.executable, "-c", _TRIAL], environment) else {}
        finally:
            if started:
                _succeeds([program], environment, said="quit\n")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _succeeds(command: list[str], environment: Mapping[str, str], said: str = "") -> bool:
    """Whether a command ends well, and in time."""
    try:
        # Into nothing, not a pipe: the service stays, and would keep a pipe open for ever.
        done = subprocess.run(
            command,
            env=dict(environment),
            input=said,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            start_new_session=True,  # Ctrl-C is for us, who then tell it to quit
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


_TICK = 0.5  # seconds between two looks at the progress
_PASSED_ON = (
    "ONEA_CACHE",
    "ONEA_MAX_MEGAPIXELS",
    "OMP_WAIT_POLICY",
)  # settings of this process that its tasks need as well


class RayExecutor(Executor):
    """One run a Ray task. Every node needs onea, the images and the weights under the same paths.

    Records travel back by Ray, so the nodes need no common folder; where they have one, a run whose node is lost is
    taken up after its last finished task, and otherwise it starts over.

    Args:
        address: ``host:port`` of a cluster, ``auto`` for the one that runs on this machine; None starts one here.
        gpus: of one run; 0.25 lets four share one. By default 1 where the cluster has any.
        cpus: of one run, and its threads unless the configuration says how many.
        retries: how often a run is tried again after its worker or node was lost.
    """

    def __init__(
        self, address: str | None = None, gpus: float | None = None, cpus: float = 1, retries: int = 2
    ) -> None:
        self._ray = import_ray()
        self._address, self._gpus, self._cpus, self._retries = address, gpus, cpus, retries

    def run(self, jobs: Sequence[RunJob], on_progress: OnProgress = ignore_progress) -> Generator[Result, None, None]:
        """Results as they finish."""
        if not jobs:
            return
        ray = self._ray
        with ray_cluster(self._address):
            board = self._board()
            task = ray.remote(**self._resources())(_task)
            here = _Sender.here()
            pending = {task.remote(self._fitted(job), number, board, here): job for number, job in enumerate(jobs)}
            try:
                while pending:
                    ready, _ = ray.wait(list(pending), num_returns=1, timeout=_TICK)
                    for number, done, tasks in self._news(board):
                        on_progress(jobs[number], done, tasks)
                    for reference in ready:
                        yield self._result(reference, pending.pop(reference))
            finally:
                for reference in pending:
                    ray.cancel(reference, force=True)

    def _resources(self) -> dict[str, Any]:
        there = self._ray.cluster_resources().get("GPU", 0)
        gpus = self._gpus if self._gpus is not None else min(1, there)
        if gpus > there:  # Ray would wait for ever
            raise OneaError(f"A run is to have {gpus:g} GPUs, but the Ray cluster has {there:g}; ask for fewer.")
        return {
            "num_cpus": self._cpus,
            "num_gpus": gpus,
            "max_retries": self._retries,
            "max_calls": 1,  # a process for each run: memory is measured per run and always given back
        }

    def _board(self) -> Any:
        """A board on this node, so that the loss of another one does not take it away."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        here = strategies.NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=True)
        return self._ray.remote(_Board).options(num_cpus=0, scheduling_strategy=here).remote()

    def _fitted(self, job: RunJob) -> RunJob:
        threads = job.config.threads or max(1, int(self._cpus))
        return dataclasses.replace(job, config=dataclasses.replace(job.config, threads=threads))

    def _result(self, reference: Any, job: RunJob) -> Result:
        try:
            done: Result = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            tries = self._retries + 1
            text = f"Ray lost the worker of the run {tries} times ({type(error).__name__}); see the logs of its nodes."
            return Result(job, Failure(text, str(error), tries))
        return dataclasses.replace(done, job=job)

    def _news(self, board: Any) -> list[tuple[int, int, int]]:
        try:
            news: list[tuple[int, int, int]] = self._ray.get(board.take.remote(), timeout=10 * _TICK)
        except self._ray.exceptions.RayError:  # without its node there is no news, but results all the same
            return []
        return news


class _Board:
    """Where tasks on any node write how far they are, and the grid reads it."""

    def __init__(self) -> None:
        self._news: list[tuple[int, int, int]] = []

    def put(self, number: int, done: int, tasks: int) -> None:
        self._news.append((number, done, tasks))

    def take(self) -> list[tuple[int, int, int]]:
        news, self._news = self._news, []
        return news


@dataclass(frozen=True)
class _Sender:
    """Facts about the process that sends tasks, which they need."""

    folder: str
    settings: dict[str, str]

    @classmethod
    def here(cls) -> _Sender:
        return cls(str(Path.cwd()), {name: os.environ[name] for name in _PASSED_ON if name in os.environ})

    def enter(self) -> None:
        os.environ.update(self.settings)
        if Path(self.folder).is_dir():
            os.chdir(self.folder)  # so that relative paths of the configuration mean the same


def _task(job: RunJob, number: int, board: Any, sender: _Sender) -> Result:
    """The work of one Ray task."""
    sender.enter()
    board.put.remote(number, 0, 0)
    return run_job(job, lambda _, done, tasks: board.put.remote(number, done, tasks))
