# SPDX-License-Identifier: Apache-2.0
"""A served model folder: predictions, training jobs and undo, one version at a time; independent of HTTP."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from onea.errors import OneaError
from onea.model.answers import Snapshot
from onea.model.estimator import load_for
from onea.model.exemplars import count_images
from onea.model.learning.background import learn_background
from onea.model.learning.images import DecodedImages
from onea.model.learning.memory_report import memory_lines, waiting_classes
from onea.model.learning.refresh import refresh, refresh_lines
from onea.model.learning.update import UpdateSettings, learn
from onea.model.learning.update_images import class_names
from onea.model.reports import report_lines, training_advice
from onea.model.state import State
from onea.model.storage.erasure import erase
from onea.model.storage.folder import Manifest, Undone, change, read_id, read_manifest, read_state, undo
from onea.serve.problems import Problem, from_folder_error, unexpected
from onea.serve.settings import Settings
from onea.serve.training_jobs import Abandoned, TrainingJob

_MAX_JOBS = 50  # number of jobs whose reports are kept
_ABANDON_SECONDS = 1.0  # in which an abandoned training job should stop
_POLL_SECONDS = 0.05
Result = TypeVar("Result")


@dataclass(frozen=True)
class CurrentVersion:
    """The version that answers requests; immutable, replaced as a whole.

    Attributes:
        snapshot: predictions of the version.
        manifest: manifest of the model folder when it was last read.
    """

    snapshot: Snapshot
    manifest: Manifest

    @property
    def state(self) -> State:
        """Classes and statistics of the version."""
        return self.snapshot.state


@dataclass(frozen=True)
class Change:
    """What a training job needs to compute the next version.

    Attributes:
        current: the current version.
        version: number of the next version.
        params: parameters of the model.
        job: the training job.
    """

    current: CurrentVersion
    version: int
    params: Mapping[str, Any]
    job: TrainingJob


class _NotBetter(Exception):  # noqa: N818
    """A new version is not kept, because the earlier one is better."""

    def __init__(self, remarks: list[str]) -> None:
        self.remarks = remarks


class Service:
    """One served model folder.

    A new version is complete on disk before it answers, so after a crash the folder has the version that clients last
    saw, or the one before.

    Args:
        path: the model folder.
        settings: settings of the service.
        machine: arguments of ``onea.load`` such as device, threads and unknown; None means the default of the model.

    Attributes:
        current: the version that answers requests.
    """

    def __init__(self, path: Path, settings: Settings, machine: Mapping[str, Any] | None = None) -> None:
        self.path, self.settings = path.resolve(), settings
        model = load_for(self.path, **(machine or {}))
        snapshot = model.snapshot()
        self._engine, self._defaults = snapshot.engine, model.get_params()
        self._unknown = (machine or {}).get("unknown")
        self.current = CurrentVersion(snapshot, read_manifest(self.path))
        self._change_lock, self._swap_lock = threading.Lock(), threading.Lock()
        self._jobs: OrderedDict[str, TrainingJob] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None  # for requests and jobs during a shutdown
        self._last_change = time.monotonic()
        self._tried = ""  # the version for which a training in idle time was started

    @property
    def side(self) -> int:
        """Input size of the network in pixels."""
        return self._engine.side

    @property
    def learning(self) -> bool:
        """Whether a training job or another change is in progress."""
        return self._change_lock.locked()

    # learning

    def teach(
        self, batch: DecodedImages, name: str | None = None, *, background: bool = False, later: bool = False
    ) -> TrainingJob:
        """Start a training job for classes, or for ``background`` images of none of the classes.

        Returns once learning has begun. With ``later``, or if the service trains in idle time, the adapter is trained
        later.

        Raises:
            OneaError: the classes or images are invalid.
            Problem: another training job is running, or the model folder cannot be written.
        """
        if background:
            self.current.snapshot.check_has_classes()
            job = TrainingJob([], len(batch), batch.skipped)
            return self._start(job, lambda change: self._learn_background(change, batch, name))
        job = TrainingJob(class_names(batch, self.current.state), len(batch), batch.skipped)
        later = later or self.settings.idle_training > 0
        return self._start(job, lambda change: self._learn_classes(change, batch, name, later))

    def refresh(self) -> TrainingJob:
        """Start a training job on the stored copies of photos; a version that is not better is not kept.

        Raises:
            Problem: there are no copies of two classes, another training job is running, or the model folder cannot be
                written.
        """
        copies = self.current.state.exemplars
        if len(copies) < 2:
            raise Problem(
                422, "The model stores no copies of photos of two or more classes, so there is nothing to train on."
            )
        return self._start(TrainingJob([], count_images(copies)), self._refresh)

    def train_if_idle(self) -> None:
        """Start a training that is due, if nothing changed for the time in the settings."""
        state, seconds = self.current.state, self.settings.idle_training
        if not seconds or self.learning or self.closing or time.monotonic() - self._last_change < seconds:
            return
        trigger = float(state.options["trigger"])
        if state.exemplars and state.id != self._tried and waiting_classes(state).is_due(trigger):
            self._tried = state.id  # if the new version is not better, this one is not trained again
            with suppress(Problem, OneaError):
                self.refresh()

    def _start(self, job: TrainingJob, work: Callable[[Change], tuple[State, list[str]]]) -> TrainingJob:
        """Start a training job in a thread; returns once learning has begun."""
        self._acquire()
        try:
            self._jobs[job.id] = job
            while len(self._jobs) > _MAX_JOBS:
                self._jobs.popitem(last=False)
            self._thread = threading.Thread(target=self._run, args=(job, work), name="onea-training", daemon=True)
            self._thread.start()
        except BaseException:
            self._change_lock.release()
            raise
        job.settled.wait()
        if job.error and not job.began:  # reported at once; the job reports later failures
            raise job.error
        return job

    def job(self, id: str) -> TrainingJob:
        """A training job by its id."""
        if id not in self._jobs:
            raise Problem(404, "There is no such training job; it may be from an earlier run of the service.")
        return self._jobs[id]

    def undo(self) -> tuple[Undone, State]:
        """Undo the last update; returns what was undone and the current state."""
        return self._change(lambda: undo(self.path), lambda result: result[1])

    def forget(self, names: Sequence[str], everywhere: bool = False) -> State:
        """Remove classes, with ``everywhere`` also from earlier versions; returns the current state."""
        if everywhere:
            return self._edit(lambda state, version, date: erase(state, names, version, date), keep=0)
        return self._edit(lambda state, version, date: state.forget(names, version, date))

    def rename(self, old: str, new: str, merge: bool = False) -> State:
        """Rename a class, or merge two classes; returns the current state."""

        def next_state(state: State, version: int, date: str) -> State:
            return (state.merge_classes if merge else state.rename)(old, new, version, date)

        return self._edit(next_state)

    def refuse_while_busy(self) -> None:
        """Refuse a change during a training job, before a large upload is read."""
        if self.learning:
            raise Problem(409, "A training job is running; wait until it is done.", {"Retry-After": "5"})

    def reload(self) -> None:
        """Load a version that another process saved; a folder that cannot be read is tried again the next time."""
        with suppress(OneaError), self._swap_lock:
            self._load_current()

    # stopping

    @property
    def closing(self) -> bool:
        """Whether the service is shutting down."""
        return self._deadline is not None

    @property
    def seconds_left(self) -> float:
        """Time left for requests and the training job during a shutdown."""
        return math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def close(self, seconds: float) -> None:
        """Refuse new requests, and set the time left for those in progress; a later call can only shorten it."""
        self._deadline = time.monotonic() + min(seconds, self.seconds_left)

    def wait_for_job(self) -> bool:
        """Wait for the training job, and abandon it when no time is left; returns whether its thread has ended."""
        thread = self._thread
        while thread is not None and thread.is_alive() and self.seconds_left:
            thread.join(min(_POLL_SECONDS, self.seconds_left))  # repeatedly, because the time left may change
        self.abandon()
        if thread is None or self._deadline is None:
            return True
        thread.join(max(0.0, self._deadline + _ABANDON_SECONDS - time.monotonic()))
        return not thread.is_alive()

    def abandon(self) -> None:
        """Abandon the training job; the model is unchanged."""
        for job in list(self._jobs.values()):
            job.abandon()

    def _edit(self, next_state: Callable[[State, int, str], State], keep: int | None = None) -> State:
        """Make a change that needs no network; errors are raised before the folder is locked."""
        next_state(self.current.state, self.current.manifest.versions.next, "")
        return self._change(lambda: change(self.path, next_state, keep), lambda state: state)

    def _change(self, action: Callable[[], Result], get_state: Callable[[Result], State]) -> Result:
        """Change the model folder at once, without a training job."""
        self._acquire()
        try:
            with self._swap_lock:
                self._check_current(read_id(self.path, read_manifest(self.path).versions.current))
                result = action()
                self._swap(get_state(result), read_manifest(self.path))
            return result
        except OneaError as error:
            raise from_folder_error(error, self.path) from error
        finally:
            self._change_lock.release()

    def _acquire(self) -> None:
        """Acquire the lock for changes, or refuse."""
        if not self._change_lock.acquire(blocking=False):
            self.refuse_while_busy()
            self._acquire()  # it was released just now
        elif self.closing:
            self._change_lock.release()
            raise Problem(503, "The service is shutting down; try again in a moment.", {"Retry-After": "5"})

    def _load_current(self) -> None:
        manifest = read_manifest(self.path)
        current = manifest.versions.current
        if manifest != self.current.manifest or read_id(self.path, current) != self.current.state.id:
            state = read_state(self.path, current)
            self._engine.check_backbone(state.backbone)
            self._swap(state, manifest)

    def _check_current(self, id: str) -> None:
        """Refuse to change a version that another process saved and that no client has seen."""
        if id != self.current.state.id:
            self._load_current()
            raise OneaError(
                f"{self.path} was changed by another process and is now at version {self.current.state.version}; check "
                "its classes and send the request again."
            )

    def _run(self, job: TrainingJob, work: Callable[[Change], tuple[State, list[str]]]) -> None:
        torch.set_num_threads(self._engine.runtime.threads)  # otherwise possibly those set by a decomposition
        outcome = self._run_change(job, work)
        self._last_change = time.monotonic()
        self._change_lock.release()  # first, so that a client that sees the end can teach again at once
        if isinstance(outcome, Problem):
            job.fail(outcome)
        else:
            job.finish(self.current.state.version, outcome)

    def _run_change(self, job: TrainingJob, work: Callable[[Change], tuple[State, list[str]]]) -> list[str] | Problem:
        """Compute and save the next version; returns remarks on it, or why there is none."""
        remarks: list[str] = []

        def next_state(state: State, version: int, date: str) -> State:
            nonlocal remarks
            with self._swap_lock:
                self._check_current(state.id)
                current = self.current
            job.start()
            learned, remarks = work(Change(current, version, self._defaults | current.manifest.params, job))
            job.save()
            return learned

        try:
            state = change(self.path, next_state)
            with self._swap_lock:
                self._swap(state, read_manifest(self.path))
            return remarks
        except _NotBetter as error:
            return error.remarks
        except Abandoned as error:
            return error
        except OneaError as error:
            return from_folder_error(error, self.path)
        except Exception as error:
            return unexpected(error)

    def _learn_classes(
        self, change: Change, batch: DecodedImages, name: str | None, later: bool
    ) -> tuple[State, list[str]]:
        learned, report = learn(
            self._engine,
            change.current.state,
            batch,
            version=change.version,
            name=name,
            settings=UpdateSettings.from_params(change.params),
            later=later,
            progress=change.job,
        )
        remarks = [*report_lines(learned.updates[-1], report), *training_advice(learned)]
        return learned, remarks + memory_lines(learned, change.params["memory"])

    def _learn_background(self, change: Change, batch: DecodedImages, name: str | None) -> tuple[State, list[str]]:
        change.job.start_phase("reading the background images")
        seed, started = change.params["seed"], time.perf_counter()
        learned = learn_background(
            change.current.snapshot, batch, version=change.version, name=name, seed=seed, started=started
        )
        return learned, [*report_lines(learned.updates[-1]), *training_advice(learned)]

    def _refresh(self, change: Change) -> tuple[State, list[str]]:
        learned, report = refresh(
            self._engine,
            change.current.state,
            None,
            version=change.version,
            settings=UpdateSettings.from_params(change.params),
            progress=change.job,
        )
        if learned is None:
            raise _NotBetter(refresh_lines(report))
        return learned, [*refresh_lines(report), *memory_lines(learned, change.params["memory"])]

    def _swap(self, state: State, manifest: Manifest) -> None:
        unknown = manifest.params["unknown"] if self._unknown is None else self._unknown
        self.current = CurrentVersion(Snapshot(self._engine, state, unknown), manifest)
