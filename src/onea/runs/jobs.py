# SPDX-License-Identifier: Apache-2.0
"""One run of a grid as a job: its configuration, its result, and who makes it."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onea.errors import OneaError
from onea.record import Record
from onea.runs.config import RunConfig
from onea.runs.store import Failure

if TYPE_CHECKING:
    from onea.methods.adapter_merging import AdapterMemo


@dataclass(frozen=True)
class Job:
    """A run to be made, and its folder as an absolute path: workers may stand elsewhere."""

    config: RunConfig
    folder: Path


@dataclass(frozen=True)
class Result:
    """A run that is over. ``record`` may be None without a failure: it lies in the folder."""

    job: Job
    failure: Failure | None = None
    record: Record | None = None


OnProgress = Callable[[Job, int, int], None]  # a job has learned so many of its tasks; (0, 0) when it begins


def ignore_progress(job: Job, task: int, tasks: int) -> None:
    """Tell nobody."""


class Executor(ABC):
    """Makes runs."""

    @abstractmethod
    def run(self, jobs: Sequence[Job], tell: OnProgress = ignore_progress) -> Generator[Result, None, None]:
        """Results as they finish, one for each job. Closing the generator ends whatever it has started."""


def run_job(job: Job, tell: OnProgress, memo: AdapterMemo | None = None) -> Result:
    """Make a run in this process; an error becomes part of the result."""
    try:
        return Result(job, record=_perform(job, tell, memo))
    except OneaError as error:
        return Result(job, Failure(str(error)))
    except Exception as error:
        return Result(job, Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))


def _perform(job: Job, tell: OnProgress, memo: AdapterMemo | None) -> Record:
    from onea.runs.engine import run
    from onea.runtime import Progress

    class Listener(Progress):
        def start_task(self, task: int, tasks: int, name: str) -> None:
            tell(job, task, tasks)

    # Two grids may share a run: the second waits at it, and then finds it finished.
    return run(job.config, job.folder, Listener(), memo, wait=True)
