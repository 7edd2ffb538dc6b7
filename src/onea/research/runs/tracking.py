# SPDX-License-Identifier: Apache-2.0
"""Logging of a run to TensorBoard, Weights & Biases, MLflow and the other trackers that Accelerate supports."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onea.errors import OneaError, did_you_mean, import_extra, install_command
from onea.research.record import Record
from onea.research.record_metrics import headline_metrics
from onea.runtime import Progress

_PROJECT = "onea"
# The argument for the name of a run; other trackers choose the name themselves.
_RUN_NAME = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "swanlab": "experiment_name"}


class Tracking(Progress):
    """Logs the configuration of a run, the loss of every epoch and the results of every task.

    The step of all curves counts epochs and evaluations, because some trackers require an increasing step. A tracker
    that fails is dropped with a message, and the run continues.

    Args:
        names: Accelerate's names of trackers; ``all`` means all that are installed.
        folder: folder of the run, whose name becomes the name of the run.
        logs: folder for trackers that write files; by default ``tracking`` in the run's folder.
    """

    def __init__(self, names: Iterable[str], folder: Path, logs: Path | None = None) -> None:
        self._names = check_trackers(names)
        self._run, self._logs = folder.name, logs or folder / "tracking"
        self._trackers: dict[str, Any] = {}
        self._record: Record = {}
        self._step = 0

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *error: object) -> None:
        self._call_all("finish")

    def begin(self, record: Record) -> None:
        """Start the trackers and log the configuration."""
        self._record = record
        self._step = sum(len(task.get("losses", [])) + 1 for task in record["tasks"])
        self._trackers = {name: self._start(name) for name in self._names}
        self._call_all("store_init_configuration", flat_parameters(record))

    def end_epoch(self, epoch: int, loss: float) -> None:
        """Log the loss."""
        self._log({"train/loss": loss})

    def end_task(self, task: int, accuracy: float) -> None:
        """Log the results of the task."""
        metrics = headline_metrics([self._record], machine_dependent=False)
        values = {f"test/{key}": metric.value(self._record) for key, metric in metrics.items()}
        times = {f"time/{name}": seconds[-1] for name, seconds in self._record["timings"].items()}
        classes = sum(learned["classes"] for learned in self._record["tasks"])
        self._log({**values, **times, "stream/task": task + 1, "stream/classes": classes})

    def _log(self, values: dict[str, float | None]) -> None:
        self._step += 1
        self._call_all("log", {name: value for name, value in values.items() if value is not None}, step=self._step)

    def _start(self, name: str) -> Any:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        try:
            if tracker_class.requires_logging_directory:
                tracker = tracker_class(self._run, logging_dir=str(self._logs))
            else:
                tracker = tracker_class(_PROJECT, **({_RUN_NAME[name]: self._run} if name in _RUN_NAME else {}))
            if hasattr(tracker, "start"):  # in earlier versions of Accelerate the constructor starts it
                tracker.start()
        except Exception as error:  # a service or its library may raise anything
            raise OneaError(
                f"Tracker '{name}' could not be started ({_one_line(error)}); configure it, or leave out --track."
            ) from error
        return tracker

    def _call_all(self, name: str, *arguments: Any, **keywords: Any) -> None:
        """Call a method of every tracker."""
        for tracker_name, tracker in list(self._trackers.items()):
            try:
                getattr(tracker, name)(*arguments, **keywords)
            except Exception as error:  # the run must not fail because a service is down
                del self._trackers[tracker_name]
                print(f"tracker '{tracker_name}' failed and is dropped: {_one_line(error)}", file=sys.stderr)


def check_trackers(names: Iterable[str]) -> list[str]:
    """The names without duplicates, with ``all`` expanded; refuses a tracker that is unknown or not installed."""
    requested = list(dict.fromkeys(names))
    if not requested:
        return []
    tracking = import_extra("accelerate.tracking", "research")
    supported = {str(kind.value) for kind in tracking.LoggerType}
    installed = [str(kind.value) for kind in tracking.get_available_trackers()]
    for name in requested:
        if name not in supported:
            raise OneaError(f"There is no tracker '{name}'; {did_you_mean(name, supported)}")
        if name != "all" and name not in installed:
            command = install_command(name) if name == "tensorboard" else f"pip install {name}"
            raise OneaError(f"Tracker '{name}' is not installed; install it with: {command}")
    if "all" in requested and not installed:
        raise OneaError(f"No tracker is installed; install one, such as: {install_command('tensorboard')}")
    return installed if "all" in requested else requested


def flat_parameters(record: Record) -> dict[str, bool | int | float | str]:
    """The configuration of a run without nesting, in types that every tracker supports, and without None."""
    flat = {name: value for name, value in record["config"].items() if name != "options"}
    flat |= {f"options.{name}": value for name, value in record["options"].items()}
    flat |= {f"runtime.{name}": value for name, value in record["runtime"].items()}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in flat.items()
        if value is not None
    }


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
