# SPDX-License-Identifier: Apache-2.0
"""What every classifier agrees on: statistics of features that add up over tasks, and scores from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from onea.options import Validated
from onea.tensors import Tensors


class Scorer(nn.Module):
    """A fitted classifier: features ``[B, width]`` to scores ``[B, classes]``; the largest is the answer."""

    def __init__(self, **tensors: Tensor):
        super().__init__()
        for name, value in tensors.items():
            self.register_buffer(name, value.detach().float())

    def __call__(self, features: Tensor) -> Tensor:
        """Scores, in float32 whatever the network computes in."""
        with torch.autocast(features.device.type, enabled=False):
            scores: Tensor = super().__call__(features.float())
            return scores


class Statistics(Protocol):
    """What images have said about their classes; class ``i`` has row ``i``. Never changed, always replaced."""

    @property
    def kind(self) -> Hashable:
        """A key: classifiers with statistics of the same kind share one object, that of the highest ``richness``."""

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
        """The classifier, fitted to statistics of its kind that may be richer than it needs."""
