# SPDX-License-Identifier: Apache-2.0
"""Attention among few tokens, in kernels of our own: 65 tokens fit no tile of the general ones.

PyTorch's also leave the gradients of queries, keys and values to be put beside each other. Ours writes them there, and
keeps nothing for the way back but its input.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

_TRITON = importlib.util.find_spec("triton") is not None
_LONGEST = 128  # tokens; beyond, one program cannot hold them
_WIDTHS = (16, 32, 64)  # of a head; wider ones do not fit the shared memory of smaller chips


def is_supported(qkv: Tensor, heads: int) -> bool:
    """Whether these projections ``[B, N, 3 x width]`` are ours: in bfloat16 on a GPU of NVIDIA's, in a compiled pass.

    Only in a compiled one, since the host takes longer to launch a Triton kernel than the fused ones of PyTorch, and
    because compiled passes need what Triton needs, a C compiler for instance, in any case.
    """
    return (
        _TRITON
        and torch.compiler.is_compiling()
        and qkv.requires_grad
        and qkv.is_cuda
        and torch.version.hip is None
        and qkv.dtype == torch.bfloat16
        and qkv.shape[1] <= _LONGEST
        and qkv.shape[2] // (3 * heads) in _WIDTHS
    )


def tile_size(tokens: int) -> tuple[int, int]:
    """Rows of a tile and warps of a program; one token may be left over. Tensor cores of Hopper begin at 64 rows."""
    return (64, 4) if tokens <= 65 else (128, 8)


def short_attention(qkv: Tensor, heads: int) -> Tensor:
    """Projections ``[B, N, 3 x width]`` to values weighed by attention, ``[B, N, width]``."""
    found: Tensor = _ShortAttention.apply(qkv, heads)
    return found


class _ShortAttention(torch.autograd.Function):
    """Dynamo traces both ways into the graph, launches and all, so that nothing of it is left to the host."""

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
