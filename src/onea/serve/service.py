# SPDX-License-Identifier: Apache-2.0
"""A model folder that answers, learns and goes back, one version at a time; knows nothing of HTTP."""

from __future__ import annotations

import inspect
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
from onea.model.learning.background import learn_background
from onea.model.learning.images import DecodedImages
from onea.model.learning.update import learn
from onea.model.learning.update_images import checked_classes
from onea.model.sentences import PhotoReport, advice, told
from onea.model.state import State
from onea.model.storage.erasure import erased
from onea.model.storage.folder import Manifest, Undone, change, read_id, read_manifest, read_state, undo
from onea.serve.problems import Problem, of_folder, unexpected
from onea.serve.settings import Settings
from onea.serve.training_jobs import Abandoned, TrainingJob

_REMEMBERED = 50  # training jobs
_ABANDONED_SECONDS = 1.0  # in which an abandoned training job should have stopped
_TICK = 0.05
Result = TypeVar("Result")


@dataclass(frozen=True)
class Present:
    """The version that answers now; replaced whole, never changed.

    Attributes:
        snapshot: answers.
        manifest: what the model folder said when it was read.
    """

    snapshot: Snapshot
    manifest: Manifest

    @property
    def state(self) -> State:
        """All that it knows."""
        return self.snapshot.state


