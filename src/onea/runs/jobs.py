"""One run of a grid as a job: what is to be done, what came of it, and the doing."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onea.errors import OneaError
from onea.files import unwritable
from onea.runs.config import RunConfig
from onea.runs.store import Failure, Record

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

    with _alone_in(job.folder):
        return run(job.config, job.folder, Listener(), memo)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is at this run: two grids may share some, and the second then finds it finished.

    The system drops the lock with the process, however it ends, and nothing is left behind in the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, 0, error, "choose another folder") from error
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems do not lock folders
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
