# SPDX-License-Identifier: Apache-2.0
"""Training steps as CUDA graphs, so that the host launches one graph instead of a thousand kernels."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onea.vit.compiled import without_cuda_graphs

_Signature = tuple[tuple[torch.Size, torch.dtype], ...]
_WARM_UP = 2  # steps: the first compiles and selects kernels; in the second, the optimiser's state is allocated already


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: Tensor


class StepGraph:
    """Steps of one training on a CUDA device: two warm-up steps for each signature, then a captured graph.

    The signature of a step is the shapes and types of its inputs: full batches, and the last batch of an epoch. If
    capturing fails, all further steps run eagerly.

    Args:
        step: computes a step on the device and returns its loss. It must neither read a tensor's values nor do anything
            on the host that differs from step to step.
        device: a CUDA device.

    Attributes:
        replayed: the number of steps that were graph replays.
    """

    def __init__(self, step: Callable[..., Tensor], device: torch.device):
        self.replayed = 0
        self._step, self._device = step, device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()  # shared by all graphs, which never run at the same time
        self._eager_steps: Counter[_Signature] = Counter()
        self._captured: dict[_Signature, _Captured] = {}
        self._failed = False

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Run steps on a separate stream, as capturing requires; the outer stream waits for it at the end."""
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream), without_cuda_graphs():
            yield
        outer.wait_stream(self._stream)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run a step; returns a copy of its loss."""
        signature = tuple((value.shape, value.dtype) for value in inputs)
        captured = self._captured.get(signature)
        if captured is None:
            self._eager_steps[signature] += 1
            warm_up = self._failed or self._eager_steps[signature] <= _WARM_UP
            if warm_up or (captured := self._capture(inputs)) is None:
                return self._step(*inputs)
            self._captured[signature] = captured
        for static, value in zip(captured.inputs, inputs, strict=True):
            static.copy_(value, non_blocking=True)
        captured.graph.replay()
        self.replayed += 1
        return captured.result.clone()

    def _capture(self, inputs: tuple[Tensor, ...]) -> _Captured | None:
        graph, static = torch.cuda.CUDAGraph(), tuple(value.clone() for value in inputs)
        rng_state = torch.cuda.get_rng_state(self._device)
        try:
            # Other threads may use the device: a service predicts while it trains.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = self._step(*static)
        except RuntimeError:
            # The generator would stay in capture mode, so replace it by one with its earlier state.
            generator = torch.Generator(self._device)
            generator.set_state(rng_state)
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            torch.cuda.default_generators[index].graphsafe_set_state(generator.graphsafe_get_state())
            self._captured.clear()  # earlier graphs belong to the previous generator
            self._failed = True
            return None
        return _Captured(graph, static, result)
