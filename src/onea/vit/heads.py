# SPDX-License-Identifier: Apache-2.0
"""Classification heads for training, and class means as prototypes."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.tensors import to_float64

_CHUNK = 4096  # rows in memory as one-hot labels, on a GPU
_ZERO_LABEL = 1e-4  # stands for zero in a logarithm


def uniform_rows(classes: int, width: int, generator: torch.Generator) -> Tensor:
    """Initial rows of a head, within ``1 / sqrt(width)`` as in ``nn.Linear``."""
    bound = 1 / math.sqrt(width)
    return torch.empty(classes, width).uniform_(-bound, bound, generator=generator)


class LinearHead(nn.Module):
    """A linear classifier over the classes of a task."""

    def __init__(self, width: int, classes: int, generator: torch.Generator):
        super().__init__()
        self.weight = nn.Parameter(uniform_rows(classes, width, generator))
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        return F.linear(features, self.weight, self.bias)


class CosineHead(nn.Module):
    """Cosine similarities to learned class vectors, times a learned scale."""

    def __init__(self, width: int, classes: int, generator: torch.Generator, scale: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(uniform_rows(classes, width, generator))
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        return self.scale * cosine_scores(features, self.weight)


def _truncated_normal(classes: int, width: int, generator: torch.Generator) -> Tensor:
    return nn.init.trunc_normal_(torch.empty(classes, width), std=0.02, generator=generator)


class _GrowingRows(nn.Module):
    """Parameters with a row per class seen, to which every task adds rows."""

    def append(self, head: _GrowingRows) -> None:
        """Add the rows of another head."""
        self._append(**{name: rows for name, rows in head.named_parameters() if rows.dim()})

    def _append(self, **rows: Tensor) -> None:
        for name, new in rows.items():
            old = self.get_parameter(name).detach()
            setattr(self, name, nn.Parameter(torch.cat([old, new.detach().to(old.device)])))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Restore any number of rows."""
        for name, rows in self.named_parameters():
            setattr(self, name, nn.Parameter(rows.new_empty(state_dict[prefix + name].shape)))
        super()._load_from_state_dict(state_dict, prefix, *args)


class GrowingHead(_GrowingRows):
    """A linear classifier over all classes seen, to which every task adds rows.

    ``start`` is the initialisation of new rows: ``truncated`` (truncated normal with standard deviation 0.02, zero
    bias) or ``uniform`` (both within 1 / sqrt(width), as in ``nn.Linear``).
    """

    def __init__(self, width: int, start: Literal["truncated", "uniform"] = "truncated"):
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(0, width))
        self.bias = nn.Parameter(torch.empty(0))

    def grow(self, classes: int, generator: torch.Generator) -> None:
        """Add rows for new classes."""
        width = self.weight.shape[1]
        if self.start == "truncated":
            self._append(weight=_truncated_normal(classes, width, generator), bias=torch.zeros(classes))
            return
        rows, bound = uniform_rows(classes, width, generator), 1 / math.sqrt(width)
        self._append(weight=rows, bias=torch.empty(classes).uniform_(-bound, bound, generator=generator))

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``[B, classes seen]``."""
        return F.linear(features, self.weight, self.bias)


class GrowingCosineHead(_GrowingRows):
    """Cosine similarities to a vector per class seen, times a fixed or a learned scale; every task adds vectors.

    New vectors are truncated normal with standard deviation 0.02, or given.
    """

    def __init__(self, width: int, scale: float = 1.0, *, learn_scale: bool = False):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale)) if learn_scale else scale
        self.weight = nn.Parameter(torch.empty(0, width))

    def grow(self, classes: int, generator: torch.Generator) -> None:
        """Add vectors for new classes."""
        self.append_rows(_truncated_normal(classes, self.weight.shape[1], generator))

    def append_rows(self, rows: Tensor) -> None:
        """Add vectors ``[classes, width]`` for new classes."""
        self._append(weight=rows)

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``[B, classes seen]``."""
        return self.scale * cosine_scores(features, self.weight)


def masked_cross_entropy(logits: Tensor, labels: Tensor, classes: range) -> Tensor:
    """Cross-entropy over the logits of one task's classes."""
    return F.cross_entropy(logits[:, classes.start : classes.stop].float(), labels - classes.start)


def symmetric_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of cross-entropy and reverse cross-entropy, in which zeros of the labels count as 1e-4.

    Wang et al., 2019, "Symmetric Cross Entropy for Robust Learning with Noisy Labels". It is zero for a single class.

    >>> round(symmetric_cross_entropy(torch.zeros(1, 2), torch.tensor([0])).item(), 3)  # (log 2 - log(1e-4) / 2) / 2
    2.649
    """
    probabilities = logits.float().softmax(1)
    reverse = -math.log(_ZERO_LABEL) * (1 - probabilities.gather(1, labels[:, None])).mean()
    return (F.cross_entropy(logits.float(), labels) + reverse) / 2


def cosine_scores(features: Tensor, prototypes: Tensor) -> Tensor:
    """Cosine similarity of every feature to every prototype, ``[B, classes]``, in float32.

    >>> cosine_scores(torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]]))
    tensor([[ 1.,  0., -1.]])
    """
    with torch.autocast(features.device.type, enabled=False):
        return F.normalize(features.float(), dim=1) @ F.normalize(prototypes.float(), dim=1).T


def class_means(features: Tensor, labels: Tensor, classes: range) -> Tensor:
    """The mean feature of each class, not normalised, ``[len(classes), width]``; summed in float64.

    >>> class_means(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([7, 7, 8]), range(7, 9))
    tensor([[2.],
            [5.]])
    """
    sums = class_sums(features, labels, classes)
    counts = torch.bincount(labels - classes.start, minlength=len(classes)).to(sums.device)
    return (sums / counts[:, None]).to(features)


def class_sums(features: Tensor, labels: Tensor, classes: range) -> Tensor:
    """The sum of the features of each class, ``[len(classes), width]`` float64."""
    exact = to_float64(features)
    local = (labels - classes.start).to(exact.device)
    sums = exact.new_zeros(len(classes), exact.shape[1])
    if sums.device.type == "cpu":
        return sums.index_add(0, local, exact)
    # Deterministic on a GPU, unlike index_add.
    for chunk, chunk_labels in zip(exact.split(_CHUNK), local.split(_CHUNK), strict=True):
        sums += F.one_hot(chunk_labels, len(classes)).double().T @ chunk
    return sums
