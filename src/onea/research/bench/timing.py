# SPDX-License-Identifier: Apache-2.0
"""Time of something after warm-up: synchronised, repeated, the median with its spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch

_MOST = 500


@dataclass(frozen=True)
class Timing:
    """Seconds that one call takes.

    Attributes:
        seconds: the median.
        spread: half the distance between the quartiles.
        best: the shortest.
    """

    seconds: float
    spread: float
    best: float

    @property
    def relative_spread(self) -> float:
        """The spread as a share of the median."""
        return self.spread / self.seconds


def timed(
    action: Callable[[], object], device: torch.device, seconds: float, *, warm_up: int = 2, fewest: int = 4
) -> Timing:
    """Time an action again and again for about so many seconds, and at least a few times."""
    return timed_in_turn([action], device, seconds, warm_up=warm_up, fewest=fewest)[0]


def timed_in_turn(
    actions: Sequence[Callable[[], object]],
    device: torch.device,
    seconds: float,
    *,
    warm_up: int = 2,
    fewest: int = 4,
) -> list[Timing]:
    """Time several actions in turn, so that whatever slows the machine down meets all of them alike."""
    for action in actions:
        for _ in range(warm_up):  # compiles, fills caches, picks kernels, starts workers
            action()
    taken: list[list[float]] = [[] for _ in actions]
    synchronise(device)
    started = time.perf_counter()
    while len(taken[0]) < fewest or (time.perf_counter() - started < seconds * len(actions) and len(taken[0]) < _MOST):
        for action, times in zip(actions, taken, strict=True):
            before = time.perf_counter()
            action()
            synchronise(device)
            times.append(time.perf_counter() - before)
    return [summarise(times) for times in taken]


def summarise(taken: Sequence[float]) -> Timing:
    """Median and spread of some times.

    >>> summarise([1.0, 2.0, 3.0, 4.0, 100.0])
    Timing(seconds=3.0, spread=1.0, best=1.0)
    """
    if len(taken) == 1:
        return Timing(taken[0], 0.0, taken[0])
    low, _, high = quantiles(taken, n=4, method="inclusive")
    return Timing(median(taken), (high - low) / 2, min(taken))


def synchronise(device: torch.device) -> None:
    """Wait until the device has done everything it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
