"""One run of a grid as a job: what is to be done, what came of it, and the doing."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onea.errors import OneaError
from onea.runs.config import RunConfig
from onea.runs.record_file import Record
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


Tell = Callable[[Job, int, int], None]  # a job has learned so many of its tasks; (0, 0) when it begins


def tell_nobody(job: Job, task: int, tasks: int) -> None:
    """Nobody wants to know."""


def attempt(job: Job, tell: Tell, memo: AdapterMemo | None = None) -> Result:
    """Make a run in this process; an error becomes part of the result."""
    try:
        return Result(job, record=_perform(job, tell, memo))
    except OneaError as error:
        return Result(job, Failure(str(error)))
    except Exception as error:
        return Result(job, Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))


def _perform(job: Job, tell: Tell, memo: AdapterMemo | None) -> Record:
    from onea.runs.engine import run
    from onea.runtime import Progress

    class Listener(Progress):
        def start_task(self, task: int, tasks: int, name: str) -> None:
            tell(job, task, tasks)

    # Two grids may share a run: the second waits at it, and then finds it finished.
    return run(job.config, job.folder, Listener(), memo, wait=True)
