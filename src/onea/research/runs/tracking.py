# SPDX-License-Identifier: Apache-2.0
"""A run's losses and results in TensorBoard, Weights & Biases, MLflow and whatever else Accelerate can write to."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from onea.errors import OneaError, did_you_mean, import_extra, install_command
from onea.research.record import Record
from onea.research.record_metrics import headline_metrics
from onea.runtime import Progress

_PROJECT = "onea"
# How each tracker calls the name of a single run; the others find one themselves.
_RUN_NAME = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "swanlab": "experiment_name"}


class Tracking(Progress):
    """Logs a run to trackers: the loss of every epoch, the results of every task, the configuration as parameters.

    All curves share one axis that only grows, since some trackers insist on it: it counts epochs and evaluations.
    A tracker that fails is given up with one line on the screen; the run goes on.

    Args:
        names: Accelerate's own names of trackers; ``all`` stands for every one that is installed.
        folder: of the run; its name is what trackers call the run.
        logs: folder for the files of trackers that write files; by default one inside the run's.
    """

    def __init__(self, names: Iterable[str], folder: Path, logs: Path | None = None) -> None:
        self._names = check_trackers(names)
        self._run, self._logs = folder.name, logs or folder / "tracking"
        self._trackers: dict[str, Any] = {}
        self._record: Record = {}
        self._step = 0

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._each("finish")

    def begin(self, record: Record) -> None:
        """Start the trackers, and tell them what is run."""
        self._record = record
        self._step = sum(len(task.get("losses", [])) + 1 for task in record["tasks"])
        for name in self._names:
            self._trackers[name] = self._start(name)
        self._each("store_init_configuration", parameters(record))

    def end_epoch(self, epoch: int, loss: float) -> None:
        """Log the loss."""
        self._log({"train/loss": loss})

    def end_task(self, task: int, accuracy: float) -> None:
        """Log what the record has gained."""
        metrics = headline_metrics([self._record], machine_dependent=False)
        read = {f"test/{key}": metric.value(self._record) for key, metric in metrics.items()}
        values = {name: value for name, value in read.items() if value is not None}
        times = {f"time/{name}": seconds[-1] for name, seconds in self._record["timings"].items()}
        classes = sum(each["classes"] for each in self._record["tasks"])
        self._log({**values, **times, "stream/task": task + 1, "stream/classes": classes})

    def _log(self, values: dict[str, float]) -> None:
        self._step += 1
        self._each("log", values, step=self._step)

    def _start(self, name: str) -> Any:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        kind = LOGGER_TYPE_TO_CLASS[name]
        try:
            if kind.requires_logging_directory:
                tracker = kind(self._run, logging_dir=str(self._logs))
            else:
                tracker = kind(_PROJECT, **({_RUN_NAME[name]: self._run} if name in _RUN_NAME else {}))
            if hasattr(tracker, "start"):  # older ones start when they are made
                tracker.start()
        except Exception as error:  # whatever a service or its library may raise
            raise OneaError(f"Tracker '{name}' does not start ({_line(error)}); set it up, or drop --track.") from error
        return tracker

    def _each(self, what: str, *arguments: Any, **named: Any) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                getattr(tracker, what)(*arguments, **named)
            except Exception as error:  # a service that is down must not cost a run
                del self._trackers[name]
                print(f"tracker '{name}' failed and is given up: {_line(error)}", file=sys.stderr)


def check_trackers(names: Iterable[str]) -> list[str]:
    """The trackers, each once; raises where one is unknown or not installed."""
    wanted = list(dict.fromkeys(names))
    if not wanted:
        return []
    tracking = import_extra("accelerate.tracking", "research")
    known = {str(kind.value) for kind in tracking.LoggerType}
    here = [str(kind.value) for kind in tracking.get_available_trackers()]
    for name in wanted:
        if name not in known:
            raise OneaError(f"There is no tracker '{name}'; {did_you_mean(name, known)}")
        if name != "all" and name not in here:
            how = install_command(name) if name == "tensorboard" else f"pip install {name}"
            raise OneaError(f"Tracker '{name}' is not installed; install it with: {how}")
    if "all" in wanted and not here:
        raise OneaError(f"No tracker is installed; install one, such as: {install_command('tensorboard')}")
    return here if "all" in wanted else wanted


def parameters(record: Record) -> dict[str, bool | int | float | str]:
    """The configuration of a run, flat, in types that every tracker takes; what is not set is left out."""
    flat = {name: value for name, value in record["config"].items() if name != "options"}
    flat |= {f"options.{name}": value for name, value in record["options"].items()}
    flat |= {f"runtime.{name}": value for name, value in record["runtime"].items()}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in flat.items()
        if value is not None
    }


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
