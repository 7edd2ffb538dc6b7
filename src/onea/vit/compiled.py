# SPDX-License-Identifier: Apache-2.0
"""A frozen ViT compiled once and used for every task, because what a task changes comes in as an argument."""

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
    """Whether this machine has what ``torch.compile`` needs for a device."""
    if device.type == "cuda":
        return importlib.util.find_spec("triton") is not None
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


# Quantising a row needs its largest value first. By default, a row of more than 1,024 is read and computed twice for
# that; with this, a kernel that holds it in registers is tried as well, and the faster of both is taken.
_FP8_OPTIONS = {"triton.multi_kernel": 1}
_RECORDED = {"triton.cudagraphs": True}  # what the mode "reduce-overhead" is short for

_launched: ContextVar[bool] = ContextVar("launched", default=False)


@contextlib.contextmanager
def without_cuda_graphs() -> Iterator[None]:
    """Compiled passes launch their kernels one by one here, so that a whole training step can be recorded instead."""
    token = _launched.set(True)
    try:
        yield
    finally:
        _launched.reset(token)


class CompiledViT:
    """The passes of a ``FrozenViT``, compiled for batches of a few known sizes: without hooks, or with compilable ones.

    Compilation takes from seconds to a minute per size and mode (training, inference), so the sizes are declared and a
    smaller batch is padded to the next of them: images do not influence each other, and the padding's features are cut
    off again.

    Args:
        vit: the network; its weights may move between devices later.
        sizes: of batches.
        backend: of ``torch.compile``.
    """

    def __init__(self, vit: FrozenViT, sizes: Collection[int], backend: str = "inductor"):
        self.sizes = tuple(sorted(set(sizes)))
        self._vit = vit

        def adapted(flat: Tensor | None, rank: int, scale: float, dropout: float) -> BlockHooks:
            if flat is None:
                return NO_HOOKS
            flat = flat.to(vit.matrix_dtype)  # all at once, instead of every matrix where it is used
            return FlatAdapters(flat, vit.depth, vit.width, rank, scale, dropout)

        def whole(
            images: Tensor, patches: Tensor | None, flat: Tensor | None, rank: int, scale: float, dropout: float
        ) -> Tensor:
            return vit.forward_eager(images, adapted(flat, rank, scale, dropout), patches)

        def below(
            images: Tensor, patches: None, flat: Tensor | None, rank: int, scale: float, dropout: float, block: int
        ) -> Tensor:
            return vit.to_block_eager(images, block, adapted(flat, rank, scale, dropout))

        def above(
            tokens: Tensor, patches: Tensor | None, flat: Tensor | None, rank: int, scale: float, dropout: float
        ) -> Tensor:
            return vit.from_block_eager(tokens, adapted(flat, rank, scale, dropout), patches)

        def hooked(images: Tensor, hooks: BlockHooks, patches: Tensor | None) -> Tensor:
            return vit.forward_eager(images, hooks, patches)

        options = _FP8_OPTIONS if vit.fp8 else {}
        self._whole, self._below, self._above = (_Pass(each, backend, options) for each in (whole, below, above))
        plain = options if backend == "inductor" else {}
        # One for each kind of pass, or many kinds would use up the versions that PyTorch allows of one function.
        self._hooked: defaultdict[tuple[type, int, bool], Callable[..., Tensor]] = defaultdict(
            partial(_compiled, hooked, backend, plain, fullgraph=False)
        )

    def accepts(self, batch: Tensor, hooks: BlockHooks) -> bool:
        """Whether a pass is compiled, also if it ends or begins at a block."""
        return _are_arguments(hooks) and len(batch) <= self.sizes[-1]

    def accepts_images(self, images: Tensor, hooks: BlockHooks) -> bool:
        """Whether a pass from images to features is compiled.

        With other hooks than adapters, only full batches are: padding would have to pad what hooks hold of each image.
        """
        return self.accepts(images, hooks) or (hooks.compilable and len(images) in self.sizes)

    def __call__(self, images: Tensor, hooks: BlockHooks, patches: Tensor | None = None) -> Tensor:
        """Features ``[B, width]``."""
        if _are_arguments(hooks):
            return self._padded(self._whole, images, patches, *self._arguments(hooks))
        return self._hooked[type(hooks), len(images), torch.is_grad_enabled()](images, hooks, patches)

    def to_block(self, images: Tensor, hooks: BlockHooks, block: int) -> Tensor:
        """Tokens that enter a block."""
        before = hooks if hooks.first_block < block else NO_HOOKS
        return self._padded(self._below, images, None, *self._arguments(before), block)

    def from_block(self, tokens: Tensor, hooks: BlockHooks, patches: Tensor | None = None) -> Tensor:
        """Features of such tokens."""
        return self._padded(self._above, tokens, patches, *self._arguments(hooks))

    def _arguments(self, hooks: BlockHooks) -> tuple[Tensor | None, int, float, float]:
        if not isinstance(hooks, Adapters):
            return None, 0, 0.0, 0.0
        dropout = hooks.dropout if hooks.training else 0.0
        return hooks.flat(self._vit.matrix_dtype), hooks.rank, hooks.scale, dropout

    def _padded(self, run: _Pass, batch: Tensor, patches: Tensor | None, *arguments: Any) -> Tensor:
        count = len(batch)
        missing = next(size for size in self.sizes if size >= count) - count
        if missing:
            batch = F.pad(batch, (0, 0) * (batch.dim() - 1) + (0, missing))
            patches = None if patches is None else F.pad(patches, (0, 0, 0, missing))
        found = run(batch, patches, *arguments)
        return found[:count] if missing else found


def _are_arguments(hooks: BlockHooks) -> bool:
    """Whether a compiled pass gets what these hooks hold as arguments, so that it serves all of their kind."""
    return hooks is NO_HOOKS or isinstance(hooks, Adapters)


class _Pass:
    """A function of tensors, compiled when it is first called, in two ways."""

    def __init__(self, function: Callable[..., Tensor], backend: str, options: Mapping[str, Any]):
        if backend == "inductor":
            # Recorded as CUDA graphs: launching a kernel of a small network takes longer than running it.
            self._recorded = _compiled(function, backend, {**options, **_RECORDED})
            self._launched = _compiled(function, backend, options)
        else:
            self._recorded = self._launched = _compiled(function, backend, {})

    def __call__(self, *arguments: Any) -> Tensor:
        if _launched.get():
            return self._launched(*arguments)
        return self._recorded(*arguments).clone()  # the graph writes its next result into the same memory


def _compiled(
    function: Callable[..., Tensor], backend: str, options: Mapping[str, Any], fullgraph: bool = True
) -> Callable[..., Tensor]:
    made: Callable[..., Tensor] = torch.compile(
        _with_own_code(function), dynamic=False, fullgraph=fullgraph, backend=backend, options=dict(options) or None
    )
    return made


def _with_own_code(function: Any) -> FunctionType:
    """A copy that shares nothing: PyTorch keeps what it compiles by code object, and allows eight versions of each.

    Several runs in one process each have a network, and would use up each other's.
    """
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
