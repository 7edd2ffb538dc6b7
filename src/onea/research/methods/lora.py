# SPDX-License-Identifier: Apache-2.0
"""Low-rank updates of the attention projections: LoRA while it is trained, full matrices once it is folded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.errors import OneaError
from onea.vit.hooks import NO_HOOKS, BlockHooks

if TYPE_CHECKING:
    from onea.vit.frozen import FrozenViT

PROJECTIONS = ("q", "k", "v")  # in the order of the network's joint projection


class LowRank(nn.Module):
    """``up @ down`` beside one projection, without a scale: starts as exactly zero, because ``up`` does.

    Args:
        down: ``[rank, width]``, what the update reads of its input.
        trains_down: whether ``down`` is trained too, or stays as it is.
    """

    def __init__(self, down: Tensor, *, trains_down: bool):
        super().__init__()
        self.down = nn.Parameter(down, requires_grad=trains_down)
        self.up = nn.Parameter(torch.zeros(down.shape[1], down.shape[0], dtype=down.dtype, device=down.device))

    def forward(self, h: Tensor) -> Tensor:
        """Map attention inputs ``[B, N, width]`` to what is added to their projection."""
        return F.linear(F.linear(h, self.down), self.up)

    def matrix(self) -> Tensor:
        """The update as a full matrix ``[out, in]``."""
        return self.up.detach() @ self.down.detach()


class LowRankUpdates(nn.Module, BlockHooks):
    """Low-rank updates of chosen projections in a run of neighbouring blocks.

    Args:
        blocks: for each block, its updates by projection (``q``, ``k``, ``v``).
        first: the block that the first of them belongs to.
        gains: factors on the updates, ``[3, blocks]`` in the order q, k, v, trained with them; None for no factors.
    """

    whole_sequence = False
    compilable = True

    def __init__(self, blocks: Sequence[Mapping[str, LowRank]], first: int = 0, gains: Tensor | None = None):
        super().__init__()
        self.first = first
        self.blocks = nn.ModuleList(nn.ModuleDict(dict(block)) for block in blocks)
        self.gains = None if gains is None else nn.Parameter(gains)

    def block(self, index: int) -> dict[str, LowRank]:
        """The updates of the ``index``-th of the blocks, by projection."""
        chosen = self.blocks[index]
        assert isinstance(chosen, nn.ModuleDict)
        return {name: update for name, update in chosen.items() if isinstance(update, LowRank)}

    def ups(self) -> list[nn.Parameter]:
        """The up-projections, block by block."""
        return [update.up for index in range(len(self.blocks)) for update in self.block(index).values()]

    def qkv_update(self, block: int, h: Tensor) -> Tensor | None:
        """The updates of the chosen projections of a block, zero for the others."""
        index = block - self.first
        if not 0 <= index < len(self.blocks):
            return None
        updates = {name: update(h) for name, update in self.block(index).items()}
        if self.gains is not None:
            updates = {name: value * self.gains[PROJECTIONS.index(name), index] for name, value in updates.items()}
        return _side_by_side(updates)


class FoldedUpdates(nn.Module, BlockHooks):
    """The sum of any number of low-rank updates as one full matrix per projection, so that its cost does not grow.

    Attributes:
        weight: ``[depth, projections, out, in]``.
    """

    weight: Tensor
    whole_sequence = False
    compilable = True

    def __init__(self, depth: int, width: int, projections: Sequence[str] = PROJECTIONS):
        super().__init__()
        self.projections = tuple(projections)
        self.register_buffer("weight", torch.zeros(depth, len(self.projections), width, width))

    def fold(self, updates: LowRankUpdates) -> None:
        """Add low-rank updates of every block to the matrices."""
        per_block = [updates.block(index) for index in range(len(self.weight))]
        self.weight = self.weight + torch.stack(
            [torch.stack([block[name].matrix() for name in self.projections]) for block in per_block]
        )

    def qkv_update(self, block: int, h: Tensor) -> Tensor:
        """The updates of the chosen projections of a block, zero for the others."""
        products = F.linear(h, self.weight[block].flatten(0, 1)).chunk(len(self.projections), dim=-1)
        return _side_by_side(dict(zip(self.projections, products, strict=True)))


class SummedUpdates(nn.Module, BlockHooks):
    """Several updates of the projections at once: their sum."""

    whole_sequence = False
    compilable = True

    def __init__(self, *updates: LowRankUpdates | FoldedUpdates):
        super().__init__()
        self.updates = nn.ModuleList(updates)

    def qkv_update(self, block: int, h: Tensor) -> Tensor | None:
        """The sum of what each adds to a block."""
        total: Tensor | None = None
        for hooks in self.updates:
            assert isinstance(hooks, BlockHooks)
            update = hooks.qkv_update(block, h)
            if update is not None:
                total = update if total is None else total + update
        return total


class SecondMoments(BlockHooks):
    """Watches the attention input ``h`` of every block while other hooks act; changes nothing itself.

    The sums are kept in float64: the decompositions that follow need the precision.
    """

    def __init__(self, depth: int, width: int, hooks: BlockHooks = NO_HOOKS):
        self.hooks = hooks
        self.sums = torch.zeros(depth, width, width, dtype=torch.float64)
        self.counts = [0] * depth

    def qkv_update(self, block: int, h: Tensor) -> Tensor | None:
        """Count the tokens of ``h`` in, and let the other hooks act."""
        seen = h.detach().flatten(0, 1).float()
        if self.sums.device != h.device and h.device.type != "mps":  # which has no float64
            self.sums = self.sums.to(h.device)  # beside the network: no copy, and no wait, in every batch
        with torch.autocast(h.device.type, enabled=False):
            self.sums[block] += (seen.T @ seen).to(self.sums)
        self.counts[block] += len(seen)
        return self.hooks.qkv_update(block, h)

    def means(self) -> Tensor:
        """Uncentred second moments of the blocks, ``[depth, width, width]``: the means of ``h hᵀ`` over all tokens."""
        return self.sums.cpu() / torch.tensor(self.counts, dtype=torch.float64)[:, None, None]


def check_rank(rank: int, vit: FrozenViT) -> None:
    """Refuse a rank that no low-rank update of this network can have, and a network that can have none."""
    if vit.shares_keys:
        raise OneaError(
            f"Heads of backbone '{vit.name}' share keys and values, so its projections differ in width and LoRA does "
            "not fit; choose a method with adapters."
        )
    if not 1 <= rank <= vit.width:
        raise OneaError(f"rank is {rank}; it must lie between 1 and the backbone's width {vit.width}.")


def _side_by_side(updates: Mapping[str, Tensor]) -> Tensor:
    nothing = torch.zeros_like(next(iter(updates.values())))
    return torch.cat([updates.get(name, nothing) for name in PROJECTIONS], dim=-1)
