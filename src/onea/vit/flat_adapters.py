"""Adapters as one row of numbers: what a compiled network takes and trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onea.vit.adapter import Adapters, bottleneck
from onea.vit.plug import Plug


class FlatAdapters(Plug):
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

    def beside_mlp(self, block: int, u: Tensor) -> Tensor:
        """The update of a block."""
        return bottleneck(u, self._weights[block], self._scale, self._dropout)


class AdaptersInOne(nn.Module, Plug):
    """Adapters while a compiled network trains them: one parameter, so one gradient and one step instead of many.

    Element by element the same as training them apart; ``give_back`` hands the result to the adapters.
    """

    whole_sequence = False

    def __init__(self, adapters: Adapters):
        super().__init__()
        self._adapters = [adapters]  # in a list, so that their parameters are not this module's as well
        self.row = nn.Parameter(adapters.flat(torch.float32).detach().clone())
        self.rank, self.scale, self.dropout = adapters.rank, adapters.scale, adapters.dropout

    def flat(self, dtype: torch.dtype) -> Tensor:
        """All weights as one row."""
        return self.row.view(-1)  # a parameter itself would be taken for one that never moves, and compiled anew

    def give_back(self) -> None:
        """Make the adapters' weights these, and leave them in the mode this is in."""
        (adapters,) = self._adapters
        adapters.train(self.training)
        adapters.take(self.row)

    def beside_mlp(self, block: int, u: Tensor) -> Tensor:
        """The update of a block, where the network is not compiled after all."""
        dropout = self.dropout if self.training else 0.0
        depth = len(self._adapters[0].blocks)
        flat = FlatAdapters(self.row, depth, u.shape[-1], self.rank, self.scale, dropout)
        return flat.beside_mlp(block, u)
