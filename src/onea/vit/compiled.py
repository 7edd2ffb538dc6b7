# SPDX-License-Identifier: Apache-2.0
"""A frozen ViT compiled once and used for every task, because what a task changes comes in as an argument."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Collection
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


class CompiledViT:
    """The network without hooks, or with adapters, for batches of a few known sizes.

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

        def run(images: Tensor, flat: Tensor | None, rank: int, scale: float, dropout: float) -> Tensor:
            if flat is None:
                return vit.forward_eager(images, NO_HOOKS)
            flat = flat.to(vit.matrix_dtype)  # all at once, instead of every matrix where it is used
            return vit.forward_eager(images, FlatAdapters(flat, vit.depth, vit.width, rank, scale, dropout))

        # Recorded as CUDA graphs: a small network's kernels are shorter than the time it takes to launch them.
        mode = "reduce-overhead" if backend == "inductor" else None
        self._run: Callable[..., Tensor] = torch.compile(
            _with_own_code(run), dynamic=False, fullgraph=True, backend=backend, mode=mode
        )

    def takes(self, images: Tensor, hooks: BlockHooks) -> bool:
        """Whether this pass is one of those it is compiled for."""
        return (hooks is NO_HOOKS or isinstance(hooks, Adapters)) and len(images) <= self.sizes[-1]

    def __call__(self, images: Tensor, hooks: BlockHooks) -> Tensor:
        """Features ``[B, width]``."""
        count = len(images)
        missing = next(size for size in self.sizes if size >= count) - count
        if missing:
            images = F.pad(images, (0, 0) * (images.dim() - 1) + (0, missing))
        if isinstance(hooks, Adapters):
            dropout = hooks.dropout if hooks.training else 0.0
            features = self._run(images, hooks.flat(self._vit.matrix_dtype), hooks.rank, hooks.scale, dropout)
        else:
            features = self._run(images, None, 0, 0.0, 0.0)
        features = features[:count] if missing else features
        return features.clone()  # the graph writes its next result into the same memory


def _with_own_code(function: Any) -> FunctionType:
    """A copy that shares nothing: PyTorch keeps what it compiles by code object, and allows eight versions of each.

    Several runs in one process each have a network, and would use up each other's.
    """
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
