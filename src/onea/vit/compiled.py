# SPDX-License-Identifier: Apache-2.0
"""A frozen ViT, compiled once for all tasks, because adapters are arguments of the compiled functions."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.vit.adapter import Adapters, FlatAdapters
from onea.vit.hooks import NO_HOOKS, BlockHooks

if TYPE_CHECKING:
    from onea.vit.frozen import FrozenViT


def can_compile(device: torch.device) -> bool:
    """Whether ``torch.compile`` works here for a device."""
    if device.type == "cuda":
        return importlib.util.find_spec("triton") is not None
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


# Quantising a row requires its maximum. By default, a row of more than 1,024 values is read and computed twice; with
# this option, a kernel that keeps the row in registers is benchmarked as well.
_FP8_OPTIONS = {"triton.multi_kernel": 1}
_CUDA_GRAPHS = {"triton.cudagraphs": True}  # as in the mode "reduce-overhead"

_direct: ContextVar[bool] = ContextVar("direct", default=False)


@contextlib.contextmanager
def without_cuda_graphs() -> Iterator[None]:
    """Run compiled functions without CUDA graphs, so that a whole training step can be captured as one graph."""
    token = _direct.set(True)
    try:
        yield
    finally:
        _direct.reset(token)


class CompiledViT:
    """The forward passes of a ``FrozenViT``, compiled for a few batch sizes: without hooks, or with compilable ones.

    Compilation takes seconds to a minute per size and mode (training, inference), so smaller batches are padded to the
    next declared size and the features of the padding are dropped. The network may move between devices later.
    """

    def __init__(self, vit: FrozenViT, sizes: Collection[int], backend: str = "inductor"):
        self.sizes = tuple(sorted(set(sizes)))
        self._vit = vit

        # The adapter is passed as its flat weights (or None), rank, scale and dropout rate.
        def adapters(flat: Tensor | None, rank: int, scale: float, dropout: float) -> BlockHooks:
            if flat is None:
                return NO_HOOKS
            flat = flat.to(vit.matrix_dtype)  # one conversion instead of one per matrix
            return FlatAdapters(flat, vit.depth, vit.width, rank, scale, dropout)

        def whole(images: Tensor, patches: Tensor | None, *adapter: Any) -> Tensor:
            return vit.forward_eager(images, adapters(*adapter), patches)

        def to_block(images: Tensor, patches: None, block: int, *adapter: Any) -> Tensor:
            return vit.to_block_eager(images, block, adapters(*adapter))

        def from_block(tokens: Tensor, patches: Tensor | None, *adapter: Any) -> Tensor:
            return vit.from_block_eager(tokens, adapters(*adapter), patches)

        def hooked(images: Tensor, hooks: BlockHooks, patches: Tensor | None) -> Tensor:
            return vit.forward_eager(images, hooks, patches)

        options = _FP8_OPTIONS if vit.fp8 and backend == "inductor" else {}
        self._whole, self._to_block, self._from_block = (
            _CompiledFunction(function, backend, options) for function in (whole, to_block, from_block)
        )
        # One function per kind, because PyTorch limits the compiled versions of one function.
        self._hooked: defaultdict[tuple[type, int, bool], Callable[..., Tensor]] = defaultdict(
            partial(_compile, hooked, backend, options, fullgraph=False)
        )

    def accepts(self, batch: Tensor, hooks: BlockHooks) -> bool:
        """Whether forward passes with these hooks are compiled, including those that end or start at a block."""
        return _is_argument(hooks) and len(batch) <= self.sizes[-1]

    def accepts_images(self, images: Tensor, hooks: BlockHooks) -> bool:
        """Whether a forward pass from images to features is compiled; with other hooks than adapters, for full batches.

        Such hooks may have a state for each image, which is not padded.
        """
        return self.accepts(images, hooks) or (hooks.compilable and len(images) in self.sizes)

    def __call__(self, images: Tensor, hooks: BlockHooks, patches: Tensor | None = None) -> Tensor:
        """Features ``[B, width]``."""
        if _is_argument(hooks):
            return self._padded(self._whole, images, patches, *self._arguments(hooks))
        return self._hooked[type(hooks), len(images), torch.is_grad_enabled()](images, hooks, patches)

    def to_block(self, images: Tensor, hooks: BlockHooks, block: int) -> Tensor:
        """Tokens that enter a block."""
        earlier = hooks if hooks.first_block < block else NO_HOOKS
        return self._padded(self._to_block, images, None, block, *self._arguments(earlier))

    def from_block(self, tokens: Tensor, hooks: BlockHooks, patches: Tensor | None = None) -> Tensor:
        """Features of tokens that enter a block."""
        return self._padded(self._from_block, tokens, patches, *self._arguments(hooks))

    def _arguments(self, hooks: BlockHooks) -> tuple[Tensor | None, int, float, float]:
        if not isinstance(hooks, Adapters):
            return None, 0, 0.0, 0.0
        dropout = hooks.dropout if hooks.training else 0.0
        return hooks.flat(self._vit.matrix_dtype), hooks.rank, hooks.scale, dropout

    def _padded(self, run: _CompiledFunction, batch: Tensor, patches: Tensor | None, *arguments: Any) -> Tensor:
        count = len(batch)
        missing = next(size for size in self.sizes if size >= count) - count
        if missing:
            batch = F.pad(batch, (0, 0) * (batch.dim() - 1) + (0, missing))
            patches = None if patches is None else F.pad(patches, (0, 0, 0, missing))
        output = run(batch, patches, *arguments)
        return output[:count] if missing else output


def _is_argument(hooks: BlockHooks) -> bool:
    """Whether hooks are passed to compiled functions as tensors, so that one compilation serves all of them."""
    return hooks is NO_HOOKS or isinstance(hooks, Adapters)


class _CompiledFunction:
    """A function of tensors, compiled on first call, with and without CUDA graphs."""

    def __init__(self, function: Callable[..., Tensor], backend: str, options: Mapping[str, Any]):
        self._direct = self._graphed = _compile(function, backend, options)
        if backend == "inductor":  # in a small network, launching a kernel takes longer than running it
            self._graphed = _compile(function, backend, {**options, **_CUDA_GRAPHS})

    def __call__(self, *arguments: Any) -> Tensor:
        if _direct.get():
            return self._direct(*arguments)
        return self._graphed(*arguments).clone()  # the graph overwrites its output in the next call


def _compile(
    function: Callable[..., Tensor], backend: str, options: Mapping[str, Any], fullgraph: bool = True
) -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(
        _copy_function(function), dynamic=False, fullgraph=fullgraph, backend=backend, options=dict(options) or None
    )
    return compiled


def _copy_function(function: Any) -> FunctionType:
    """A copy with another code object, because PyTorch caches at most eight compiled versions per code object.

    Otherwise, all networks in a process would share the same eight versions.
    """
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
