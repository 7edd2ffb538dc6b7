# SPDX-License-Identifier: Apache-2.0
"""Runs as tasks of a Ray cluster: on a laptop, or on many machines by address."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onea.distributed import connected, import_ray
from onea.errors import OneaError
from onea.research.runs.jobs import Executor, OnProgress, Result, RunJob, ignore_progress, run_job
from onea.research.runs.record_store import Failure

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
        with connected(self._address):
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
