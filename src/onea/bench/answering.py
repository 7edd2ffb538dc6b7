# SPDX-License-Identifier: Apache-2.0
"""How long a batch of images takes to answer, how many are answered per second, and the same of plain timm."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onea.bench.rows import Row, duration, rate
from onea.bench.scene import Scene
from onea.bench.timing import timed_in_turn
from onea.vit.heads import cosine_scores

Answer = Callable[[], object]
_IN_FLIGHT = 8  # batches asked for before the host waits, as an evaluation does


def answering(answers: Mapping[str, Answer], batch: int, device: torch.device, seconds: float) -> Iterator[Row]:
    """The time of one request, and the speed with several in flight where the device works apart from the host.

    All columns take turns, because the differences between them are small.
    """
    setting = f"batch {batch}"
    alone = timed_in_turn(list(answers.values()), device, seconds)
    for column, timing in zip(answers, alone, strict=True):
        yield duration("inference", setting, column, timing)
    count, several = 1, alone
    if device.type != "cpu":
        count, several = _IN_FLIGHT, timed_in_turn([_several(answer) for answer in answers.values()], device, seconds)
    for column, timing in zip(answers, several, strict=True):
        yield rate("inference", setting, column, count * batch, timing)


def _several(answer: Answer) -> Answer:
    return lambda: [answer() for _ in range(_IN_FLIGHT)]


def timm_column(precision: str, compiled: bool) -> str:
    """The name of this baseline's column."""
    return f"timm {precision} {'compiled' if compiled else 'eager'}"


class TimmBaseline:
    """timm's forward pass with the weights, precision and input pipeline of a scene."""

    def __init__(self, scene: Scene, compiled: bool):
        self.scene = scene
        self.name = timm_column(scene.runtime.precision, compiled)
        network: Any = copy.deepcopy(scene.method.vit.vit)
        if compiled:  # as our own network is
            network = torch.compile(network, dynamic=False, fullgraph=True, mode="reduce-overhead")
        self.network: Any = network

    def answer(self, batch: int) -> Answer:
        """Scores of stored images, as our own inference gives them."""
        images, rows = self.scene.prepared.test.images, torch.arange(batch)
        prototypes = self.scene.method.prototypes

        def scores() -> Tensor:
            pixels = images.plain(rows)
            with torch.no_grad(), self.scene.runtime.autocast():
                features: Tensor = self.network(pixels)
            return cosine_scores(features.float(), prototypes)

        return scores
