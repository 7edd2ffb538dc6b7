# SPDX-License-Identifier: Apache-2.0
"""Interfaces of classifiers: statistics of features that add up over updates, and scores computed from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from onea.options import Validated
from onea.tensors import Tensors


class Scorer(nn.Module):
    """A fitted classifier: features ``[B, width]`` to scores ``[B, classes]``; the largest is the prediction."""

    def __init__(self, **tensors: Tensor):
        super().__init__()
        for name, value in tensors.items():
            self.register_buffer(name, value.detach().float())

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The output in float32, also under autocast."""
        with torch.autocast(inputs[0].device.type, enabled=False):
            output: Tensor = super().__call__(*[tensor.float() for tensor in inputs])
            return output

    def exportable(self) -> Scorer:
        """The scorer that an export computes."""
        return self


class Statistics(Protocol):
    """Statistics of the features of each class; class ``i`` has row ``i``. Immutable: all methods return new ones."""

    @property
    def kind(self) -> Hashable:
        """Classifiers that need statistics of the same kind share those with the highest ``detail``."""

    @property
    def detail(self) -> int:
        """The level of detail, for comparing statistics of the same kind."""

    @property
    def classes(self) -> int:
        """The number of classes."""

    def add(self, features: Tensor, labels: Tensor) -> Self:
        """The statistics with more images: their features ``[N, width]`` and classes; new classes get new rows."""

    def apply_drift_map(self, drift_map: Tensor) -> Self:
        """The statistics if all features were multiplied by a matrix ``[width, width]``; unchanged if undefined."""

    def select_classes(self, classes: Tensor) -> Self:
        """The statistics of these classes."""

    def to(self, device: torch.device) -> Self:
        """The statistics on another device."""

    def state_dict(self) -> Tensors:
        """All statistics as named tensors."""

    def from_state_dict(self, state: Tensors) -> Self:
        """Statistics of the same kind and detail from named tensors."""


class Classifier(Validated, ABC):
    """A classifier that needs only statistics of features. Subclasses are dataclasses with their options as fields.

    Attributes:
        title: the classifier's name as papers write it.
        paper: link to its paper.
        stores: short description of the statistics.
        follows_drift: whether its statistics can be updated when the adapter changes.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    stores: ClassVar[str]
    follows_drift: ClassVar[bool] = True

    @abstractmethod
    def statistics(self, width: int) -> Statistics:
        """Empty statistics of features of this width, with the detail that the classifier needs."""

    @abstractmethod
    def fit(self, statistics: Statistics) -> Scorer:
        """Fit the classifier to statistics of its kind, which may have more detail than needed."""
