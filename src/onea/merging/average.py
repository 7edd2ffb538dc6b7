"""Running mean of everything merged so far: every task has one vote, whatever its size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onea.merging.operator import Sizes, Tensors, check_mergeable


@dataclass(frozen=True)
class RunningMean:
    """``((n - 1) * accumulated + new) / n`` for the n-th side; equals the plain mean of all sides."""

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> tuple[Tensors, Tensors]:
        """Merge; ``state["count"]`` is the number of sides inside ``accumulated`` (one at the first merge)."""
        check_mergeable(accumulated, new)
        count = int(state.get("count", torch.tensor(1)))
        merged = {
            name: ((left.double() * count + new[name].double()) / (count + 1)).to(left.dtype)
            for name, left in accumulated.items()
        }
        return merged, {"count": torch.tensor(count + 1)}
