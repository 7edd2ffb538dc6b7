# SPDX-License-Identifier: Apache-2.0
"""Executors of a grid: processes on this machine, or a Ray cluster."""

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

from onea.cpu import available_cores
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

_MAX_WORKERS = 256
_EXIT_TIMEOUT = 30  # seconds


@dataclass(frozen=True)
class _Worker:
    jobs: deque[RunJob]  # unfinished; the first is running
    process: BaseProcess
    connection: Connection
    gpu: str | None

    def join(self) -> int | None:
        """Wait for the process to exit, kill it after a timeout, and return its exit code."""
        self.connection.close()
        self.process.join(_EXIT_TIMEOUT)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode
        self.process.close()
        return code


class LocalProcesses(Executor):
    """Parallel runs, each in its own process, so that memory is measured per run and always freed.

    Runs that share adapters are executed one after another in the same process. This is not a process pool of the
    standard library, because there one dead process fails all jobs.

    Args:
        workers: number of processes; by default one per GPU, or one per four cores without a GPU.
        retries: how often a run is resumed after its process was killed or ran out of memory.
        share_adapters: train an adapter once for all runs that differ only in the merge.
    """

    def __init__(self, workers: int | None = None, retries: int = 2, share_adapters: bool = False) -> None:
        if workers is not None and not 1 <= workers <= _MAX_WORKERS:
            raise OneaError(f"workers is {truncate(workers)}; it must be at least 1 and at most {_MAX_WORKERS}.")
        self._gpus = visible_gpus()
        self._workers = workers or len(self._gpus) or max(1, available_cores() // 4)
        self._retries = retries
        self.share_adapters = share_adapters

    def run(self, jobs: Sequence[RunJob], on_progress: OnProgress = ignore_progress) -> Generator[Result, None, None]:
        """Yield the result of each job as soon as it is finished."""
        several_per_gpu = 0 < len(self._gpus) < min(self._workers, len(jobs))
        with multi_process_service(several_per_gpu) as environment:
            yield from self._run(jobs, on_progress, environment)

    def _run(
        self, jobs: Sequence[RunJob], on_progress: OnProgress, environment: Mapping[str, str]
    ) -> Generator[Result, None, None]:
        groups = group_by_training(jobs) if self.share_adapters else [[job] for job in jobs]
        waiting, crashes = deque(map(deque, groups)), Counter[str]()
        active: dict[Connection, _Worker] = {}
        try:
            while waiting or active:
                while waiting and len(active) < self._workers:
                    worker = self._start(waiting.popleft(), active.values(), environment)
                    active[worker.connection] = worker
                for connection in cast(list[Connection], wait(list(active))):  # on Windows, a similar class
                    worker = active[connection]
                    job = worker.jobs[0]
                    try:
                        message = connection.recv()
                    except (EOFError, OSError):  # the process has died
                        code = active.pop(connection).join()
                        crashes[job.config.key()] += 1
                        if (attempts := crashes[job.config.key()]) > self._retries:
                            yield Result(worker.jobs.popleft(), _crash(code, attempts))
                        if worker.jobs:
                            waiting.append(worker.jobs)
                        continue
                    if isinstance(message, tuple):
                        on_progress(job, *message)
                        continue
                    worker.jobs.popleft()
                    if not worker.jobs:
                        active.pop(connection).join()
                    yield Result(job, message)
        finally:
            for worker in active.values():
                worker.process.kill()  # harmless at any moment: finished tasks are on disk
            for worker in active.values():
                worker.join()

    def _start(
        self, jobs: deque[RunJob], workers: Collection[_Worker], environment: Mapping[str, str] | None = None
    ) -> _Worker:
        """Start a process on the GPU with the fewest workers."""
        load = Counter(worker.gpu for worker in workers)
        gpu = min(self._gpus, key=lambda name: load[name]) if self._gpus else None
        threads = max(1, available_cores() // self._workers)
        context = multiprocessing.get_context("spawn")  # a forked CUDA context does not work
        connection, worker_connection = context.Pipe()
        settings = {**(environment or {}), **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
        arguments = (_with_threads(jobs, threads), worker_connection, settings)
        process = context.Process(target=_run_worker, args=arguments, daemon=True)
        process.start()
        worker_connection.close()  # so that the pipe closes when the process dies
        return _Worker(jobs, process, connection, gpu)


def choose_executor(workers: int | None = None, on: str = "local", share_training: bool | None = None) -> Executor:
    """The executor for these options of the command line.

    Args:
        workers: processes on this machine; by default one per GPU. With one worker, runs are executed in this process.
        on: value of ``--on``: ``local``, ``ray`` for a new Ray cluster on this machine, or ``ray:ADDRESS`` (see
            ``RayExecutor``).
        share_training: train an adapter once for all runs that differ only in the merge; by default with one worker.
    """
    kind, _, address = on.partition(":")
    if kind not in ("local", "ray"):
        raise OneaError(f"--on is '{on}'; choose local, ray or ray:ADDRESS.")
    if kind == "ray":
        if share_training:
            raise OneaError("Runs on a Ray cluster cannot share their training; leave out --share-training.")
        if workers is not None:
            raise OneaError("The size of a Ray cluster determines its number of workers; leave out --workers.")
        return RayExecutor(None if address in ("", "local") else address)
    count = max(1, len(visible_gpus())) if workers is None else workers
    if count == 1:
        return InProcess(share_adapters=share_training is not False)
    return LocalProcesses(count, share_adapters=bool(share_training))


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by their CUDA names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def _with_threads(jobs: Sequence[RunJob], threads: int) -> list[RunJob]:
    """The jobs, with this number of threads where their configuration sets none."""
    return [
        dataclasses.replace(job, config=dataclasses.replace(job.config, threads=job.config.threads or threads))
        for job in jobs
    ]


def _run_worker(jobs: Sequence[RunJob], connection: Connection, settings: Mapping[str, str]) -> None:
    """The main function of a worker process: one run, or several that share their adapters."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all processes; the parent terminates its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.update(settings)  # before CUDA is initialised
    for job, adapter_cache in with_adapter_caches(jobs):
        connection.send(run_job(job, lambda _, task, tasks: connection.send((task, tasks)), adapter_cache).failure)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # everything is on disk, and a regular exit of torch takes seconds


def _exit_with_parent() -> None:
    """Exit when the parent is killed, so that its runs do not continue alongside those of a new grid."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _crash(code: int | None, attempts: int) -> Failure:
    cause = f"by signal {-code}" if code is not None and code < 0 else f"with exit status {code}"
    message = f"The process of the run ended {cause}, {attempts} times; if memory ran out, use fewer workers."
    return Failure(message, attempts=attempts)


_MPS_PROGRAM = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_DEFAULT_FOLDER = Path("/tmp/nvidia-mps")  # of a service that is already running
_MPS_TIMEOUT = 30  # seconds
# Connects to the service as a run does. If this fails, runs do not use it.
_CLIENT_TEST = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
raise SystemExit(1 if failed or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) else 0)
"""


@contextlib.contextmanager
def multi_process_service(enabled: bool = True) -> Iterator[Mapping[str, str]]:
    """Start NVIDIA's Multi-Process Service, without which processes on the same GPU take turns.

    If it is missing, does not work or is already running, none is started.

    Yields:
        The environment variables of its clients; empty if no service was started.
    """
    program = shutil.which(_MPS_PROGRAM)
    if not enabled or program is None or _PIPES in os.environ or (_DEFAULT_FOLDER / "control").exists():
        yield {}
        return
    folder = Path(tempfile.mkdtemp(prefix="onea-mps-"))
    clients = {_PIPES: str(folder / "pipe"), _LOGS: str(folder / "log")}
    # The service itself must see all GPUs: it would renumber a subset, but clients use the original numbers.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | clients
    try:
        for client_folder in clients.values():
            Path(client_folder).mkdir()
        started = _succeeds([program, "-d"], environment)
        try:
            yield clients if started and _succeeds([sys.executable, "-c", _CLIENT_TEST], environment) else {}
        finally:
            if started:
                _succeeds([program], environment, stdin="quit\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _succeeds(command: list[str], environment: Mapping[str, str], stdin: str = "") -> bool:
    """Whether a command exits with 0 in time."""
    try:
        # DEVNULL, because the service would keep a pipe open after the command.
        process = subprocess.run(
            command,
            env=dict(environment),
            input=stdin,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_MPS_TIMEOUT,
            start_new_session=True,  # Ctrl-C must not end the service before its clients
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return process.returncode == 0


_POLL_INTERVAL = 0.5  # seconds
_COPIED_VARIABLES = ("ONEA_CACHE", "ONEA_MAX_MEGAPIXELS", "OMP_WAIT_POLICY")


class RayExecutor(Executor):
    """One Ray task per run. Every node needs onea, the images and the weights under the same paths.

    Records are returned by Ray, so nodes need no shared folder. With a shared folder, a run whose node was lost is
    resumed after its last finished task; otherwise it is restarted.

    Args:
        address: ``host:port`` of a cluster, ``auto`` for the one on this machine; None starts one.
        gpus: GPUs per run; with 0.25, four runs share one. The default is 1 if the cluster has GPUs.
        cpus: CPU cores per run, and its number of threads unless the configuration sets it.
        retries: how often a run is retried after its worker or node was lost.
    """

    def __init__(
        self, address: str | None = None, gpus: float | None = None, cpus: float = 1, retries: int = 2
    ) -> None:
        self._ray = import_ray()
        self._address, self._gpus, self._cpus, self._retries = address, gpus, cpus, retries

    def run(self, jobs: Sequence[RunJob], on_progress: OnProgress = ignore_progress) -> Generator[Result, None, None]:
        """Yield the result of each job as soon as it is finished."""
        if not jobs:
            return
        ray = self._ray
        environment = {name: os.environ[name] for name in _COPIED_VARIABLES if name in os.environ}
        with ray_cluster(self._address):
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            this_node = (
                ray.get_runtime_context().get_node_id()
            )  # so that the loss of another node does not affect the log
            strategy = strategies.NodeAffinitySchedulingStrategy(this_node, soft=True)
            progress_log = ray.remote(_ProgressLog).options(num_cpus=0, scheduling_strategy=strategy).remote()
            task = ray.remote(**self._resources())(_ray_task)
            pending = {
                task.remote(job, number, progress_log, Path.cwd(), environment): jobs[number]
                for number, job in enumerate(_with_threads(jobs, max(1, int(self._cpus))))
            }
            try:
                while pending:
                    ready, _ = ray.wait(list(pending), num_returns=1, timeout=_POLL_INTERVAL)
                    with contextlib.suppress(ray.exceptions.RayError):  # progress is optional
                        for number, done, tasks in ray.get(progress_log.take.remote(), timeout=10 * _POLL_INTERVAL):
                            on_progress(jobs[number], done, tasks)
                    for reference in ready:
                        yield self._result(reference, pending.pop(reference))
            finally:
                for reference in pending:
                    ray.cancel(reference, force=True)

    def _resources(self) -> dict[str, Any]:
        available = self._ray.cluster_resources().get("GPU", 0)
        gpus = self._gpus if self._gpus is not None else min(1, available)
        if gpus > available:  # Ray would wait for them forever
            raise OneaError(f"A run needs {gpus:g} GPUs, but the Ray cluster has {available:g}; ask for fewer.")
        return {
            "num_cpus": self._cpus,
            "num_gpus": gpus,
            "max_retries": self._retries,
            "max_calls": 1,  # one process per run, so that memory is measured per run and always freed
        }

    def _result(self, reference: Any, job: RunJob) -> Result:
        try:
            result: Result = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            attempts = self._retries + 1
            message = (
                f"Ray lost the worker of the run {attempts} times ({type(error).__name__}); see the logs of its nodes."
            )
            return Result(job, Failure(message, str(error), attempts))
        return dataclasses.replace(result, job=job)


class _ProgressLog:
    """A Ray actor that collects the progress of tasks on all nodes."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, int]] = []

    def put(self, number: int, done: int, tasks: int) -> None:
        self._entries.append((number, done, tasks))

    def take(self) -> list[tuple[int, int, int]]:
        entries, self._entries = self._entries, []
        return entries


def _ray_task(job: RunJob, number: int, progress_log: Any, folder: Path, environment: Mapping[str, str]) -> Result:
    """Execute a job in a Ray task, with the environment variables and the working directory of the grid's process."""
    os.environ.update(environment)
    if folder.is_dir():
        os.chdir(folder)  # for relative paths in the configuration
    return run_job(job, lambda _, done, tasks: progress_log.put.remote(number, done, tasks))
