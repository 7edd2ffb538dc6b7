"""How long a batch of images takes to answer, and how many are answered per second."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from onea.bench.rows import Row, duration, rate
from onea.bench.timing import timed

_IN_FLIGHT = 8  # batches asked for before the host waits, as an evaluation does


def answering(
    column: str, batch: int, answer: Callable[[], object], device: torch.device, seconds: float
) -> Iterator[Row]:
    """The time of one request, and the speed with several in flight where the device works apart from the host."""
    setting = f"batch {batch}"
    alone = timed(answer, device, seconds)
    yield duration("inference", setting, column, alone)
    if device.type == "cpu":
        yield rate("inference", setting, column, batch, alone)
    else:
        several = timed(lambda: [answer() for _ in range(_IN_FLIGHT)], device, seconds)
        yield rate("inference", setting, column, _IN_FLIGHT * batch, several)
