# SPDX-License-Identifier: Apache-2.0
"""Executors of a grid's runs: this process, processes of this machine, or a cluster."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import cast

from onea.errors import OneaError, short
from onea.research.runs.jobs import (
    Executor,
    OnProgress,
    Result,
    RunJob,
    by_training,
    ignore_progress,
    run_job,
    with_adapter_caches,
)
from onea.research.runs.mps import multi_process_service
from onea.research.runs.record_store import Failure

_MOST_WORKERS = 256  # processes, each with a network of its own
_PATIENCE = 30  # seconds for a process to end by itself after its result


class InProcess(Executor):
    """One run after the other, here."""

    def __init__(self, share_adapters: bool = False) -> None:
        self.share_adapters = share_adapters

    def run(self, jobs: Sequence[RunJob], on_progress: OnProgress = ignore_progress) -> Generator[Result, None, None]:
        """Results in the order of the jobs, or, where adapters are shared, of their trainings."""
        for job, adapter_cache in with_adapter_caches(jobs) if self.share_adapters else ((job, None) for job in jobs):
            on_progress(job, 0, 0)
            yield run_job(job, on_progress, adapter_cache)


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
            raise OneaError(f"workers is {short(workers)}; it must be at least 1 and at most {_MOST_WORKERS}.")
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
        groups = by_training(jobs) if self.share_adapters else [(job,) for job in jobs]
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
        from onea.research.runs.ray_executor import RayExecutor

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
