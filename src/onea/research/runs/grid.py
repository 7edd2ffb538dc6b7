# SPDX-License-Identifier: Apache-2.0
"""Many runs: none twice, none lost, and one that fails does not stop the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

from onea.errors import OneaError
from onea.research.record import Record
from onea.research.runs.config import RunConfig
from onea.research.runs.executors import InProcess
from onea.research.runs.jobs import Executor, Result, RunJob
from onea.research.runs.record_store import Failure, RecordStore


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
    from onea.research.runs.inputs import Inputs

    inputs, found = Inputs(), {}
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
            store.forget_failure(config)
            return record
        failure = Failure(f"The run ended without a record in {store.folder(config)}; run it again.")
    with suppress(OneaError):  # where not even that can be written, the others still go on
        store.note_failure(config, failure)
    return failure
