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


def _is_watched(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


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
    """One adapter for every block of a ViT, or for the last few; the thing that One-A trains, merges and keeps.

    Tensors are named by the block of the network that they belong to, ``blocks.8.up.weight``, however many have some.

    Args:
        depth: blocks of the network.
        width: of the network.
        rank: width of the bottlenecks.
        generator: draws the weights.
        scale: factor on what is added.
        dropout: while training.
        first_block: the first block that has an adapter.
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
        self._at_rest: tuple[Tensor, FlatAdapters] | None = None
        above = (Adapter(width, rank, scale, dropout, generator) for _ in range(first_block, depth))
        # What stands in for the others has no weights, and so no names among the tensors.
        self.blocks = nn.ModuleList([*(nn.Identity() for _ in range(first_block)), *above])

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], scale: float) -> Adapters:
        """Adapters with these weights, frozen, for inference; blocks, width and rank are those of the tensors.

        Raises:
            KeyError: a tensor is missing.
            RuntimeError: they do not belong together.
            ValueError: a name is not one of theirs.
        """
        count = len(tensors) // 4
        first = min((int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")), default=0)
        rank, width = tensors[f"blocks.{first}.down.weight"].shape
        generator = torch.Generator()
        made = cls(first + count, width, rank, generator=generator, scale=scale, dropout=0.0, first_block=first)
        made.load_state_dict(dict(tensors))
        return made.eval().requires_grad_(False)

    @property
    def empty(self) -> bool:
        """Whether they are for a network without blocks, in which nothing can take part."""
        return not len(self.blocks)

    @property
    def shape(self) -> tuple[int, int]:
        """Blocks and width of the network that they fit."""
        return len(self.blocks), next(self.adapters()).up.out_features

    def adapters(self) -> Iterator[Adapter]:
        """The adapters, block by block."""
        for adapter in list(self.blocks)[self.first_block :]:
            assert isinstance(adapter, Adapter)
            yield adapter

    def from_block(self, block: int) -> Adapters:
        """Those of a block and of all after it, as adapters that share their weights."""
        width, ours = self.shape[1], {"scale": self.scale, "dropout": self.dropout}
        made = Adapters(block, width, self.rank, generator=torch.Generator(), first_block=block, **ours)
        made.blocks.extend(self.blocks[block:])
        return made

    def frozen_copy(self) -> Adapters:
        """The same weights as they are now, for inference."""
        return Adapters.from_tensors({name: value.clone() for name, value in self.state_dict().items()}, self.scale)

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

    def for_inference(self, dtype: torch.dtype) -> BlockHooks:
        """The same weights as they are multiplied, where they are frozen and nobody listens to their layers.

        Autocast would convert the weights in every pass: four kernels for each block, which one image waits for.
        """
        if self.training or self.empty or torch.compiler.is_compiling():
            return self
        if any(map(_wants_gradient, self._parts)) or any(map(_is_watched, self._layers)):
            return self
        flat = self.flat(dtype)
        if self._at_rest is None or self._at_rest[0] is not flat:
            depth, width = self.shape
            self._at_rest = flat, FlatAdapters(flat, depth, width, self.rank, self.scale, 0.0)
        return self._at_rest[1]

    def requires_grad_(self, requires_grad: bool = True) -> Adapters:
        """Freeze, or let it be trained; whatever was made of the weights before is forgotten."""
        self._flat = self._at_rest = None
        return super().requires_grad_(requires_grad)

    @functools.cached_property
    def _layers(self) -> tuple[nn.Module, ...]:
        """All modules that somebody may listen to."""
        return tuple(layer for adapter in self.adapters() for layer in (adapter, adapter.down, adapter.up))

    @functools.cached_property
    def _parts(self) -> tuple[Tensor, ...]:
        """All weights; looked up once, because a module's attributes are slow to find."""
        down, down_bias, up, up_bias = zip(*(adapter.weights() for adapter in self.adapters()), strict=True)
        return (*down, *up, *down_bias, *up_bias)

    def mlp_update(self, block: int, u: Tensor) -> Tensor | None:
        """The update of block ``block`` for its residual stream ``u`` (after attention, before the second norm)."""
        if block < self.first_block:
            return None
        update: Tensor = self.blocks[block](u)
        return update


class FlatAdapters(BlockHooks):
    """Adapters whose weights are one plain tensor, so that a compiled network takes any task's as an argument.

    One instead of four for every block: each costs a small network more time than it takes to use it. The length of the
    row tells how many blocks have an adapter: the last ones.
    """

    whole_sequence = False

    def __init__(self, flat: Tensor, depth: int, width: int, rank: int, scale: float, dropout: float):
        count = flat.numel() // (2 * width * rank + rank + width)
        matrix = count * width * rank
        down, up, down_bias, up_bias = flat.split([matrix, matrix, count * rank, count * width])
        parts = (
            down.view(count, rank, width),
            down_bias.view(count, rank),
            up.view(count, width, rank),
            up_bias.view(count, width),
        )
        self.first_block = depth - count
        self._weights = list(zip(*(part.unbind() for part in parts), strict=True))
        self._scale, self._dropout = scale, dropout

    def mlp_update(self, block: int, u: Tensor) -> Tensor | None:
        """The update of a block."""
        if block < self.first_block:
            return None
        return bottleneck(u, self._weights[block - self.first_block], self._scale, self._dropout)
