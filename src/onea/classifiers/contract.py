# SPDX-License-Identifier: Apache-2.0
"""What every classifier agrees on: statistics of features that add up over tasks, and scores from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from onea.options import Validated
from onea.tensors import Tensors

Scorer = Callable[[Tensor], Tensor]  # features [B, width] to scores [B, classes]; the largest is the answer


class Statistics(Protocol):
    """What images have said about their classes; class ``i`` has row ``i``. Never changed, always replaced."""

    @property
    def kind(self) -> Hashable:
        """Classifiers can share statistics of one kind: the richest that any of them needs."""

    @property
    def richness(self) -> int:
        """How much is kept, among statistics of one kind."""

    @property
    def classes(self) -> int:
        """The number of classes."""

    def add(self, features: Tensor, rows: Tensor) -> Self:
        """The statistics with these images' features ``[N, width]`` added to the classes in ``rows``; new ones grow."""

    def carry(self, by: Tensor) -> Self:
        """The statistics after a linear map ``[width, width]`` of all features, where that is known."""

    def keep(self, rows: Tensor) -> Self:
        """The statistics of these classes alone."""

    def to(self, device: torch.device) -> Self:
        """The statistics on another device."""

    def state_dict(self) -> Tensors:
        """All of it as named tensors."""

    def restored(self, state: Tensors) -> Self:
        """Statistics of the same kind from named tensors."""


class Classifier(Validated, ABC):
    """A rule that answers from statistics of features alone. Its options are the fields of a dataclass.

    Attributes:
        title: the classifier's name as papers write it.
        paper: link to its paper.
        keeps: the statistics, in a few words.
        carried: whether its statistics can follow a change of the adapter.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    keeps: ClassVar[str]
    carried: ClassVar[bool] = True

    @abstractmethod
    def statistics(self, width: int) -> Statistics:
        """The least it needs, of no image yet and features of this width."""

    @abstractmethod
    def fit(self, known: Statistics) -> Scorer:
        """A function from features to scores, from statistics of its kind that may be richer than it needs."""
