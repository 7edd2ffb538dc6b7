# SPDX-License-Identifier: Apache-2.0
"""What the runs of an experiment will cost, in images that go through the network."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onea.paper.facts import DataFacts
    from onea.runs.config import RunConfig
    from onea.streams import Stream


@dataclass(frozen=True)
class Cost:
    """Image-steps of a run, estimated.

    Attributes:
        training: images forward and backward, once for each epoch.
        evaluation: images forward only, once for each pass that the method needs.
    """

    training: int
    evaluation: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.training + other.training, self.evaluation + other.evaluation)


def estimate(config: RunConfig, facts: DataFacts) -> Cost:
    """What a run will cost, from its stream, its epochs and the dataset's counts."""
    from onea.methods import method_class
    from onea.options import build
    from onea.paper.scale import preset_values

    stream = stream_of(config, facts)
    images = _images_per_task(config, stream, facts)
    kind = method_class(config.method)
    options: Any = build(kind.Options, preset_values(config) | config.options)
    epochs = kind.epochs(options, stream.sizes)
    tested = accumulate(sum(facts.test[stream.class_order[p]] for p in stream.range_of(t)) for t in range(stream.tasks))
    return Cost(
        sum(count * times for count, times in zip(images, epochs, strict=True)),
        round(sum(count * kind.passes(options, task + 1) for task, count in enumerate(tested))),
    )


def stream_of(config: RunConfig, facts: DataFacts) -> Stream:
    """The stream of a run of this package, as the run itself will make it."""
    from onea.streams import make_stream
    from onea.task_sizes import parse_sizes

    return make_stream(
        classes=facts.classes,
        tasks=config.tasks,
        kind="step" if config.stream == "auto" else config.stream,
        gamma=config.gamma,
        sizes=parse_sizes(config.sizes) if config.sizes else None,
        order=config.order,
        seed=config.seed,
        long_tail=config.long_tail,
        n_max=min(max(facts.train), config.per_class or max(facts.train)),
    )


def _images_per_task(config: RunConfig, stream: Stream, facts: DataFacts) -> list[int]:
    def of(position: int) -> int:
        limits = [facts.train[stream.class_order[position]]]
        limits += [config.per_class] if config.per_class is not None else []
        limits += [stream.samples[position]] if stream.samples else []
        return min(limits)

    return [sum(of(position) for position in stream.range_of(task)) for task in range(stream.tasks)]
