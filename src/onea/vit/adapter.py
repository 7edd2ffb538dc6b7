"""The bottleneck adapter that runs beside each block's MLP."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.vit.plug import Plug


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
        hidden = F.dropout(F.relu(self.down(u)), self.dropout, self.training)
        update: Tensor = self.up(hidden) * self.scale
        return update


class Adapters(nn.Module, Plug):
    """One adapter for every block of a ViT; the thing that One-A trains, merges and keeps."""

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
        self.blocks = nn.ModuleList(Adapter(width, rank, scale, dropout, generator) for _ in range(depth))

    def beside_mlp(self, block: int, u: Tensor) -> Tensor:
        """The update of block ``block`` for its residual stream ``u`` (after attention, before the second norm)."""
        update: Tensor = self.blocks[block](u)
        return update
