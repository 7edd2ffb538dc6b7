# SPDX-License-Identifier: Apache-2.0
"""How long something takes a GPU when launching it costs nothing: recorded as a CUDA graph and replayed."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

_WARM = 3  # calls that compile and choose kernels


def microseconds(run: Callable[[], object], repeats: int, replays: int) -> float:
    """Of one call: so many are recorded as one graph, and the median of its replays counts."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                run()
    found: list[float] = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1000 * start.elapsed_time(end) / repeats)
    return statistics.median(found)
