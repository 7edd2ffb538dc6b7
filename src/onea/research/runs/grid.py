# SPDX-License-Identifier: Apache-2.0
"""Grids of runs: finished runs are not repeated, and a failed run does not stop the others."""

from __future__ import annotations

import dataclasses
import json
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from onea.errors import OUT_OF_MEMORY, OneaError, OutOfMemory, is_out_of_memory
from onea.files import read_json, write_json
from onea.research.record import Record, find_record_files, is_reportable, read_record, record_path, write_record
from onea.research.runs.config import RunConfig
from onea.text import utc_timestamp

if TYPE_CHECKING:
    from onea.learner.merged_adapter import AdapterCache


@dataclass(frozen=True)
class RunJob:
    """A run of a grid. Its folder is an absolute path: workers may have another working directory."""

    config: RunConfig
    folder: Path


@dataclass(frozen=True)
class Result:
    """The result of a job. If the run succeeded, ``record`` may be None: it is in the folder."""

    job: RunJob
    failure: Failure | None = None
    record: Record | None = None


OnProgress = Callable[[RunJob, int, int], None]  # job, learned tasks and all tasks; (0, 0) when it starts


def ignore_progress(job: RunJob, task: int, tasks: int) -> None:
    """Do nothing."""


class Executor(ABC):
    """Executes the runs of a grid.

    Attributes:
        share_adapters: train an adapter once for all runs that differ only in the merge. Results are the same. The
            records have ``training_shared``, and the times of all runs but the first exclude the training. The host's
            memory holds the adapters of one training at a time.
    """

    share_adapters: bool = False

    @abstractmethod
    def run(self, jobs: Sequence[RunJob], on_progress: OnProgress = ignore_progress) -> Generator[Result, None, None]:
        """Yield the result of each job as soon as it is finished. Closing the generator terminates all workers."""


def run_job(job: RunJob, on_progress: OnProgress, adapter_cache: AdapterCache | None = None) -> Result:
    """Execute a run in this process; an error becomes part of the result."""
    from onea.research.runs.runner import run
    from onea.runtime import Progress

    class TaskProgress(Progress):
        def start_task(self, task: int, tasks: int, name: str) -> None:
            on_progress(job, task, tasks)

    on_progress(job, 0, 0)
    try:
        # With wait: if another grid executes the same run, its record is the result of both.
        return Result(job, record=run(job.config, job.folder, TaskProgress(), adapter_cache, wait=True))
    except OneaError as error:
        return Result(job, Failure(str(error)))
    except Exception as error:
        if is_out_of_memory(error):
            return Result(job, Failure(str(error) if isinstance(error, OutOfMemory) else OUT_OF_MEMORY))
        return Result(job, Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))


def _training_key(config: RunConfig) -> str:
    """A key that is equal for runs that train the same adapters, and unique for methods that do not merge adapters.

    It contains the configuration without the method and its merging options. Methods with different presets may have
    equal keys although they train differently; the adapter cache compares all options.
    """
    from onea.learner.adapter_training import AdapterTraining
    from onea.research.methods import method_class
    from onea.research.methods.adapter_merging import AdapterMerging

    if not issubclass(method_class(config.method), AdapterMerging):
        return config.key()
    names = {item.name for item in dataclasses.fields(AdapterTraining)}
    options = {name: value for name, value in config.options.items() if name in names}
    return json.dumps(dataclasses.asdict(config) | {"method": None, "options": options}, sort_keys=True)


