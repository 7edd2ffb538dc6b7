# SPDX-License-Identifier: Apache-2.0
"""The options that a run's method gets: those of its preset, on the data that there are, and what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onea.learner.data_rule import DataShape
from onea.options import build
from onea.research.methods import method_class
from onea.research.methods.presets import preset_options
from onea.research.record import Record
from onea.research.runs.config import RunConfig
from onea.research.streams import Stream


def options_of(config: RunConfig, shape: DataShape) -> Any:
    """The options of a run's method on data of this shape: its preset, and what was asked for on top."""
    preset = preset_options(config.method, config.preset, shape, config.options)
    return build(method_class(config.method).Options, preset | config.options)


def images_per_task(config: RunConfig, stream: Stream, counts: Sequence[int]) -> list[int]:
    """Training images of each task of a run; ``counts`` are those of the dataset's classes, in its own order."""

    def left(position: int) -> int:
        count = counts[stream.class_order[position]]
        if config.holdout is not None:
            count -= max(1, round(config.holdout * count))
        limits = [limit for limit in (config.per_class, stream.samples and stream.samples[position]) if limit]
        return min(count, *limits) if limits else count

    return [sum(left(position) for position in stream.range_of(task)) for task in range(stream.tasks)]


def shape_of(config: RunConfig, stream: Stream, counts: Sequence[int]) -> DataShape:
    """What the rule of the default preset looks at."""
    return DataShape(sum(images_per_task(config, stream, counts)), stream.classes, stream.tasks)


def shape_in(record: Record) -> DataShape:
    """The shape that a record tells; older ones know only how many images there were before a long tail."""
    data, sizes = record["data"], record["stream"]["sizes"]
    return DataShape(data.get("task_images") or data["train_images"], sum(sizes), len(sizes))
