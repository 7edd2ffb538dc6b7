# SPDX-License-Identifier: Apache-2.0
"""DualGPM, the memory of input directions that InfLoRA keeps per block: pure functions on float64 tensors.

Old tasks are described by a subspace of the inputs they used; a new task may only act on what is still free. The memory
holds an orthonormal basis of the smaller of the two: the used directions (they are to be *removed*) or, once these are
more than half of all, the free ones (to be *retained*). Everything is computed in coordinates of the free space, where
both forms look alike: the left singular vectors of ``F Fᵀ H`` are ``F`` times those of ``Fᵀ H``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onea.tensors import eigh

# What counts as the energy of a direction, with s the singular values of the second moment: InfLoRA's code takes s
# squared, so the fourth power of the inputs' singular values; gradient projection memory as first described takes s.
Energy = Literal["published", "textbook"]


@dataclass(frozen=True)
class Memory:
    """The used or the free input directions of one block.

    Attributes:
        basis: orthonormal columns, ``[width, directions]``.
        retain: whether they span the free space; else they span the used one.
    """

    basis: Tensor
    retain: bool

    @property
    def used(self) -> int:
        """The number of directions that old tasks occupy."""
        return self.basis.shape[0] - self.basis.shape[1] if self.retain else self.basis.shape[1]

    def free(self) -> Tensor:
        """An orthonormal basis of the free directions, ``[width, free]``."""
        return self.basis if self.retain else _complement(self.basis)


def threshold(epsilon: float, task: int, tasks: int | None) -> float:
    """Share of the energy that the memory must hold after a task (counted from 0): grows from ``epsilon`` towards 1.

    Without a known number of tasks it stays at ``epsilon``.

    >>> [round(threshold(0.95, task, 10), 3) for task in (0, 5, 9)], threshold(0.95, 5, None)
    ([0.95, 0.975, 0.995], 0.95)
    """
    if tasks is None:
        return epsilon
    return epsilon + (1 - epsilon) * min(task, tasks - 1) / tasks


def reduction(moment: Tensor, memory: Memory | None, rank: int) -> Tensor:
    """The frozen down-projection of a new task, ``[rank, width]``: what it uses most among the free directions.

    The rows are the leading left singular vectors of the second moment's free part, each with the norm ``1 / sqrt(3)``
    of a Kaiming-uniform row. Fewer than ``rank`` come back when fewer directions are free.
    """
    free = _free(memory, moment)
    _, vectors = _leading(free.T @ moment @ moment @ free)
    return (free @ vectors[:, :rank]).T / math.sqrt(3)


def remember(memory: Memory | None, moment: Tensor, share: float, energy: Energy = "published") -> Memory:
    """The memory after a task whose inputs have the second moment ``moment``; ``share`` is its :func:`threshold`."""
    width = moment.shape[0]
    matrix = moment @ moment if energy == "published" else moment
    free = _free(memory, moment)
    values, vectors = _leading(free.T @ matrix @ free)
    energies = values / matrix.trace()
    gathered = energies.cumsum(0)
    directions = free @ vectors
    if memory is None:
        # As published the first task stops before the direction that would reach the share, later ones after it.
        count = max(1, int((gathered < share).sum()))
        # The official code keeps the used directions here, yet calls them free.
        used, rest = directions[:, :count], directions[:, count:]
        return Memory(rest, retain=True) if 2 * count >= width else Memory(used, retain=False)
    left = energies.sum() - (gathered - energies)  # energy still outside the memory before each direction joins it
    if memory.retain:
        return Memory(directions[:, int((left >= 1 - share).sum()) :], retain=True)
    used = torch.cat([memory.basis, directions[:, : int((1 - left < share).sum())]], dim=1)
    return Memory(_complement(used), retain=True) if 2 * used.shape[1] > width else Memory(used, retain=False)


def _free(memory: Memory | None, moment: Tensor) -> Tensor:
    return torch.eye(len(moment), dtype=moment.dtype) if memory is None else memory.free()


def _leading(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, largest first and never negative, with their vectors as columns."""
    values, vectors = eigh((symmetric + symmetric.T) / 2)
    return values.flip(0).clamp_min(0), vectors.flip(1)


def _complement(basis: Tensor) -> Tensor:
    square: Tensor = torch.linalg.qr(basis, mode="complete")[0]
    return square[:, basis.shape[1] :]
