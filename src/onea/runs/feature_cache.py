# SPDX-License-Identifier: Apache-2.0
"""Features of frozen parts, kept so that a run passes every test image through every part only once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from onea.data.store import choose_place

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class _Held:
    """Features of one part, a row per image, and which rows are there."""

    features: Tensor
    known: Tensor


class FeatureCache:
    """Features by part and image in host memory, where a copy costs next to nothing against a pass.

    Beyond the bound nothing more is kept, and what is not kept is computed again.

    Args:
        rows: of the images that may be asked for.
        bound: bytes; without one, half of what is free whenever a part is added.
    """

    def __init__(self, rows: Tensor, bound: int | None = None):
        self._bound = bound
        self._position = torch.zeros(int(rows.max()) + 1 if len(rows) else 0, dtype=torch.int64)
        self._position[rows] = torch.arange(len(rows))
        self._images = len(rows)
        self._parts: dict[str, _Held] = {}

    @property
    def bytes(self) -> int:
        """What is set aside for all parts."""
        return sum(held.features.nbytes for held in self._parts.values())

    def keep_only(self, parts: Collection[str]) -> None:
        """Forget the parts that are not named: nobody will ask for them again."""
        self._parts = {name: held for name, held in self._parts.items() if name in parts}

    def features(self, part: str, rows: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """The features of these rows, from memory if all of them are there, else computed and kept."""
        at, held = self._position[rows], self._parts.get(part)
        if held is not None and bool(held.known[at].all()):
            return held.features[at]
        features = compute()
        held = held or self._add(part, features)
        if held is not None:
            held.features[at] = features.to(_HOST)
            held.known[at] = True
        return features

    def _add(self, part: str, like: Tensor) -> _Held | None:
        """Room for a part, if there is any."""
        needed = self._images * like.shape[1] * like.element_size()
        if choose_place(self.bytes + needed, self._bound, _HOST) == "disk":
            return None
        room = torch.empty(self._images, like.shape[1], dtype=like.dtype)
        self._parts[part] = _Held(room, torch.zeros(self._images, dtype=torch.bool))
        return self._parts[part]
