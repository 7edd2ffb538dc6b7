# SPDX-License-Identifier: Apache-2.0
"""How long a batch of images takes to answer, and how many are answered per second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from onea.bench.rows import Row, duration, rate
from onea.bench.timing import timed_in_turn

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
