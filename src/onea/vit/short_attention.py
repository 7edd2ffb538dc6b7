# SPDX-License-Identifier: Apache-2.0
"""Triton attention for short sequences: with 65 tokens, most of the tiles of general kernels are empty.

With PyTorch's kernels, the gradients of queries, keys and values must also be concatenated afterwards. This kernel
writes them into one tensor, and saves only its input for the backward pass.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

_TRITON = importlib.util.find_spec("triton") is not None
_MAX_TOKENS = 128  # of one program
_WIDTHS = (16, 32, 64)  # of a head; wider ones do not fit into the shared memory of smaller GPUs


def is_supported(qkv: Tensor, heads: int) -> bool:
    """Whether the kernels support these projections ``[B, N, 3 x width]``: bfloat16 on an NVIDIA GPU, compiled.

    Only in compiled forward passes, because launching a Triton kernel from Python takes longer than PyTorch's fused
    kernels, and because compilation needs the same tools as Triton, such as a C compiler.
    """
    return (
        _TRITON
        and torch.compiler.is_compiling()
        and qkv.requires_grad
        and qkv.is_cuda
        and torch.version.hip is None
        and qkv.dtype == torch.bfloat16
        and qkv.shape[1] <= _MAX_TOKENS
        and qkv.shape[2] // (3 * heads) in _WIDTHS
    )


def tile_size(tokens: int) -> tuple[int, int]:
    """Rows of a tile, which may omit one token, and warps of a program. Hopper's tensor cores need at least 64 rows."""
    return (64, 4) if tokens <= 65 else (128, 8)


def short_attention(qkv: Tensor, heads: int) -> Tensor:
    """Self-attention from projections ``[B, N, 3 x width]``, ``[B, N, width]``."""
    output: Tensor = _ShortAttention.apply(qkv, heads)
    return output


class _ShortAttention(torch.autograd.Function):
    """Dynamo traces forward and backward, including the kernel launches, into the compiled graph."""

    @staticmethod
    def forward(context: Any, qkv: Tensor, heads: int) -> Tensor:
        from onea.vit.short_attention_kernels import short_attention_forward

        qkv = qkv.contiguous()
        context.save_for_backward(qkv)
        context.heads = heads
        images, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        tile, warps = tile_size(tokens)
        out = qkv.new_empty(images, tokens, width)
        short_attention_forward[(images * heads,)](qkv, out, tokens, heads, width // heads, tile, num_warps=warps)
        return out

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        from onea.vit.short_attention_kernels import short_attention_backward

        (qkv,), upper, heads = context.saved_tensors, gradients[0].contiguous(), context.heads
        images, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        tile, warps = tile_size(tokens)
        grad = torch.empty_like(qkv)
        short_attention_backward[(images * heads,)](
            qkv, upper, grad, tokens, heads, width // heads, tile, num_warps=warps
        )
        return grad, None
