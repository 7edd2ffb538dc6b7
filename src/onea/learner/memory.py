# SPDX-License-Identifier: Apache-2.0
"""Which images of earlier updates are kept, and when they take part in a training.

An update of few classes does not train, because it would move the features of all classes for the sake of few. Without
kept images most classes therefore never shape the adapter. With them, classes wait until they are numerous enough, and
then one training includes images of all classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onea.errors import OneaError, truncate

Memory = int | Literal["pending"]
_MAX_DIGITS = 4  # of the number of images of each class
_ROUNDING = 1e-9
PENDING: Literal["pending"] = "pending"


def parse_memory(value: object) -> Memory:
    """The number of images of each class to keep, or ``pending``.

    >>> parse_memory("10"), parse_memory("pending")
    (10, 'pending')

    Raises:
        OneaError: the value is neither.
    """
    if value == PENDING:
        return PENDING
    if isinstance(value, int | str) and not isinstance(value, bool):
        text = str(value)
        if text.isdecimal() and len(text) <= _MAX_DIGITS:
            return int(text)
    raise OneaError(
        f"memory is {truncate(value)}; give the number of images of each class to keep, 0 for none, or {PENDING}."
    )


@dataclass(frozen=True)
class Waiting:
    """The classes that no adapter was trained on, and whose images are at hand.

    >>> Waiting(classes=1, known=25).is_due(0.2), Waiting(classes=5, known=25).is_due(0.2)
    (False, True)

    Attributes:
        classes: their number.
        known: the number of all classes.
    """

    classes: int
    known: int

    def is_due(self, trigger: float) -> bool:
        """Whether to train: they are at least this share of all classes, and not the only class."""
        return self.known > 1 and self.classes >= self.due_at(trigger)

    def due_at(self, trigger: float) -> int:
        """The number of waiting classes at which a training is due."""
        return max(1, math.ceil(trigger * self.known - _ROUNDING))


def select_evenly(groups: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Positions of at most ``count`` images, ascending: as many of each group as possible, at random within a group.

    So a series of similar photos does not take the places of all others.

    >>> select_evenly(torch.tensor([0, 0, 0, 0, 1]), 2, torch.Generator().manual_seed(0))[1]
    tensor(4)
    """
    order = torch.randperm(len(groups), generator=generator)
    shuffled = groups[order]
    rank = torch.zeros(len(groups), dtype=torch.int64)  # of each image within its group
    for group in shuffled.unique():
        members = (shuffled == group).nonzero()[:, 0]
        rank[members] = torch.arange(len(members))
    first = rank.argsort(stable=True)[:count]
    return order[first].sort().values
