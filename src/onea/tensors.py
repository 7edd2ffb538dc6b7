# SPDX-License-Identifier: Apache-2.0
"""Helpers for named tensors, precision, blocks of rows, and decompositions of small matrices.

On a CPU, small matrices are decomposed by a single thread. Several threads would wait for each other at every column:
with two threads, 12 matrices of 128 x 768 take three times as long. PyTorch has one thread count per process, which a
new thread copies at its first operation. Threads that may start during a decomposition must set their own count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
_MAX_PAIRS = 1 << 22  # of rows and columns in a block


def to_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64, on the CPU if its device (MPS) has no float64."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def round_to_bfloat16(tensor: Tensor) -> Tensor:
    """The tensor in float32, rounded to bfloat16 to be stored in half the space."""
    return tensor.bfloat16().float()


def cast_like(value: Tensor, original: Tensor) -> Tensor:
    """The value with the shape, type and device of the original."""
    return value.reshape(original.shape).to(original)


def row_blocks(rows: int, columns: int, pairs: int = _MAX_PAIRS) -> Iterator[slice]:
    """Consecutive slices of rows such that each has a bounded number of (row, column) pairs.

    >>> list(row_blocks(5, 1000, pairs=2000))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, pairs // max(1, columns))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def rows_of_each(values: Tensor) -> list[tuple[int, Tensor]]:
    """Each distinct value, ascending, with the ascending positions that have it; in time ``N log N``.

    >>> rows_of_each(torch.tensor([7, 3, 7]))
    [(3, tensor([1])), (7, tensor([0, 2]))]
    """
    order = values.argsort(stable=True)
    distinct, counts = values[order].unique_consecutive(return_counts=True)
    return list(zip(distinct.tolist(), order.split(counts.tolist()), strict=True))


def add_prefix(prefix: str, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with a prefix added to their names.

    >>> add_prefix("head.", {"bias": Tensor([1.0])})
    {'head.bias': tensor([1.])}
    """
    return {prefix + name: value for name, value in part.items()}


def select_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with a prefix, which is removed.

    >>> select_prefix("head.", {"head.bias": Tensor([1.0]), "other": Tensor([2.0])})
    {'bias': tensor([1.])}
    """
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


_SMALL_SIDE = 512  # length of the short side up to which one thread is faster


def svd(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thin singular value decomposition ``U, S, Vt`` of each matrix."""
    with _single_thread_if_small(matrices):
        left, spectrum, right = torch.linalg.svd(matrices, full_matrices=False)
    return left, spectrum, right


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of each symmetric matrix."""
    with _single_thread_if_small(matrices):
        values, vectors = torch.linalg.eigh(matrices)
    return values, vectors


@contextmanager
def _single_thread_if_small(matrices: Tensor) -> Iterator[None]:
    threads = torch.get_num_threads()
    if matrices.device.type != "cpu" or threads == 1 or min(matrices.shape[-2:]) > _SMALL_SIDE:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
