# SPDX-License-Identifier: Apache-2.0
"""Whole training steps recorded as CUDA graphs, so that the host asks for one thing instead of a thousand."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onea.vit.compiled import without_cuda_graphs

_Kind = tuple[tuple[torch.Size, torch.dtype], ...]
_AS_THEY_ARE = 2  # steps: the first compiles and picks kernels, and the second finds the optimiser's memory there


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: Tensor


class StepGraph:
    """Steps of one training on a CUDA device. The first two of a kind run as they are; from then on a recording does.

    Steps of the same shapes are of one kind: full batches, and the rest of an epoch. What cannot be recorded goes on
    running as it is.

    Args:
        step: everything that a step does to tensors on the device; returns its loss. It must neither read a tensor's
            values nor do anything else on the host that differs from step to step.
        device: where.

    Attributes:
        replayed: the number of steps that a recording did.
    """

    def __init__(self, step: Callable[..., Tensor], device: torch.device):
        self.replayed = 0
        self._step, self._device = step, device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()  # one for all kinds, because they never run at the same time
        self._taken: Counter[_Kind] = Counter()
        self._recorded: dict[_Kind, _Recorded] = {}
        self._refused = False

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Where steps are taken: on a stream of their own, as recording demands; others wait for it in the end."""
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream), without_cuda_graphs():
            yield
        outer.wait_stream(self._stream)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Take a step, and return its loss in memory of its own."""
        kind = tuple((given.shape, given.dtype) for given in inputs)
        recorded = self._recorded.get(kind)
        if recorded is None:
            self._taken[kind] += 1
            if self._refused or self._taken[kind] <= _AS_THEY_ARE or (recorded := self._record(inputs)) is None:
                return self._step(*inputs)
            self._recorded[kind] = recorded
        for mine, given in zip(recorded.inputs, inputs, strict=True):
            mine.copy_(given, non_blocking=True)
        recorded.graph.replay()
        self.replayed += 1
        return recorded.result.clone()

    def _record(self, inputs: tuple[Tensor, ...]) -> _Recorded | None:
        graph, own = torch.cuda.CUDAGraph(), tuple(given.clone() for given in inputs)
        drawn = torch.cuda.get_rng_state(self._device)
        try:
            # Other threads may go on using the device: a service answers while it learns.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = self._step(*own)
        except RuntimeError:
            # Or random numbers would go on waiting for the end of the recording: they go on from where they were.
            anew = torch.Generator(self._device)
            anew.set_state(drawn)
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            torch.cuda.default_generators[index].graphsafe_set_state(anew.graphsafe_get_state())
            self._recorded.clear()  # their numbers would be those that are drawn from now on
            self._refused = True
            return None
        return _Recorded(graph, own, result)
