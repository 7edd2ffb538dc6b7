# SPDX-License-Identifier: Apache-2.0
"""How long a batch of images takes to answer, how many are answered per second, and the same of plain timm."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onea.research.bench.rows import Row, duration, rate
from onea.research.bench.timing import timed_in_turn
from onea.research.bench.workload import Workload
from onea.vit.fp8 import from_fp8
from onea.vit.heads import cosine_scores

AnswerFunction = Callable[[], object]
_IN_FLIGHT = 8  # batches asked for before the host waits, as an evaluation does


def answering(answers: Mapping[str, AnswerFunction], batch: int, device: torch.device, seconds: float) -> Iterator[Row]:
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


def _several(answer: AnswerFunction) -> AnswerFunction:
    return lambda: [answer() for _ in range(_IN_FLIGHT)]


def timm_column(precision: str, compiled: bool) -> str:
    """The name of this baseline's column; timm has no eight bits, so what is compared with fp8 is bf16.

    >>> timm_column("fp8", True)
    'timm bf16 compiled'
    """
    return f"timm {'bf16' if precision == 'fp8' else precision} {'compiled' if compiled else 'eager'}"


class TimmBaseline:
    """timm's forward pass with the weights, precision and input pipeline of a workload."""

    def __init__(self, workload: Workload, compiled: bool):
        self.workload = workload
        self.name = timm_column(workload.runtime.precision, compiled)
        network: Any = copy.deepcopy(workload.method.vit.vit)
        from_fp8(network)
        if compiled:  # as our own network is
            network = torch.compile(network, dynamic=False, fullgraph=True, mode="reduce-overhead")
        self.network: Any = network

    def answer(self, batch: int) -> AnswerFunction:
        """Scores of stored images, as our own inference gives them."""
        images, rows = self.workload.prepared.test.images, torch.arange(batch)
        prototypes = self.workload.method.prototypes

        def scores() -> Tensor:
            pixels = images.plain(rows)
            with torch.no_grad(), self.workload.runtime.autocast():
                features: Tensor = self.network(pixels)
            return cosine_scores(features.float(), prototypes)

        return scores
