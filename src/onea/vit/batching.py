# SPDX-License-Identifier: Apache-2.0
"""Batch sizes for inference, and patch dropout for training."""

from __future__ import annotations

import torch
from torch import Tensor

EVALUATION_BATCH = 256


def padded_size(count: int) -> int:
    """The size of the batch that so many rows are padded to: at least ``count``, and one of few.

    A CPU keeps code and scratch memory for every batch size it has met, some 10 MB each in bf16, and a last batch that
    grows with the classes seen would meet a new one after every task. Few rows are padded to a multiple of 4, because
    padding takes as long as images do; many to a multiple of 16.

    >>> [padded_size(count) for count in (1, 20, 33, 65, 256)]
    [4, 20, 40, 80, 256]
    """
    step = min(max((1 << (count - 1).bit_length()) // 8, 4), 16)
    return -(-count // step) * step


def pad_rows(rows: Tensor) -> Tensor:
    """Rows padded with the last one, so that a run meets few batch sizes.

    Whoever passes padded rows through a network cuts the results to the original length.
    """
    return torch.cat([rows, rows[-1:].expand(padded_size(len(rows)) - len(rows))])


def num_kept_patches(patches: int, drop_rate: float) -> int:
    """How many of so many patches are left, never none; as timm's ``PatchDropout`` counts.

    >>> num_kept_patches(64, 0.5), num_kept_patches(49, 0.5), num_kept_patches(4, 0.9)
    (32, 24, 1)
    """
    return max(1, int(patches * (1 - drop_rate)))


def sample_patches(kept: int, patches: int, images: int, generator: torch.Generator) -> Tensor:
    """Which so many of its patches are kept of each image, ``int64 [images, kept]``: its own random choice, in order.

    >>> drawn = sample_patches(3, 9, 2, torch.Generator().manual_seed(1))
    >>> drawn.shape, bool((drawn.diff(dim=1) > 0).all()), bool((drawn < 9).all())
    (torch.Size([2, 3]), True, True)
    """
    drawn = torch.rand(images, patches, generator=generator, device=generator.device)
    return drawn.topk(kept, dim=1, sorted=False).indices.sort(dim=1).values


def select_patches(tokens: Tensor, patches: Tensor, prefix: int) -> Tensor:
    """Of tokens ``[B, N, width]``, the first ``prefix``, which are no patches, and the patches that were drawn."""
    first = torch.arange(prefix, device=patches.device).expand(len(patches), -1)
    chosen = torch.cat([first, prefix + patches], dim=1)  # of places: autocast on a CPU does not join tokens in float16
    return tokens.gather(1, chosen[:, :, None].expand(-1, -1, tokens.shape[2]))
