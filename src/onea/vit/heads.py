# SPDX-License-Identifier: Apache-2.0
"""Classifiers on the features: heads that a task trains and throws away, and prototypes that stay."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.tensors import to_float64

_PART = 4096  # rows whose classes are in memory as ones and zeros at once


class LinearHead(nn.Module):
    """A plain linear classifier over a task's own classes."""

    def __init__(self, width: int, classes: int, generator: torch.Generator):
        super().__init__()
        self.weight = nn.Parameter(_uniform(classes, width, generator))
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        return F.linear(features, self.weight, self.bias)


class CosineHead(nn.Module):
    """Cosine similarities to learned class vectors, times one learned scale."""

    def __init__(self, width: int, classes: int, generator: torch.Generator, scale: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(_uniform(classes, width, generator))
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        return self.scale * cosine_scores(features, self.weight)


class GrowingHead(nn.Module):
    """One linear classifier over all classes seen; every task adds its rows, so their number need not be known.

    ``start`` is how new rows begin: ``truncated`` (normal with deviation 0.02, zero bias) or ``uniform`` (both within
    1 / sqrt(width), as ``nn.Linear`` does).
    """

    def __init__(self, width: int, start: Literal["truncated", "uniform"] = "truncated"):
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(0, width))
        self.bias = nn.Parameter(torch.empty(0))

    def grow(self, classes: int, generator: torch.Generator) -> None:
        """Add rows; the old ones keep their values."""
        width = self.weight.shape[1]
        bound = 1 / math.sqrt(width)
        rows, bias = torch.empty(classes, width), torch.zeros(classes)
        if self.start == "truncated":
            nn.init.trunc_normal_(rows, std=0.02, generator=generator)
        else:
            rows.uniform_(-bound, bound, generator=generator)
            bias.uniform_(-bound, bound, generator=generator)
        device = self.weight.device
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), rows.to(device)]))
        self.bias = nn.Parameter(torch.cat([self.bias.detach(), bias.to(device)]))

    def load_rows(self, weight: Tensor, bias: Tensor) -> None:
        """Take saved rows back, however many they are."""
        device = self.weight.device
        self.weight, self.bias = nn.Parameter(weight.to(device)), nn.Parameter(bias.to(device))

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``[B, classes seen]``."""
        return F.linear(features, self.weight, self.bias)


def masked_cross_entropy(logits: Tensor, labels: Tensor, classes: range) -> Tensor:
    """Cross-entropy over the classes of one task alone: what masking all other logits with minus infinity gives."""
    return F.cross_entropy(logits[:, classes.start : classes.stop].float(), labels - classes.start)


def _uniform(classes: int, width: int, generator: torch.Generator) -> Tensor:
    bound = 1 / math.sqrt(width)
    return torch.empty(classes, width).uniform_(-bound, bound, generator=generator)


def cosine_scores(features: Tensor, prototypes: Tensor) -> Tensor:
    """Cosine similarity of every feature to every prototype, ``[B, classes]``, in full precision.

    >>> cosine_scores(torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]]))
    tensor([[ 1.,  0., -1.]])
    """
    with torch.autocast(features.device.type, enabled=False):
        return F.normalize(features.float(), dim=1) @ F.normalize(prototypes.float(), dim=1).T


def class_means(features: Tensor, labels: Tensor, classes: range) -> Tensor:
    """The mean feature of each class, un-normalised, ``[len(classes), width]``; summed in float64.

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
    for rows, own in zip(exact.split(_PART), local.split(_PART), strict=True):
        sums += F.one_hot(own, len(classes)).double().T @ rows
    return sums
