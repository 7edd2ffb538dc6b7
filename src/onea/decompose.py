# SPDX-License-Identifier: Apache-2.0
"""Decompositions of small matrices, by one thread on a CPU.

Several threads wait for each other at every column: 12 matrices of 128 x 768 take two of them three times as long.
PyTorch knows one number of threads for the whole process, which a new thread takes over at its first operation: threads
that may begin while others are in here must be told theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_SMALL = 512  # the short side up to which one thread is faster


def svd(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thin singular value decomposition ``U, S, Vt`` of each matrix."""
    with _one_thread_if_small(matrices):
        left, spectrum, right = torch.linalg.svd(matrices, full_matrices=False)
    return left, spectrum, right


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of each symmetric matrix."""
    with _one_thread_if_small(matrices):
        values, vectors = torch.linalg.eigh(matrices)
    return values, vectors


@contextmanager
def _one_thread_if_small(matrices: Tensor) -> Iterator[None]:
    threads = torch.get_num_threads()
    if matrices.device.type != "cpu" or threads == 1 or min(matrices.shape[-2:]) > _SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
