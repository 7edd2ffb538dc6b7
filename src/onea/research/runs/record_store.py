# SPDX-License-Identifier: Apache-2.0
"""All records of a grid in one folder, found by the content of their configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from onea.errors import OneaError
from onea.files import read_json, write_json
from onea.research.record import Record, read_record, record_path, records_below, write_record
from onea.research.record_shape import can_be_shown
from onea.research.runs.config import RunConfig
from onea.text import now

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
        for path in records_below(self.root):
            try:
                record = read_record(path.parent)
            except OneaError:
                continue
            if record and can_be_shown(record) and record["status"] == "finished":
                yield record

    def add(self, config: RunConfig, record: Record) -> None:
        """Keep a record that was made elsewhere, such as on another machine of a cluster."""
        write_record(self.folder(config), record)

    def note_failure(self, config: RunConfig, failure: Failure) -> None:
        """Keep the reason beside whatever the run has left; finished tasks stay and are not learned again."""
        noted = asdict(failure) | {"date": failure.date or now(), "config": config.identity()}
        write_json(self.folder(config) / FAILURE, noted)

    def forget_failure(self, config: RunConfig) -> None:
        """The run has finished after all."""
        (self.folder(config) / FAILURE).unlink(missing_ok=True)

    def _look(self, config: RunConfig) -> tuple[Record | None, str | None]:
        """The record in the configuration's folder, or what is wrong with it."""
        from onea.research.runs.record import check_same_run

        folder = self.folder(config)
        try:
            record = read_record(folder)
            if record is None:
                return None, None
            if not can_be_shown(record):
                file = record_path(folder)
                raise OneaError(f"{file} is not the record of a run; delete that folder to run it again.")
            check_same_run(record, config, folder)
        except OneaError as error:
            return None, str(error)
        return record, None
