# SPDX-License-Identifier: Apache-2.0
"""Time of GPU operations without launch overhead: recorded as a CUDA graph and replayed."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

_WARM_UP = 3  # calls for compilation and the choice of kernels


def microseconds(run: Callable[[], object], repeats: int, replays: int) -> float:
    """Microseconds per call: the median over replays of a graph of several calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                run()
    times: list[float] = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end) / repeats)
    return statistics.median(times)
