# SPDX-License-Identifier: Apache-2.0
"""One run of a grid as a job: its configuration, its result, who makes it, and which jobs share their training."""

from __future__ import annotations

import dataclasses
import json
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onea.errors import OUT_OF_MEMORY, OneaError, OutOfMemory, is_out_of_memory
from onea.research.record import Record
from onea.research.runs.config import RunConfig
from onea.research.runs.record_store import Failure

if TYPE_CHECKING:
    from onea.learner.merged_adapter import AdapterCache


@dataclass(frozen=True)
class RunJob:
    """A run to be made, and its folder as an absolute path: workers may stand elsewhere."""

    config: RunConfig
    folder: Path


@dataclass(frozen=True)
class Result:
    """A run that is over. ``record`` may be None without a failure: it lies in the folder."""

    job: RunJob
    failure: Failure | None = None
    record: Record | None = None


OnProgress = Callable[[RunJob, int, int], None]  # a job has learned so many of its tasks; (0, 0) when it begins


def ignore_progress(job: RunJob, task: int, tasks: int) -> None:
    """Tell nobody."""


class Executor(ABC):
    """Makes runs.

    Attributes:
        share_adapters: whether it trains an adapter once for all runs that differ only in how they merge it. Results
            are the same; the records say ``training_shared``, and the times of all but the first are those of the
            merge alone. The adapters wait in the host's memory, those of one training at a time.
    """

    share_adapters: bool = False

    @abstractmethod
    def run(self, jobs: Sequence[RunJob], on_progress: OnProgress = ignore_progress) -> Generator[Result, None, None]:
        """Results as they finish, one for each job. Closing the generator ends whatever it has started."""


def run_job(job: RunJob, on_progress: OnProgress, adapter_cache: AdapterCache | None = None) -> Result:
    """Make a run in this process; an error becomes part of the result."""
    try:
        return Result(job, record=_perform(job, on_progress, adapter_cache))
    except OneaError as error:
        return Result(job, Failure(str(error)))
    except Exception as error:
        if is_out_of_memory(error):
            return Result(job, Failure(str(error) if isinstance(error, OutOfMemory) else OUT_OF_MEMORY))
        return Result(job, Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))


def _perform(job: RunJob, on_progress: OnProgress, adapter_cache: AdapterCache | None) -> Record:
    from onea.research.runs.runner import run
    from onea.runtime import Progress

    class Listener(Progress):
        def start_task(self, task: int, tasks: int, name: str) -> None:
            on_progress(job, task, tasks)

    # Two grids may share a run: the second waits at it, and then finds it finished.
    return run(job.config, job.folder, Listener(), adapter_cache, wait=True)


def training_of(config: RunConfig) -> str | None:
    """A key that runs share which train the same adapters; None where a method does not merge adapters.

    It is the whole configuration less the method and the options of its merge. Two methods with different presets
    may agree here and train differently all the same; a cache tells them apart.
    """
    from onea.learner.adapter_training import AdapterTraining
    from onea.research.methods import method_class
    from onea.research.methods.adapter_merging import AdapterMerging

    if not issubclass(method_class(config.method), AdapterMerging):
        return None
    names = {item.name for item in dataclasses.fields(AdapterTraining)}
    options = {name: value for name, value in config.options.items() if name in names}
    return json.dumps(dataclasses.asdict(config) | {"method": None, "options": options}, sort_keys=True)


def once_per_training(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """The runs that still train where adapters are shared: the first of each training, and all that share nothing."""
    firsts: dict[str, RunConfig] = {}
    for config in configs:
        firsts.setdefault(training_of(config) or config.key(), config)
    return list(firsts.values())


def by_training(jobs: Sequence[RunJob]) -> list[tuple[RunJob, ...]]:
    """The jobs in groups that train alike; those that share nothing are alone."""
    groups: dict[str, list[RunJob]] = {}
    for job in jobs:
        groups.setdefault(training_of(job.config) or job.config.key(), []).append(job)
    return [tuple(group) for group in groups.values()]


def with_adapter_caches(jobs: Sequence[RunJob]) -> Iterator[tuple[RunJob, AdapterCache | None]]:
    """The jobs, those that train alike one after the other, each with the adapters that it may share.

    One cache exists at a time: that of the jobs at hand, and none where only one job could use it.
    """
    from onea.learner.merged_adapter import AdapterCache

    for group in by_training(jobs):
        adapter_cache = AdapterCache() if len(group) > 1 else None
        yield from ((job, adapter_cache) for job in group)
