# SPDX-License-Identifier: Apache-2.0
"""The bottleneck adapter that runs beside each block's MLP."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.vit.hooks import BlockHooks

_wants_gradient, _version = attrgetter("requires_grad"), attrgetter("_version")


def bottleneck(u: Tensor, weights: tuple[Tensor, ...], scale: float, dropout: float = 0.0) -> Tensor:
    """``scale * up(dropout(relu(down(u))))`` for tokens ``[B, N, width]``.

    Args:
        u: the tokens.
        weights: weight and bias of ``down``, weight and bias of ``up``.
        scale: factor on the result.
        dropout: share of hidden channels to drop; 0 outside training.
    """
    down, down_bias, up, up_bias = weights
    hidden = F.relu(F.linear(u, down, down_bias))
    if dropout > 0:
        hidden = F.dropout(hidden, dropout)
    return F.linear(hidden, up, up_bias) * scale


class Adapter(nn.Module):
    """``scale * up(dropout(relu(down(u))))``: starts as exactly zero, because ``up`` does."""

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
        """Map tokens ``[B, N, width]`` to what is added to them."""
        # Through its layers, unlike bottleneck(), so that their hooks hear of it.
        hidden = F.relu(self.down(u))
        if self.training:
            hidden = F.dropout(hidden, self.dropout)
        update: Tensor = self.up(hidden) * self.scale
        return update

    def weights(self) -> tuple[Tensor, ...]:
        """The weights that ``bottleneck`` takes."""
        return self.down.weight, self.down.bias, self.up.weight, self.up.bias


class Adapters(nn.Module, BlockHooks):
    """One adapter for every block of a ViT; the thing that One-A trains, merges and keeps."""

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
    ):
        super().__init__()
        self.scale, self.dropout, self.rank = scale, dropout, rank
        self._flat: tuple[object, Tensor] | None = None
        self.blocks = nn.ModuleList(Adapter(width, rank, scale, dropout, generator) for _ in range(depth))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], scale: float) -> Adapters:
        """Adapters with these weights, frozen, for inference; depth, width and rank are those of the tensors.

        Raises:
            KeyError: a tensor is missing.
            RuntimeError: they do not belong together.
        """
        rank, width = tensors["blocks.0.down.weight"].shape
        made = cls(len(tensors) // 4, width, rank, generator=torch.Generator(), scale=scale, dropout=0.0)
        made.load_state_dict(dict(tensors))
        return made.eval().requires_grad_(False)

    @property
    def shape(self) -> tuple[int, int]:
        """Blocks and width of the network that they fit."""
        return len(self.blocks), next(self.each()).up.out_features

    def each(self) -> Iterator[Adapter]:
        """The adapters, block by block."""
        for adapter in self.blocks:
            assert isinstance(adapter, Adapter)
            yield adapter

    def flat(self, dtype: torch.dtype) -> Tensor:
        """All weights as one row, which ``FlatAdapters`` takes; of a frozen adapter in ``dtype`` and made only once.

        The matrices come first, so that they stay aligned. What is written to a frozen adapter through ``.data`` goes
        unseen.
        """
        if any(map(_wants_gradient, self._parts)):  # an optimiser may change them unseen
            self._flat = None
            return torch.cat([part.flatten() for part in self._parts])
        first = self._parts[0]
        state = (dtype, first.device, first.dtype, sum(map(_version, self._parts)))
        if self._flat is None or self._flat[0] != state:
            self._flat = state, torch.cat([part.flatten() for part in self._parts]).to(dtype)
        return self._flat[1]

    def requires_grad_(self, requires_grad: bool = True) -> Adapters:
        """Freeze, or let it be trained; whatever was made of the weights before is forgotten."""
        self._flat = None
        return super().requires_grad_(requires_grad)

    @functools.cached_property
    def _parts(self) -> tuple[Tensor, ...]:
        """All weights; looked up once, because a module's attributes are slow to find."""
        down, down_bias, up, up_bias = zip(*(adapter.weights() for adapter in self.each()), strict=True)
        return (*down, *up, *down_bias, *up_bias)

    def mlp_update(self, block: int, u: Tensor) -> Tensor:
        """The update of block ``block`` for its residual stream ``u`` (after attention, before the second norm)."""
        update: Tensor = self.blocks[block](u)
        return update


class FlatAdapters(BlockHooks):
    """Adapters whose weights are one plain tensor, so that a compiled network takes any task's as an argument.

    One instead of four for every block: each costs a small network more time than it takes to use it.
    """

    whole_sequence = False

    def __init__(self, flat: Tensor, depth: int, width: int, rank: int, scale: float, dropout: float):
        matrix = depth * width * rank
        down, up, down_bias, up_bias = flat.split([matrix, matrix, depth * rank, depth * width])
        parts = (
            down.view(depth, rank, width),
            down_bias.view(depth, rank),
            up.view(depth, width, rank),
            up_bias.view(depth, width),
        )
        self._weights = list(zip(*(part.unbind() for part in parts), strict=True))
        self._scale, self._dropout = scale, dropout

    def mlp_update(self, block: int, u: Tensor) -> Tensor:
        """The update of a block."""
        return bottleneck(u, self._weights[block], self._scale, self._dropout)
