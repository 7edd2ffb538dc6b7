# SPDX-License-Identifier: Apache-2.0
"""Sizes of batches for inference: few different ones, because each costs memory or a compilation."""

from __future__ import annotations

import torch
from torch import Tensor

EVALUATION_BATCH = 256


def padded(count: int) -> int:
    """The size of the batch that so many rows are padded to: at least ``count``, and one of few.

    A CPU keeps code and scratch memory for every batch size it has met, some 10 MB each in bf16, and a last batch that
    grows with the classes seen would meet a new one after every task. Few rows are padded to a multiple of 4, because
    padding takes as long as images do; many to a multiple of 16.

    >>> [padded(count) for count in (1, 20, 33, 65, 256)]
    [4, 20, 40, 80, 256]
    """
    step = min(max((1 << (count - 1).bit_length()) // 8, 4), 16)
    return -(-count // step) * step


def pad_rows(rows: Tensor) -> Tensor:
    """Rows padded with the last one, so that a run meets few batch sizes.

    Whoever passes padded rows through a network cuts the results to the original length.
    """
    return torch.cat([rows, rows[-1:].expand(padded(len(rows)) - len(rows))])
