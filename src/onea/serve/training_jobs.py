# SPDX-License-Identifier: Apache-2.0
"""A training job: one teaching request, from its decoded images to the new version."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence

from onea.runtime import Progress
from onea.serve.problems import Problem
from onea.serve.schemas import TrainingJobReport


class Abandoned(Problem):
    """The service is shutting down and the training job will not be finished."""

    def __init__(self) -> None:
        super().__init__(503, "The service was stopped during the training job; the model is unchanged.")


class TrainingJob(Progress):
    """The progress of a training job: the training thread reports it, any thread may read it.

    Attributes:
        id: identifier for clients; cannot be guessed.
        settled: event that is set once learning has begun or the job has failed.
        began: whether learning has begun.
        ended: event that is set once the job is done or has failed.
        error: problem because of which the job failed.
    """

    def __init__(self, classes: list[str], images: int, skipped: Sequence[str] = ()) -> None:
        self.id = secrets.token_urlsafe(12)
        self.settled, self.ended = threading.Event(), threading.Event()
        self.began = False
        self.error: Problem | None = None
        self._lock, self._started = threading.Lock(), time.monotonic()
        self._is_abandoned = self._is_saving = False
        self._report = TrainingJobReport(
            id=self.id,
            status="waiting",
            classes=classes,
            images=images,
            note="waiting for the model",
            done=0,
            total=0,
            seconds=0,
            version=None,
            detail=None,
            skipped=list(skipped),
            remarks=[],
        )

    def report(self) -> TrainingJobReport:
        """The current state."""
        with self._lock:
            if not self.ended.is_set():
                self._report.seconds = round(time.monotonic() - self._started, 1)
            return self._report.model_copy()

    def abandon(self) -> None:
        """Stop at the next step and leave the model unchanged, unless the new version is already being saved."""
        with self._lock:
            if self._is_saving:
                return
            self._is_abandoned = True
        # Reported at once, however long the current step takes: from here on nothing is saved.
        self.fail(Abandoned())

    # called by the training thread

    def start(self) -> None:
        """The model folder is locked and learning begins."""
        self.start_phase("reading the model")
        self.began = True
        self.settled.set()

    def start_epoch(self, epoch: int, epochs: int, images: int) -> None:
        """An epoch begins."""
        self._update(note=f"training, epoch {epoch + 1} of {epochs}", total=epochs * images)

    def step(self, images: int) -> None:
        """A training step is complete."""
        self._update(done=self._report.done + images)

    def start_phase(self, text: str) -> None:
        """Another step begins."""
        self._update(status="learning", note=text)

    def save(self) -> None:
        """The new version is about to be saved; from here on the job cannot be abandoned."""
        with self._lock:
            if self._is_abandoned:
                raise Abandoned()
            self._is_saving = True
        self.start_phase("saving")

    def finish(self, version: int, remarks: list[str]) -> None:
        """The job is done and the new version is current."""
        self._end(None, status="done", note="done", version=version, done=self._report.total, remarks=remarks)

    def fail(self, error: Problem) -> None:
        """The job failed and the model is unchanged. Only the first error is kept."""
        self._end(error, status="failed", note="failed", detail=error.detail)

    def _update(self, **changes: object) -> None:
        with self._lock:
            if self._is_abandoned:
                raise Abandoned()
            self._report = self._report.model_copy(update=changes)

    def _end(self, error: Problem | None, **changes: object) -> None:
        with self._lock:
            if self.ended.is_set():
                return
            seconds = round(time.monotonic() - self._started, 1)
            self._report = self._report.model_copy(update={**changes, "seconds": seconds})
            self.error = error
            self.ended.set()
        self.settled.set()
