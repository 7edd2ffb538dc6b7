# SPDX-License-Identifier: Apache-2.0
"""Named tensors, tensors in double precision, and pairs of rows a block at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

Tensors = dict[str, Tensor]
_PAIRS = 1 << 22  # that are compared at a time


def to_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64, on its own device, or on the CPU where that device has no float64."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def compact(tensor: Tensor) -> Tensor:
    """The tensor in float32 with values that bfloat16 can hold, which halves what has to be kept of it."""
    return tensor.bfloat16().float()


def cast_like(value: Tensor, original: Tensor) -> Tensor:
    """The value with the shape, type and device of the original."""
    return value.reshape(original.shape).to(original)


def row_blocks(rows: int, columns: int, pairs: int = _PAIRS) -> Iterator[slice]:
    """All rows, so many at a time that with every column they make a bounded number of pairs.

    >>> list(row_blocks(5, 1000, pairs=2000))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, pairs // max(1, columns))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def prefixed(prefix: str, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A part's tensors under its prefix.

    >>> prefixed("head.", {"bias": Tensor([1.0])})
    {'head.bias': tensor([1.])}
    """
    return {prefix + name: value for name, value in part.items()}


def part_of(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under a prefix, without it.

    >>> part_of("head.", {"head.bias": Tensor([1.0]), "other": Tensor([2.0])})
    {'bias': tensor([1.])}
    """
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