def first_of_each_training(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """The first run of each group with the same training, which trains if adapters are shared."""
    firsts: dict[str, RunConfig] = {}
    for config in configs:
        firsts.setdefault(_training_key(config), config)
    return list(firsts.values())


def group_by_training(jobs: Sequence[RunJob]) -> list[list[RunJob]]:
    """The jobs in groups with the same training."""
    groups: dict[str, list[RunJob]] = {}
    for job in jobs:
        groups.setdefault(_training_key(job.config), []).append(job)
    return list(groups.values())


def with_adapter_caches(jobs: Sequence[RunJob]) -> Iterator[tuple[RunJob, AdapterCache | None]]:
    """The jobs ordered by training, each with the cache of its training, or None if no other job has that training."""
    from onea.learner.merged_adapter import AdapterCache

    for group in group_by_training(jobs):
        adapter_cache = AdapterCache() if len(group) > 1 else None
        yield from ((job, adapter_cache) for job in group)


_FAILURE = "failure.json"


@dataclass(frozen=True)
class Failure:
    """The reason why a run did not finish.

    Attributes:
        error: one sentence; the result of ``str``.
        details: traceback of an unexpected error.
        attempts: number of attempts in the grid.
        date: date of the last attempt.
    """

    error: str
    details: str = ""
    attempts: int = 1
    date: str = ""

    def __str__(self) -> str:
        return self.error


class RecordStore:
    """A folder with one folder per configuration. Reading never raises: a damaged record counts as failed.

    Attributes:
        root: the folder; it need not exist yet.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def folder(self, config: RunConfig) -> Path:
        """The folder of this configuration's run."""
        return self.root / config.folder().name

    def find(self, config: RunConfig) -> Record | None:
        """The record of this configuration, if its run is finished."""
        with suppress(OneaError):
            return self._read_finished(config)
        return None

    def failure(self, config: RunConfig) -> Failure | None:
        """Why the last attempt at this configuration failed; None if it is finished, unfinished or missing."""
        path = self.folder(config) / _FAILURE
        try:
            if self._read_finished(config) or not path.exists():
                return None
        except OneaError as error:
            return Failure(str(error))
        try:
            content = read_json(path)
            texts = {name: str(content[name]) for name in ("error", "details", "date")}
            return Failure(**texts, attempts=int(content["attempts"]))
        except (ValueError, KeyError, TypeError, OverflowError):
            return Failure(f"The run failed, and the reason in {path} cannot be read; run it again.")

    def records(self) -> Iterator[Record]:
        """All finished records below the root, sorted by path; other files are skipped."""
        for path in find_record_files(self.root):
            try:
                record = read_record(path.parent)
            except OneaError:
                continue
            if record and is_reportable(record) and record["status"] == "finished":
                yield record

    def save(self, result: Result) -> Record | Failure:
        """Write the result of a job: its record, if it comes from another machine, or why it failed."""
        config, failure = result.job.config, result.failure
        if failure is None:
            if result.record is not None and self.find(config) is None:
                write_record(self.folder(config), result.record)
            if record := self.find(config):
                (self.folder(config) / _FAILURE).unlink(missing_ok=True)
                return record
            failure = Failure(f"The run ended without a record in {self.folder(config)}; run it again.")
        content = asdict(failure) | {"date": failure.date or utc_timestamp(), "config": config.identity()}
        with suppress(OneaError):  # the other runs continue even if this cannot be written
            write_json(self.folder(config) / _FAILURE, content)
        return failure

    def _read_finished(self, config: RunConfig) -> Record | None:
        """The record in the configuration's folder, if it is finished; raises for a damaged one or another run's."""
        from onea.research.runs.reuse import check_same_run

        folder = self.folder(config)
        record = read_record(folder)
        if record is None:
            return None
        if not is_reportable(record):
            raise OneaError(f"{record_path(folder)} is not the record of a run; delete that folder to run it again.")
        check_same_run(record, config, folder)
        return record if record["status"] == "finished" else None


class InProcess(Executor):
    """One run after the other, in this process."""

    def __init__(self, share_adapters: bool = False) -> None:
        self.share_adapters = share_adapters

    def run(self, jobs: Sequence[RunJob], on_progress: OnProgress = ignore_progress) -> Generator[Result, None, None]:
        """Yield results in the order of the jobs, or ordered by training where adapters are shared."""
        for job, adapter_cache in with_adapter_caches(jobs) if self.share_adapters else ((job, None) for job in jobs):
            yield run_job(job, on_progress, adapter_cache)


class GridProgress:
    """Callbacks of a grid, which do nothing by default; a display overrides them."""

    def start(self, configs: Sequence[RunConfig], finished: Sequence[RunConfig]) -> None:
        """The grid starts: its configurations without duplicates, and those that were already finished."""

    def advance(self, config: RunConfig, task: int, tasks: int) -> None:
        """A run has learned this many of its tasks; (0, 0) whenever it starts or is retried."""

    def end(self, config: RunConfig, result: Record | Failure) -> None:
        """A run has finished or failed."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of each configuration of a grid.

    Attributes:
        finished: finished by this grid.
        failed: failed, or finished before with other images, weights or presets. The next grid retries them.
        skipped: already finished.
        failures: reasons of the failed runs, by the key of the configuration.
    """

    finished: tuple[RunConfig, ...]
    failed: tuple[RunConfig, ...]
    skipped: tuple[RunConfig, ...]
    failures: Mapping[str, Failure] = field(default_factory=dict)


def run_grid(
    configs: Sequence[RunConfig],
    store: RecordStore,
    executor: Executor | None = None,
    progress: GridProgress | None = None,
) -> Outcome:
    """Execute all runs that the store lacks. Ctrl-C terminates all runs and is re-raised; finished tasks are kept."""
    from onea.research.runs.reuse import InputChecker

    executor, progress, checker = executor or InProcess(), progress or GridProgress(), InputChecker()
    unique: dict[str, RunConfig] = {}
    for config in configs:
        unique.setdefault(config.key(), config)
    finished: list[RunConfig] = []
    skipped: list[RunConfig] = []
    failures: dict[str, Failure] = {}
    jobs: list[RunJob] = []
    for key, config in unique.items():
        record = store.find(config)
        if record is None:
            jobs.append(RunJob(config, store.folder(config).absolute()))
            continue
        try:
            checker.check(record, config, store.folder(config))
            skipped.append(config)
        except OneaError as error:
            failures[key] = Failure(str(error))
    progress.start(list(unique.values()), skipped)
    for key, failure in failures.items():
        progress.end(unique[key], failure)
    results = executor.run(jobs, lambda job, task, tasks: progress.advance(job.config, task, tasks))
    with closing(results):  # terminates the workers after an error here
        for result in results:
            config, outcome = result.job.config, store.save(result)
            if isinstance(outcome, Failure):
                failures[config.key()] = outcome
            else:
                finished.append(config)
            progress.end(config, outcome)
    return Outcome(tuple(finished), tuple(unique[key] for key in failures), tuple(skipped), failures)
