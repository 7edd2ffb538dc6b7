# SPDX-License-Identifier: Apache-2.0
"""Batch sizes for inference, and patch dropout for training."""

from __future__ import annotations

import torch
from torch import Tensor

EVALUATION_BATCH = 256


def padded_size(count: int) -> int:
    """The batch size to which ``count`` rows are padded, so that only a few different sizes occur.

    oneDNN keeps code and scratch memory for every batch size, about 10 MB each in bf16, and the size of the last batch
    differs from task to task. Small batches are padded to a multiple of 4, because padding costs as much as images;
    large ones to a multiple of 16.

    >>> [padded_size(count) for count in (1, 20, 33, 65, 256)]
    [4, 20, 40, 80, 256]
    """
    step = min(max((1 << (count - 1).bit_length()) // 8, 4), 16)
    return -(-count // step) * step


def pad_rows(rows: Tensor) -> Tensor:
    """Rows padded with copies of the last one to ``padded_size``; the caller drops the results of the copies."""
    return torch.cat([rows, rows[-1:].expand(padded_size(len(rows)) - len(rows))])


def num_kept_patches(patches: int, drop_rate: float) -> int:
    """The number of patches left by patch dropout, at least one; as in timm's ``PatchDropout``.

    >>> num_kept_patches(64, 0.5), num_kept_patches(49, 0.5), num_kept_patches(4, 0.9)
    (32, 24, 1)
    """
    return max(1, int(patches * (1 - drop_rate)))


def sample_patches(kept: int, patches: int, images: int, generator: torch.Generator) -> Tensor:
    """Random patches to keep of each image, in order: ``int64 [images, kept]``.

    >>> indices = sample_patches(3, 9, 2, torch.Generator().manual_seed(1))
    >>> indices.shape, bool((indices.diff(dim=1) > 0).all()), bool((indices < 9).all())
    (torch.Size([2, 3]), True, True)
    """
    scores = torch.rand(images, patches, generator=generator, device=generator.device)
    return scores.topk(kept, dim=1, sorted=False).indices.sort(dim=1).values


def select_patches(tokens: Tensor, patches: Tensor, prefix: int) -> Tensor:
    """The first ``prefix`` tokens and the selected patches of tokens ``[B, N, width]``."""
    first = torch.arange(prefix, device=patches.device).expand(len(patches), -1)
    chosen = torch.cat([first, prefix + patches], dim=1)  # indices: CPU autocast does not concatenate float16 tokens
    return tokens.gather(1, chosen[:, :, None].expand(-1, -1, tokens.shape[2]))
