# SPDX-License-Identifier: Apache-2.0
"""Many runs: none twice, none lost, and one that fails does not stop the others."""

from __future__ import annotations

import dataclasses
import json
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from onea.errors import OUT_OF_MEMORY, OneaError, OutOfMemory, is_out_of_memory
from onea.files import read_json, write_json
from onea.research.record import Record, find_record_files, is_reportable, read_record, record_path, write_record
from onea.research.runs.config import RunConfig
from onea.text import utc_timestamp

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


def training_key(config: RunConfig) -> str | None:
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


def first_of_each_training(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """The runs that still train where adapters are shared: the first of each training, and all that share nothing."""
    firsts: dict[str, RunConfig] = {}
    for config in configs:
        firsts.setdefault(training_key(config) or config.key(), config)
    return list(firsts.values())


def group_by_training(jobs: Sequence[RunJob]) -> list[tuple[RunJob, ...]]:
    """The jobs in groups that train alike; those that share nothing are alone."""
    groups: dict[str, list[RunJob]] = {}
    for job in jobs:
        groups.setdefault(training_key(job.config) or job.config.key(), []).append(job)
    return [tuple(group) for group in groups.values()]


def with_adapter_caches(jobs: Sequence[RunJob]) -> Iterator[tuple[RunJob, AdapterCache | None]]:
    """The jobs, those that train alike one after the other, each with the adapters that it may share.

    One cache exists at a time: that of the jobs at hand, and none where only one job could use it.
    """
    from onea.learner.merged_adapter import AdapterCache

    for group in group_by_training(jobs):
        adapter_cache = AdapterCache() if len(group) > 1 else None
        yield from ((job, adapter_cache) for job in group)


FAILURE = "failure.json"

RunState = Literal["missing", "running", "finished", "failed"]


@dataclass(frozen=True)
class Failure:
    """The reason why a run did not finish.

    Attributes:
        error: one sentence; also what ``str`` gives.
        details: the trace of an error that nobody foresaw, for whoever repairs it.
        attempts: how often the run was tried in that grid.
        date: when it was given up.
    """

    error: str
    details: str = ""
    attempts: int = 1
    date: str = ""

    def __str__(self) -> str:
        return self.error


class RecordStore:
    """A folder with one folder per configuration. Reading never raises: what is spoilt counts as failed.

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
        record, _ = self._look(config)
        return record if record and record["status"] == "finished" else None

    def state(self, config: RunConfig) -> RunState:
        """How far this configuration is; ``running`` has finished tasks, whether or not somebody is at it just now."""
        record, problem = self._look(config)
        if record and record["status"] == "finished":
            return "finished"
        if problem or (self.folder(config) / FAILURE).exists():
            return "failed"
        return "running" if record else "missing"

    def failure(self, config: RunConfig) -> Failure | None:
        """Why the last attempt at this configuration failed, or None unless its state is ``failed``."""
        record, problem = self._look(config)
        if problem:
            return Failure(problem)
        path = self.folder(config) / FAILURE
        if (record and record["status"] == "finished") or not path.exists():
            return None
        try:
            noted = read_json(path)
            texts = {name: str(noted[name]) for name in ("error", "details", "date")}
            return Failure(**texts, attempts=int(noted["attempts"]))
        except (ValueError, KeyError, TypeError, OverflowError):
            return Failure(f"The run failed, and {path} no longer says why; run it again.")

    def records(self) -> Iterator[Record]:
        """All finished records anywhere below the root, ordered by path; other files are passed over."""
        for path in find_record_files(self.root):
            try:
                record = read_record(path.parent)
            except OneaError:
                continue
            if record and is_reportable(record) and record["status"] == "finished":
                yield record

    def add(self, config: RunConfig, record: Record) -> None:
        """Keep a record that was made elsewhere, such as on another machine of a cluster."""
        write_record(self.folder(config), record)

    def write_failure(self, config: RunConfig, failure: Failure) -> None:
        """Keep the reason beside whatever the run has left; finished tasks stay and are not learned again."""
        noted = asdict(failure) | {"date": failure.date or utc_timestamp(), "config": config.identity()}
        write_json(self.folder(config) / FAILURE, noted)

    def remove_failure(self, config: RunConfig) -> None:
        """The run has finished after all."""
        (self.folder(config) / FAILURE).unlink(missing_ok=True)

    def _look(self, config: RunConfig) -> tuple[Record | None, str | None]:
        """The record in the configuration's folder, or what is wrong with it."""
        from onea.research.runs.reuse import check_same_run

        folder = self.folder(config)
        try:
            record = read_record(folder)
            if record is None:
                return None, None
            if not is_reportable(record):
                file = record_path(folder)
                raise OneaError(f"{file} is not the record of a run; delete that folder to run it again.")
            check_same_run(record, config, folder)
        except OneaError as error:
            return None, str(error)
        return record, None


class InProcess(Executor):
    """One run after the other, here."""

    def __init__(self, share_adapters: bool = False) -> None:
        self.share_adapters = share_adapters

    def run(self, jobs: Sequence[RunJob], on_progress: OnProgress = ignore_progress) -> Generator[Result, None, None]:
        """Results in the order of the jobs, or, where adapters are shared, of their trainings."""
        for job, adapter_cache in with_adapter_caches(jobs) if self.share_adapters else ((job, None) for job in jobs):
            on_progress(job, 0, 0)
            yield run_job(job, on_progress, adapter_cache)


class GridProgress:
    """Listens to a grid. This one ignores everything; a display overrides what it shows."""

    def start(self, configs: Sequence[RunConfig], finished: Sequence[RunConfig]) -> None:
        """The grid begins: its configurations, each once, and those that an earlier grid has finished."""

    def advance(self, config: RunConfig, task: int, tasks: int) -> None:
        """A run has learned so many of its tasks; (0, 0) when it begins, and again when it is tried again."""

    def end(self, config: RunConfig, result: Record | Failure) -> None:
        """A run is over: its record, or why there is none."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of each configuration of a grid.

    Attributes:
        finished: run to the end by this grid.
        failed: could not be, or were finished before with other images, weights or presets than those of now;
            ``failures`` says why. The next grid tries them again.
        skipped: finished before.
        failures: by the key of the configuration.
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
    """Run what the store does not hold yet. Ctrl-C ends all runs and is raised again; finished tasks are kept."""
    executor, progress = executor or InProcess(), progress or GridProgress()
    unique: dict[str, RunConfig] = {}
    for config in configs:
        unique.setdefault(config.key(), config)
    outdated = _outdated(unique.values(), store)
    skipped = [config for key, config in unique.items() if key not in outdated and store.find(config)]
    progress.start(list(unique.values()), skipped)
    done = outdated.keys() | {config.key() for config in skipped}
    jobs = [RunJob(config, store.folder(config).absolute()) for key, config in unique.items() if key not in done]
    finished: list[RunConfig] = []
    failures = dict(outdated)
    for key, failure in outdated.items():
        progress.end(unique[key], failure)
    results = executor.run(jobs, lambda job, task, tasks: progress.advance(job.config, task, tasks))
    with closing(results):  # whatever happens here, the executor ends what it has started
        for result in results:
            settled = _settle(result, store)
            if isinstance(settled, Failure):
                failures[result.job.config.key()] = settled
            else:
                finished.append(result.job.config)
            progress.end(result.job.config, settled)
    return Outcome(tuple(finished), tuple(unique[key] for key in failures), tuple(skipped), failures)


def _outdated(configs: Iterable[RunConfig], store: RecordStore) -> dict[str, Failure]:
    """Finished runs that were made of something else than what is here now, each with what differs."""
    from onea.research.runs.reuse import InputChecker

    inputs, found = InputChecker(), {}
    for config in configs:
        if record := store.find(config):
            try:
                inputs.check(record, config, store.folder(config))
            except OneaError as error:
                found[config.key()] = Failure(str(error))
    return found


def _settle(result: Result, store: RecordStore) -> Record | Failure:
    """Bring the store up to date with a result."""
    config, failure = result.job.config, result.failure
    if failure is None:
        if result.record is not None and store.find(config) is None:
            store.add(config, result.record)
        if record := store.find(config):
            store.remove_failure(config)
            return record
        failure = Failure(f"The run ended without a record in {store.folder(config)}; run it again.")
    with suppress(OneaError):  # where not even that can be written, the others still go on
        store.write_failure(config, failure)
    return failure
