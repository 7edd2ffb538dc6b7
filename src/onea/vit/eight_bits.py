# SPDX-License-Identifier: Apache-2.0
"""Weights in eight bits: each matrix as whole numbers from -127 to 127, with one scale for each of its rows.

``NAME`` is then an int8 tensor and ``NAME.scale`` has a float32 for each of its rows. A weight is its whole number
times its row's scale. Norms, biases, tokens and positions are few and stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from onea.tensors import Tensors

SCALE = ".scale"
LARGEST = 127
_CLIPPED_AT = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)  # of the largest weight of a row


def packed(tensors: Mapping[str, Tensor]) -> Tensors:
    """These tensors with every matrix, and every convolution by its output rows, in eight bits.

    >>> packed({"a.weight": torch.tensor([[0.5, -0.5]]), "a.bias": torch.ones(1)})["a.weight"].tolist()
    [[127, -127]]
    """
    result: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and name.endswith(".weight"):
            result[name], result[name + SCALE] = rounded(tensor)
        else:
            result[name] = tensor
    return result


def expanded(tensors: Mapping[str, Tensor]) -> Tensors:
    """The weights in float32, in memory of their own; those that are not in eight bits are only converted.

    Raises:
        ValueError: the scales are not those of the matrices.
    """
    small = {name for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    scales = {name + SCALE for name in small}
    result: Tensors = {}
    for name, tensor in tensors.items():
        if name in small:  # whole numbers times floats: one pass, without a copy in between
            result[name] = tensor * _scale_of(name, tensors)
        elif name not in scales:
            result[name] = tensor.to(torch.float32, copy=True)
    return result


def rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers and the scale of each row, with the least squared error that one of the clippings gives."""
    rows = matrix.double().flatten(1)
    top = rows.abs().amax(1, keepdim=True).clamp(min=1e-300)  # a row of zeros stays one
    most = torch.full((len(rows), 1), -1.0, dtype=torch.float64)
    numbers, scales = torch.zeros_like(rows), torch.zeros_like(most)
    for ratio in _CLIPPED_AT:
        trial = (rows * (LARGEST / (ratio * top))).round().clamp(-LARGEST, LARGEST)
        shared, own = (rows * trial).sum(1, keepdim=True), trial.square().sum(1, keepdim=True).clamp(min=1)
        explained = shared.square() / own  # of the row's squares, if the scale is the best for these numbers
        better = explained > most
        numbers, scales = torch.where(better, trial, numbers), torch.where(better, shared / own, scales)
        most = torch.where(better, explained, most)
    return numbers.to(torch.int8).view(matrix.shape), scales.flatten().float()


def _scale_of(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The scales of a matrix, in a shape that multiplies its rows."""
    matrix, scale = tensors[name], tensors.get(name + SCALE)
    if scale is None:
        raise ValueError(f"there is no {name}{SCALE}")
    if scale.dtype != torch.float32 or scale.shape != matrix.shape[:1] or matrix.ndim == 0:
        raise ValueError(f"{name}{SCALE} is not one float32 for each row")
    if not scale.isfinite().all():
        raise ValueError(f"{name}{SCALE} is not finite")
    return scale.view(-1, *(1,) * (matrix.ndim - 1))
