# SPDX-License-Identifier: Apache-2.0
"""LoRA of attention projections and MLPs, as trainable low-rank updates or folded into full matrices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.classifiers.familiarity import principal_axes
from onea.errors import OneaError
from onea.vit.hooks import NO_HOOKS, BlockHooks

if TYPE_CHECKING:
    from onea.vit.frozen import FrozenViT

PROJECTIONS = ("q", "k", "v")  # in the order of the network's joint projection
_UPDATED = re.compile(r"blocks\.\d+\.(attn\.(qkv|[qkv]_proj)|mlp\.fc\w+)$")  # layers of timm's blocks


class LowRank(nn.Module):
    """The update ``up @ down`` of one projection, without a scaling factor. It is initialised as zero.

    Args:
        down: initial down-projection, ``[rank, width]``.
        trains_down: whether ``down`` is trained.
        outputs: number of outputs of the projection, if it is not the width.
    """

    def __init__(self, down: Tensor, *, trains_down: bool, outputs: int | None = None):
        super().__init__()
        rank, width = down.shape
        self.down = nn.Parameter(down, requires_grad=trains_down)
        self.up = nn.Parameter(torch.zeros(outputs or width, rank, dtype=down.dtype, device=down.device))

    def forward(self, h: Tensor) -> Tensor:
        """The update of the projection of attention inputs ``[B, N, width]``."""
        return F.linear(F.linear(h, self.down), self.up)

    def matrix(self) -> Tensor:
        """The update as a full matrix ``[out, in]``."""
        return self.up.detach() @ self.down.detach()


class LowRankUpdates(nn.Module, BlockHooks):
    """Low-rank updates of projections in consecutive blocks.

    Args:
        blocks: for each block, its updates by projection (``q``, ``k``, ``v``).
        first: index of the first of these blocks.
        gains: trainable factors of the updates, ``[3, blocks]`` in the order q, k, v; None for no factors.
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
        block = self.blocks[index]
        assert isinstance(block, nn.ModuleDict)
        return {name: update for name, update in block.items() if isinstance(update, LowRank)}

    def ups(self) -> list[nn.Parameter]:
        """The up-projections, block by block."""
        return [update.up for index in range(len(self.blocks)) for update in self.block(index).values()]

    def qkv_update(self, block: int, h: Tensor) -> Tensor | None:
        """The updates of all three projections of a block, zero where there is none."""
        index = block - self.first
        if not 0 <= index < len(self.blocks):
            return None
        updates = {name: update(h) for name, update in self.block(index).items()}
        if self.gains is not None:
            updates = {name: value * self.gains[PROJECTIONS.index(name), index] for name, value in updates.items()}
        return _concatenated(updates)


class LowRankWeights(nn.Module, BlockHooks):
    """Low-rank updates of the attention projections and the MLP layers of all blocks: ``W + scale up down``.

    The initial down-projections are the leading right singular vectors of the frozen weights.

    Args:
        vit: the network.
        rank: rank of each update; less where a layer is narrower.
        scale: factor of all updates.
    """

    whole_sequence = False

    def __init__(self, vit: FrozenViT, rank: int, scale: float):
        super().__init__()
        self.scale, self._names = scale, [name for name, _ in vit.named_modules() if _UPDATED.search(name)]
        self.updates = nn.ModuleList()
        for name in self._names:
            weight = _weight(vit, name).float()
            down = principal_axes(weight)[1][-rank:].clone()
            self.updates.append(LowRank(down, trains_down=True, outputs=len(weight)))

    def weights(self, vit: FrozenViT) -> dict[str, Tensor]:
        """The updated weights of the network, in float32."""
        updated = {}
        for name, update in zip(self._names, self.updates, strict=True):
            assert isinstance(update, LowRank)
            updated[f"{name}.weight"] = _weight(vit, name).float() + self.scale * update.up @ update.down
        return updated


def _weight(vit: FrozenViT, name: str) -> Tensor:
    weight = vit.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return weight


class FoldedUpdates(nn.Module, BlockHooks):
    """The sum of any number of low-rank updates, as one full matrix per projection.

    Attributes:
        weight: ``[depth, projections, out, in]``.
    """

    weight: Tensor
    whole_sequence = False
    compilable = True

    def __init__(self, depth: int, width: int, projections: Sequence[str]):
        super().__init__()
        self.projections = tuple(projections)
        self.register_buffer("weight", torch.zeros(depth, len(self.projections), width, width))

    def fold(self, updates: LowRankUpdates) -> None:
        """Add low-rank updates of every block to the matrices."""
        blocks = [updates.block(index) for index in range(len(self.weight))]
        matrices = [torch.stack([block[name].matrix() for name in self.projections]) for block in blocks]
        self.weight = self.weight + torch.stack(matrices)

    def qkv_update(self, block: int, h: Tensor) -> Tensor:
        """The updates of all three projections of a block, zero where there is none."""
        products = F.linear(h, self.weight[block].flatten(0, 1)).chunk(len(self.projections), dim=-1)
        return _concatenated(dict(zip(self.projections, products, strict=True)))


class SummedUpdates(nn.Module, BlockHooks):
    """The sum of several updates."""

    whole_sequence = False
    compilable = True

    def __init__(self, *updates: LowRankUpdates | FoldedUpdates):
        super().__init__()
        self.updates = nn.ModuleList(updates)

    def qkv_update(self, block: int, h: Tensor) -> Tensor | None:
        """The sum of the updates of a block."""
        total: Tensor | None = None
        for hooks in self.updates:
            assert isinstance(hooks, BlockHooks)
            update = hooks.qkv_update(block, h)
            if update is not None:
                total = update if total is None else total + update
        return total


class SecondMoments(BlockHooks):
    """Accumulates the second moments of the attention inputs of each block, in float64, while other hooks run."""

    def __init__(self, depth: int, width: int, hooks: BlockHooks = NO_HOOKS):
        self.hooks = hooks
        self.sums = torch.zeros(depth, width, width, dtype=torch.float64)
        self.counts = [0] * depth

    def qkv_update(self, block: int, h: Tensor) -> Tensor | None:
        """Accumulate the tokens of ``h``, and return the update of the other hooks."""
        tokens = h.detach().flatten(0, 1).float()
        if self.sums.device != h.device and h.device.type != "mps":  # MPS has no float64
            self.sums = self.sums.to(h.device)  # avoids a copy to the CPU for each batch
        with torch.autocast(h.device.type, enabled=False):
            self.sums[block] += (tokens.T @ tokens).to(self.sums)
        self.counts[block] += len(tokens)
        return self.hooks.qkv_update(block, h)

    def means(self) -> Tensor:
        """Uncentred second moments of each block, ``[depth, width, width]``: the mean of ``h hᵀ`` over all tokens."""
        return self.sums.cpu() / torch.tensor(self.counts, dtype=torch.float64)[:, None, None]


def check_rank(rank: int, vit: FrozenViT) -> None:
    """Refuse a rank that is out of range, and a network that LoRA does not fit."""
    if vit.shares_keys:
        raise OneaError(
            f"Heads of backbone '{vit.name}' share keys and values, so its projections differ in width and LoRA does "
            "not fit; choose a method with adapters."
        )
    if not 1 <= rank <= vit.width:
        raise OneaError(f"rank is {rank}; it must lie between 1 and the backbone's width {vit.width}.")


def _concatenated(updates: Mapping[str, Tensor]) -> Tensor:
    zero = torch.zeros_like(next(iter(updates.values())))
    return torch.cat([updates.get(name, zero) for name in PROJECTIONS], dim=-1)
