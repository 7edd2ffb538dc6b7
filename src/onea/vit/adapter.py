# SPDX-License-Identifier: Apache-2.0
"""Bottleneck adapters, parallel to the MLP of each block."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.vit.hooks import BlockHooks

_requires_grad, _version = attrgetter("requires_grad"), attrgetter("_version")  # faster than generator expressions


class Adapter(nn.Module):
    """``scale * up(dropout(relu(down(u))))``: initially zero, because ``up`` is initialised with zeros."""

    def __init__(self, width: int, rank: int, scale: float, dropout: float, generator: torch.Generator):
        super().__init__()
        self.scale, self.dropout = scale, dropout
        self.down = nn.Linear(width, rank)
        self.up = nn.Linear(rank, width)
        bound = 1 / math.sqrt(width)  # Kaiming-uniform with a = sqrt(5)
        with torch.no_grad():
            self.down.weight.copy_(torch.empty(rank, width).uniform_(-bound, bound, generator=generator))
            for zero in (self.down.bias, self.up.weight, self.up.bias):
                zero.zero_()

    def forward(self, u: Tensor) -> Tensor:
        """The update to add to tokens ``[B, N, width]``."""
        # Calls the layers, unlike FlatAdapters, so that their forward hooks run.
        hidden = F.relu(self.down(u))
        if self.training:
            hidden = F.dropout(hidden, self.dropout)
        update: Tensor = self.up(hidden) * self.scale
        return update

    def weights(self) -> tuple[Tensor, ...]:
        """Weight and bias of ``down``, weight and bias of ``up``."""
        return self.down.weight, self.down.bias, self.up.weight, self.up.bias


class Adapters(nn.Module, BlockHooks):
    """An adapter for each block of a ViT, or for each of the last blocks; One-A trains and merges these.

    Tensors are named after the block of the network, such as ``blocks.8.up.weight``. ``depth`` and ``width`` are those
    of the network, ``rank`` is the width of the bottlenecks.
    """

    whole_sequence = False

    def __init__(
        self,
        depth: int,
        width: int,
        rank: int,
        *,
        generator: torch.Generator,
        scale: float = 0.1,
        dropout: float = 0.1,
        first_block: int = 0,
    ):
        super().__init__()
        self.scale, self.dropout, self.rank, self.first_block = scale, dropout, rank, first_block
        self._flat: tuple[object, Tensor] | None = None
        self._cached: tuple[Tensor, FlatAdapters] | None = None
        adapters = (Adapter(width, rank, scale, dropout, generator) for _ in range(first_block, depth))
        # The placeholders have no weights, so they do not appear in the state dict.
        self.blocks = nn.ModuleList([*(nn.Identity() for _ in range(first_block)), *adapters])

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], scale: float) -> Adapters:
        """Frozen adapters with these weights; number of blocks, width and rank follow from the tensors.

        Raises:
            KeyError: a tensor is missing.
            RuntimeError: shapes or names do not fit.
            ValueError: a name has no block number.
        """
        count = len(tensors) // 4
        first = min((int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")), default=0)
        rank, width = tensors[f"blocks.{first}.down.weight"].shape
        generator = torch.Generator()
        adapters = cls(first + count, width, rank, generator=generator, scale=scale, dropout=0.0, first_block=first)
        adapters.load_state_dict(dict(tensors))
        return adapters.eval().requires_grad_(False)

    @classmethod
    def none(cls, depth: int, width: int) -> Adapters:
        """No adapter in any block of a network."""
        return cls(depth, width, 1, generator=torch.Generator(), first_block=depth)

    @property
    def empty(self) -> bool:
        """Whether no block has an adapter."""
        return self.first_block == len(self.blocks)

    @property
    def shape(self) -> tuple[int, int]:
        """Depth and width of the matching network."""
        return len(self.blocks), next(self.adapters()).up.out_features

    def adapters(self) -> Iterator[Adapter]:
        """The adapters, block by block."""
        for adapter in list(self.blocks)[self.first_block :]:
            assert isinstance(adapter, Adapter)
            yield adapter

    def from_block(self, block: int) -> Adapters:
        """The adapters from a block on; they share their weights with these."""
        options = {"scale": self.scale, "dropout": self.dropout}
        adapters = Adapters(block, self.shape[1], self.rank, generator=torch.Generator(), first_block=block, **options)
        adapters.blocks.extend(self.blocks[block:])
        return adapters

    def frozen_copy(self) -> Adapters:
        """A frozen copy of the current weights, for inference."""
        return Adapters.from_tensors({name: value.clone() for name, value in self.state_dict().items()}, self.scale)

    def flat(self, dtype: torch.dtype) -> Tensor:
        """All weights as one vector for ``FlatAdapters``; for frozen adapters, in ``dtype`` and cached.

        The matrices come first, so that they stay aligned. Writes through ``.data`` do not invalidate the cache.
        """
        if any(map(_requires_grad, self._parts)):  # an optimiser may change them
            self._flat = None
            return torch.cat([part.flatten() for part in self._parts])
        first = self._parts[0]
        state = (dtype, first.device, first.dtype, sum(map(_version, self._parts)))
        if self._flat is None or self._flat[0] != state:
            self._flat = state, torch.cat([part.flatten() for part in self._parts]).to(dtype)
        return self._flat[1]

    def for_inference(self, dtype: torch.dtype) -> BlockHooks:
        """Adapters with weights in ``dtype``, if they are frozen and have no forward hooks.

        Autocast would convert the weights in every forward pass: four kernels per block, noticeable for one image.
        """
        if self.training or self.empty or torch.compiler.is_compiling():
            return self
        if any(map(_requires_grad, self._parts)):
            return self
        if any(layer._forward_hooks or layer._forward_pre_hooks for layer in self._layers):
            return self
        flat = self.flat(dtype)
        if self._cached is None or self._cached[0] is not flat:
            depth, width = self.shape
            self._cached = flat, FlatAdapters(flat, depth, width, self.rank, self.scale, 0.0)
        return self._cached[1]

    def requires_grad_(self, requires_grad: bool = True) -> Adapters:
        """Freeze or unfreeze the weights, and drop the cached ones."""
        self._flat = self._cached = None
        return super().requires_grad_(requires_grad)

    @functools.cached_property
    def _layers(self) -> tuple[nn.Module, ...]:
        """All modules that may have forward hooks."""
        return tuple(layer for adapter in self.adapters() for layer in (adapter, adapter.down, adapter.up))

    @functools.cached_property
    def _parts(self) -> tuple[Tensor, ...]:
        """All weights; cached, because attribute access of a module is slow."""
        down, down_bias, up, up_bias = zip(*(adapter.weights() for adapter in self.adapters()), strict=True)
        return (*down, *up, *down_bias, *up_bias)

    def mlp_update(self, block: int, u: Tensor) -> Tensor | None:
        """The update of a block for its residual stream ``u`` (after attention, before the second norm)."""
        if block < self.first_block:
            return None
        update: Tensor = self.blocks[block](u)
        return update


class FlatAdapters(BlockHooks):
    """Adapters whose weights are one vector, which is an argument of a compiled network.

    It replaces four arguments per block: in a small network, passing an argument takes longer than using it. The length
    of the vector determines the number of blocks, counted from the last, that have an adapter.
    """

    whole_sequence = False

    def __init__(self, flat: Tensor, depth: int, width: int, rank: int, scale: float, dropout: float):
        count = flat.numel() // (2 * width * rank + rank + width)
        matrix_numel = count * width * rank
        down, up, down_bias, up_bias = flat.split([matrix_numel, matrix_numel, count * rank, count * width])
        parts = (
            down.view(-1, rank, width),
            down_bias.view(-1, rank),
            up.view(-1, width, rank),
            up_bias.view(-1, width),
        )
        self.first_block = depth - count
        self._weights = list(zip(*(part.unbind() for part in parts), strict=True))
        self._scale, self._dropout = scale, dropout

    def mlp_update(self, block: int, u: Tensor) -> Tensor | None:
        """The update of a block."""
        if block < self.first_block:
            return None
        down, down_bias, up, up_bias = self._weights[block - self.first_block]
        hidden = F.relu(F.linear(u, down, down_bias))
        if self._dropout > 0:
            hidden = F.dropout(hidden, self._dropout)
        return F.linear(hidden, up, up_bias) * self._scale
