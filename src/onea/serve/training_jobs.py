# SPDX-License-Identifier: Apache-2.0
"""A training job: one request to learn, from the moment its images are read until the new version answers."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

from onea.runtime import Progress
from onea.serve.problems import Problem

Status = Literal["waiting", "learning", "done", "failed"]


class Abandoned(Problem):
    """The service is being stopped and the training job is not going to be finished."""

    def __init__(self) -> None:
        super().__init__(503, "The service was stopped before the training job was over; nothing was changed.")


class TrainingJob(Progress):
    """The progress of a training job; the training reports it, any thread may read it.

    Attributes:
        id: names it to clients; cannot be guessed.
        settled: set once the model folder is ours and learning begins, or once that failed.
        began: whether learning did.
        ended: set once the training job is done or has failed.
        error: what went wrong.
    """

    def __init__(self, classes: list[str], images: int, skipped: Sequence[str] = ()) -> None:
        self.id = secrets.token_urlsafe(12)
        self.settled, self.ended = threading.Event(), threading.Event()
        self.began = False
        self.error: Problem | None = None
        self._lock, self._abandoned, self._started = threading.Lock(), False, time.monotonic()
        self._saving = False
        self._classes, self._images = classes, images
        self._status: Status = "waiting"
        self._note, self._done, self._total = "waiting for the model", 0, 0
        self._detail: str | None = None
        self._skipped, self._remarks = list(skipped), list[str]()
        self._version: int | None = None
        self._seconds: float | None = None

    def report(self) -> dict[str, Any]:
        """All there is to say now, as JSON-able values."""
        with self._lock:
            passed = self._seconds if self._seconds is not None else time.monotonic() - self._started
            return {
                "id": self.id,
                "status": self._status,
                "classes": self._classes,
                "images": self._images,
                "note": self._note,
                "done": self._done,
                "total": self._total,
                "seconds": round(passed, 1),
                "version": self._version,
                "detail": self._detail,
                "skipped": self._skipped,
                "remarks": self._remarks,
            }

    def abandon(self) -> None:
        """Stop at the next step; the model stays as it was, unless the new version is being saved already."""
        with self._lock:
            if self._saving:
                return
            self._abandoned = True
        # Told at once, however long the next step takes: from here on nothing is saved.
        self.fail(Abandoned())

    # what the training tells

    def start(self) -> None:
        """The model folder is ours."""
        self._set("learning", "reading the model")
        self.began = True
        self.settled.set()

    def start_epoch(self, epoch: int, epochs: int, images: int) -> None:
        """The first epoch says how much there is to do."""
        self._check()
        with self._lock:
            self._total = epochs * images
            self._note = f"training, round {epoch + 1} of {epochs}"

    def step(self, images: int) -> None:
        """Advance."""
        self._check()
        with self._lock:
            self._done += images

    def note(self, text: str) -> None:
        """Say what is going on besides training."""
        self._check()
        self._set("learning", text)

    def save(self) -> None:
        """The new version is about to be saved; from here on it is too late to abandon it."""
        with self._lock:
            if self._abandoned:
                raise Abandoned()
            self._saving = True
        self._set("learning", "saving")

    # how it ends

    def finish(self, version: int, remarks: list[str]) -> None:
        """The new version answers, and this is what there is to say about it."""
        with self._lock:
            self._version, self._done, self._remarks = version, self._total, remarks
        self._end("done")

    def fail(self, error: Problem) -> None:
        """Nothing was changed. A job that was abandoned has failed before."""
        self._end("failed", error)

    def _end(self, status: Status, error: Problem | None = None) -> None:
        with self._lock:
            if self._seconds is not None:
                return
            self._seconds = time.monotonic() - self._started
            self._status = self._note = status
            self.error, self._detail = error, error.detail if error else None
        self.ended.set()
        self.settled.set()

    def _set(self, status: Status, note: str) -> None:
        with self._lock:
            if self._seconds is None:
                self._status, self._note = status, note

    def _check(self) -> None:
        if self._abandoned:
            raise Abandoned()
