# SPDX-License-Identifier: Apache-2.0
"""Named tensors, and tensors in double precision."""

from __future__ import annotations

from torch import Tensor

Tensors = dict[str, Tensor]


def to_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64, on its own device, or on the CPU where that device has no float64."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def compact(tensor: Tensor) -> Tensor:
    """The tensor in float32 with values that bfloat16 can hold, which halves what has to be kept of it."""
    return tensor.bfloat16().float()


def cast_like(value: Tensor, original: Tensor) -> Tensor:
    """The value with the shape, type and device of the original."""
    return value.reshape(original.shape).to(original)