class Service:
    """One model folder being served.

    A new version is complete on disk before it answers, so whatever happens the folder is what clients last saw, or the
    version before it.

    Args:
        path: the model folder.
        settings: how to behave.
        machine: device, threads, unknown and the like, as ``onea.load`` takes them; None is left to the model.
    """

    def __init__(self, path: Path, settings: Settings, machine: Mapping[str, Any] | None = None) -> None:
        self.path, self.settings = path.resolve(), settings
        model = load_for(self.path, **(machine or {}))
        snapshot = model.snapshot()
        self._engine, self._defaults = snapshot.engine, model.get_params()
        self._unknown = (machine or {}).get("unknown")
        self._present = Present(snapshot, read_manifest(self.path))
        self._changing, self._swapping = threading.Lock(), threading.Lock()
        self._jobs: OrderedDict[str, TrainingJob] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None  # for what goes on while it is being stopped

    @property
    def present(self) -> Present:
        """The version that answers now."""
        return self._present

    @property
    def side(self) -> int:
        """Side of the squares that images are read as."""
        return self._engine.side

    @property
    def learning(self) -> bool:
        """Whether a training job or an undo is going on."""
        return self._changing.locked()

    # learning

    def teach(self, batch: DecodedImages, name: str | None = None, *, background: bool = False) -> TrainingJob:
        """Learn these classes, or that ``background`` is none of them, in a thread; returns once that has begun.

        Raises:
            OneaError: the classes cannot be learned as they are.
            Problem: another training job is going on, or the model folder cannot be written.
        """
        if background:
            self._present.snapshot.check_taught()
        classes = [] if background else checked_classes(batch, self._present.state)
        self._take_turn()
        job = TrainingJob(classes, len(batch), batch.skipped)
        try:
            self._remember(job)
            self._thread = threading.Thread(
                target=self._learn, args=(job, batch, name, background), name="onea-training", daemon=True
            )
            self._thread.start()
        except BaseException:
            self._changing.release()
            raise
        job.settled.wait()
        if job.error and not job.began:  # the client hears it at once; of whatever fails later, the job tells
            raise job.error
        return job

    def job(self, id: str) -> TrainingJob:
        """A training job by its name."""
        if (found := self._jobs.get(id)) is None:
            raise Problem(404, "There is no such training job; it may have been before the service was started.")
        return found

    def undo(self) -> tuple[Undone, State]:
        """Go back to before the last update; returns what was undone and what answers now."""
        return self._changed(lambda: undo(self.path), lambda found: found[1])

    def forget(self, names: Sequence[str], everywhere: bool = False) -> State:
        """No longer answer these classes, perhaps without a way back; returns what answers now."""
        if everywhere:
            return self._edited(lambda state, version, date: erased(state, names, version, date), keep=0)
        return self._edited(lambda state, version, date: state.without(names, version, date))

    def rename(self, old: str, new: str, merge: bool = False) -> State:
        """Call a class by another name, or make two one; returns what answers now."""

        def next_state(state: State, version: int, date: str) -> State:
            return (state.joined if merge else state.renamed)(old, new, version, date)

        return self._edited(next_state)

    def refuse_while_busy(self) -> None:
        """Refuse early what would be refused later, before a large upload is read."""
        if self.learning:
            raise Problem(409, "The model is being taught right now; wait until that is done.", {"Retry-After": "5"})

    def refresh(self) -> None:
        """Take over what another process did to the model folder; what cannot be read now is left for the next time."""
        with suppress(OneaError), self._swapping:
            self._take_over()

    # stopping

    @property
    def closing(self) -> bool:
        """Whether it is being stopped."""
        return self._deadline is not None

    @property
    def seconds_left(self) -> float:
        """What is left to requests and the training job while it is being stopped."""
        return math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def close(self, seconds: float) -> None:
        """Take no new requests; what has begun has so long to finish, or less if it had less before."""
        self._deadline = time.monotonic() + min(seconds, self.seconds_left)

    def settle(self) -> bool:
        """Wait for the current training job, and abandon it when no time is left; whether its thread has ended."""
        thread = self._thread
        while thread is not None and thread.is_alive() and self.seconds_left:
            thread.join(min(_TICK, self.seconds_left))  # a little at a time: what is left may become less
        self.abandon()
        if thread is None or self._deadline is None:
            return True
        thread.join(max(0.0, self._deadline + _ABANDONED_SECONDS - time.monotonic()))
        return not thread.is_alive()

    def abandon(self) -> None:
        """Do not finish the current training job; the model stays as it was."""
        for job in list(self._jobs.values()):
            job.abandon()

    # inside

    def _edited(self, how: Callable[[State, int, str], State], keep: int | None = None) -> State:
        """Make a change that needs no network; what is wrong with it is told before anything is touched."""
        how(self._present.state, self._present.manifest.versions.next, "")
        return self._changed(lambda: change(self.path, how, keep), lambda state: state)

    def _changed(self, act: Callable[[], Result], state_of: Callable[[Result], State]) -> Result:
        """Change the model folder at once, without a training job."""
        self._take_turn()
        try:
            with self._swapping:
                self._check_present(read_id(self.path, read_manifest(self.path).versions.present))
                found = act()
                self._swap(state_of(found), read_manifest(self.path))
            return found
        except OneaError as error:
            raise of_folder(error, self.path) from error
        finally:
            self._changing.release()

    def _take_turn(self) -> None:
        if not self._changing.acquire(blocking=False):
            self.refuse_while_busy()
            self._take_turn()  # it ended just now
        elif self.closing:
            self._changing.release()
            raise Problem(503, "The service is being stopped; try again in a moment.", {"Retry-After": "5"})

    def _take_over(self) -> None:
        manifest = read_manifest(self.path)
        if (
            manifest != self._present.manifest
            or read_id(self.path, manifest.versions.present) != self._present.state.id
        ):
            state = read_state(self.path, manifest.versions.present)
            self._engine.check_is(state.backbone)
            self._swap(state, manifest)

    def _check_present(self, id: str) -> None:
        """Refuse to change what no client has seen yet: another process put it in place of what answers."""
        if id != self._present.state.id:
            self._take_over()
            raise OneaError(
                f"{self.path} was changed by another process (version {self._present.state.version} is there now); "
                "look at what it knows and send this again."
            )

    def _learn(self, job: TrainingJob, batch: DecodedImages, name: str | None, background: bool) -> None:
        torch.set_num_threads(self._engine.runtime.threads)  # or it keeps those of a decomposition (see onea.tensors)
        outcome = self._learned(job, batch, name, background)
        self._changing.release()  # first, so that whoever hears of the end may teach again at once
        if isinstance(outcome, Problem):
            job.fail(outcome)
        else:
            state, report = outcome
            job.finish(state.version, [*told(state.updates[-1], report), *advice(state.classes, state.merged)])

    def _learned(
        self, job: TrainingJob, batch: DecodedImages, name: str | None, background: bool
    ) -> tuple[State, PhotoReport] | Problem:
        """The state that answers from now on and the photos that need a look, or why there is none."""
        report = PhotoReport()

        def next_state(state: State, version: int, date: str) -> State:
            nonlocal report
            with self._swapping:
                self._check_present(state.id)
                present = self._present
            job.start()
            params = self._defaults | present.manifest.params
            if background:
                job.note("looking at the background")
                seed, started = params["seed"], time.perf_counter()
                learned = learn_background(
                    present.snapshot, batch, version=version, name=name, seed=seed, started=started
                )
                job.save()
                return learned
            own = {key: params[key] for key in inspect.signature(learn).parameters if key in params}
            learned, report = learn(self._engine, state, batch, version=version, name=name, progress=job, **own)
            job.save()
            return learned

        try:
            state = change(self.path, next_state)
            with self._swapping:
                self._swap(state, read_manifest(self.path))
            return state, report
        except Abandoned as error:
            return error
        except OneaError as error:
            return of_folder(error, self.path)
        except Exception as error:
            return unexpected(error)

    def _swap(self, state: State, manifest: Manifest) -> None:
        unknown = manifest.params["unknown"] if self._unknown is None else self._unknown
        self._present = Present(Snapshot(self._engine, state, unknown), manifest)

    def _remember(self, job: TrainingJob) -> None:
        self._jobs[job.id] = job
        while len(self._jobs) > _REMEMBERED:
            self._jobs.popitem(last=False)
