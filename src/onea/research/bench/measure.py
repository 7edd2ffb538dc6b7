# SPDX-License-Identifier: Apache-2.0
"""The measurements of one column of the bench, through the product's own code."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from onea.learner.adapter_training import train_adapter
from onea.merging.operator import Sizes
from onea.research.bench.answering import AnswerFunction
from onea.research.bench.rows import Row, duration, rate
from onea.research.bench.timing import Timing, summarise, synchronise, timed
from onea.research.bench.workload import Workload
from onea.research.runs.evaluation import correct_per_class
from onea.research.runs.record import peak_memory
from onea.runtime import Progress

_LEAST_EPOCHS, _MOST_EPOCHS = 3, 60


def forget_peak(device: torch.device) -> None:
    """Let the peak of a GPU's memory begin anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_rows(column: str, batch: int, device: torch.device) -> Iterator[Row]:
    """The peak of a GPU's memory in training, since it was reset."""
    if device.type == "cuda":
        yield Row("peak memory", f"training, batch {batch}", column, peak_memory(device)["device"] / 1e6, "MB")


class EpochClock(Progress):
    """Notes when epochs begin; the device is idle at that moment."""

    def __init__(self, device: torch.device):
        self._device = device
        self.times: list[float] = []

    def start_epoch(self, epoch: int, epochs: int, images: int) -> None:
        """Note the time."""
        self.stop()

    def stop(self) -> None:
        """Note the time once everything asked for is done."""
        synchronise(self._device)
        self.times.append(time.perf_counter())


@dataclass(frozen=True)
class Measurements:
    """A workload and the name under which its figures appear."""

    name: str
    workload: Workload
    seconds: float

    def training(self) -> Iterator[Row]:
        """End to end from the stored bytes: augmentation, loss with the contrastive term, optimiser."""
        workload, task = self.workload, self.workload.prepared.task(0)
        device, batch = workload.runtime.device, workload.method.options.batch_size
        forget_peak(device)
        warm = self._epochs(2)[-1]
        count = min(max(round(self.seconds / warm), _LEAST_EPOCHS), _MOST_EPOCHS)
        yield rate("training", f"batch {batch}", self.name, len(task), summarise(self._epochs(count + 1)[1:]))
        yield from peak_rows(self.name, batch, device)

    def _epochs(self, count: int) -> list[float]:
        """Seconds of each epoch of one training."""
        workload, method, task = self.workload, self.workload.method, self.workload.prepared.task(0)
        clock = EpochClock(workload.runtime.device)
        options = replace(method.options, epochs=count, min_epochs=count, max_epochs=count)
        runtime = replace(workload.runtime, progress=clock)
        train_adapter(method.vit, method.learner.blank(task.seed, task.index), task, options, runtime, method.plan)
        clock.stop()
        return [end - start for start, end in zip(clock.times, clock.times[1:], strict=False)]

    def prototypes(self) -> Iterator[Row]:
        """Class means of a task."""
        method, task = self.workload.method, self.workload.prepared.task(0)
        timing = self._timed(lambda: method.prototypes_of(task, method.kept))
        yield rate("prototypes", "", self.name, len(task), timing)

    def answer(self, batch: int) -> AnswerFunction:
        """Scores of stored images."""
        method, images, rows = self.workload.method, self.workload.prepared.test.images, torch.arange(batch)
        return lambda: method.scores(images.plain(rows))

    def evaluation(self) -> Iterator[Row]:
        """The evaluation of a run over all test images."""
        prepared = self.workload.prepared
        count, class_ranges = len(prepared.test.rows), prepared.class_ranges(0)
        timing = self._timed(
            lambda: correct_per_class(self.workload.method, prepared.test, class_ranges, prepared.seed)
        )
        yield Row("evaluation", f"{count} images", self.name, timing.seconds, "s", timing.spread)

    def merge(self) -> Iterator[Row]:
        """One merge of two trained-looking adapters: the operator alone, and with what a run records of it."""
        method = self.workload.method
        generator = torch.Generator().manual_seed(0)
        old, new = (
            {
                name: torch.randn(value.shape, generator=generator).to(value)
                for name, value in method.kept.state_dict().items()
            }
            for _ in range(2)
        )
        sizes, operator = Sizes(40, 5, 4000, 500), method.learner.operator
        setting = f"{method.vit.depth} blocks, rank {method.options.rank}, float64"
        yield duration("merge", setting, self.name, self._timed(lambda: operator(old, new, sizes, {})))
        yield duration(
            "merge and record", setting, self.name, self._timed(lambda: operator(old, new, sizes, {}).report())
        )

    def _timed(self, action: object) -> Timing:
        assert callable(action)
        return timed(action, self.workload.runtime.device, self.seconds)
