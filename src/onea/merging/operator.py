"""What every merging operator agrees on: named tensors in, named tensors out, and how large each side is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onea.errors import OneaError

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """How much each side of a merge has seen."""

    accumulated_classes: int
    new_classes: int
    accumulated_samples: int
    new_samples: int


class Operator(Protocol):
    """Merges a new set of tensors into the accumulated one, without touching either.

    ``state`` is whatever the operator must remember between merges, as tensors; pass ``{}`` the first time.
    """

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> tuple[Tensors, Tensors]:
        """Return the merged tensors and the next state."""


def check_mergeable(accumulated: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Refuse sides that differ in names or shapes or hold a NaN or an infinity: a silent merge would be wrong."""
    only_left, only_right = sorted(accumulated.keys() - new.keys()), sorted(new.keys() - accumulated.keys())
    if only_left or only_right:
        odd = (only_left or only_right)[0]
        side = "the accumulated" if only_left else "the new"
        raise OneaError(f"Cannot merge: tensor '{odd}' is only on {side} side; both need the same names.")
    for name, left in accumulated.items():
        right = new[name]
        if left.shape != right.shape:
            raise OneaError(
                f"Cannot merge '{name}': shapes {tuple(left.shape)} and {tuple(right.shape)} differ; "
                "both sides need the same backbone and rank."
            )
        for side, tensor in (("accumulated", left), ("new", right)):
            if not torch.isfinite(tensor).all():
                raise OneaError(f"Cannot merge '{name}': the {side} side holds a NaN or infinity; retrain it.")
