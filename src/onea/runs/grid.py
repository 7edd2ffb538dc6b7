"""Many runs: none twice, none lost, and one that fails does not stop the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from onea.errors import OneaError
from onea.runs.config import RunConfig
from onea.runs.executors import Executor, InProcess
from onea.runs.jobs import Job, Result
from onea.runs.store import Failure, Record, RecordStore


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
    """What became of each configuration of a grid.

    Attributes:
        finished: run to the end by this grid.
        failed: could not be; ``RecordStore.failure`` says why, and the next grid tries them again.
        skipped: finished before.
    """

    finished: tuple[RunConfig, ...]
    failed: tuple[RunConfig, ...]
    skipped: tuple[RunConfig, ...]


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
    skipped = [config for config in unique.values() if store.find(config)]
    progress.start(list(unique.values()), skipped)
    done = {config.key() for config in skipped}
    jobs = [Job(config, store.folder(config).absolute()) for key, config in unique.items() if key not in done]
    finished: list[RunConfig] = []
    failed: list[RunConfig] = []
    results = executor.run(jobs, lambda job, task, tasks: progress.advance(job.config, task, tasks))
    with closing(results):  # whatever happens here, the executor ends what it has started
        for result in results:
            settled = _settle(result, store)
            (failed if isinstance(settled, Failure) else finished).append(result.job.config)
            progress.end(result.job.config, settled)
    return Outcome(tuple(finished), tuple(failed), tuple(skipped))


def _settle(result: Result, store: RecordStore) -> Record | Failure:
    """Bring the store up to date with a result."""
    config, failure = result.job.config, result.failure
    if failure is None:
        if result.record is not None and store.find(config) is None:
            store.add(config, result.record)
        if record := store.find(config):
            store.forget_failure(config)
            return record
        failure = Failure(f"The run ended without a record in {store.folder(config)}; run it again.")
    with suppress(OneaError):  # where not even that can be written, the others still go on
        store.note_failure(config, failure)
    return failure
