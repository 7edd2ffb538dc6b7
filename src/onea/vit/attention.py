# SPDX-License-Identifier: Apache-2.0
"""timm's self-attention with room for hooks: for some of the tokens, with updates of projections and with prefixes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.vit.short_attention import short_attention, takes

_FEW_QUERIES = 1024  # images x heads x tokens; measured on two cores


class Rotation(NamedTuple):
    """Rotary positions of the patches; tokens before ``start`` and behind the patches have none.

    Attributes:
        table: sines and cosines, ``[patches, 2 x head width]`` or one such table for each head.
        start: the place of the first patch in the sequence.
    """

    table: Tensor
    start: int

    def turn(self, x: Tensor, half: bool) -> Tensor:
        """Queries or keys ``[B, heads, N, head width]``, those of patches turned to their positions."""
        from timm.layers import apply_rot_embed_cat

        stop = self.start + self.table.shape[-2]
        if x.shape[2] <= self.start:  # only tokens in front of the patches are asked for
            return x
        turned = apply_rot_embed_cat(x[:, :, self.start : stop], self.table, half=half).type_as(x)
        return torch.cat([x[:, :, : self.start], turned, x[:, :, stop:]], dim=2)


def attention(
    attn: Any, h: Tensor, update: Tensor | None, prefix: tuple[Tensor, Tensor] | None, queries: int
) -> Tensor:
    """Self-attention for the first so many tokens."""
    width = attn.num_heads * attn.head_dim
    if queries == h.shape[1]:  # all three at once: one image waits for each step that the host takes
        qkv = attn.qkv(h) if update is None else attn.qkv(h) + update
        plain = prefix is None and isinstance(attn.q_norm, nn.Identity) and isinstance(attn.k_norm, nn.Identity)
        if plain and takes(qkv, attn.num_heads):
            return attn.proj(attn.norm(short_attention(qkv, attn.num_heads)))  # type: ignore[no-any-return]
        q, k, v = qkv.unflatten(2, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4).unbind()
    else:
        q, k, v = (_in_heads(part, attn.head_dim) for part in _project(attn, h, update, queries, width))
    q, k = attn.q_norm(q), attn.k_norm(k)
    return _answers(attn, q, k, v, prefix)


def rotary_attention(
    attn: Any,
    h: Tensor,
    update: Tensor | None,
    prefix: tuple[Tensor, Tensor] | None,
    queries: int,
    rotation: Rotation | None,
) -> Tensor:
    """Self-attention of timm's ``EvaAttention`` and ``AttentionRope`` for the first so many tokens."""
    width = attn.proj.in_features  # not every version of timm notes the width of a head
    q, k, v = (_in_heads(part, width // attn.num_heads) for part in _project_apart(attn, h, update, queries, width))
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rotation is not None:
        half = getattr(attn, "rotate_half", False)
        q, k = rotation.turn(q, half), rotation.turn(k, half)
    q, k = q.type_as(v), k.type_as(v)
    if k.shape[1] < q.shape[1]:  # several heads share keys and values
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    return _answers(attn, q, k, v, prefix)


def _answers(attn: Any, q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor] | None) -> Tensor:
    if prefix is not None:
        keys, values = (part.to(k.dtype).expand(len(k), -1, -1, -1) for part in prefix)
        k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
    mixed = _mix(q, k, v)
    return attn.proj(attn.norm(mixed.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def _mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Values weighed by attention: PyTorch's fused kernel, but for bf16 on a CPU, where it trains 2-7 times slower.

    There it answers few images twice as fast, and many no faster.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        trains = q.requires_grad or k.requires_grad or v.requires_grad
        if trains or q.shape[:-1].numel() > _FEW_QUERIES:
            return torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT, dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v)


def _project(attn: Any, h: Tensor, update: Tensor | None, queries: int, width: int) -> tuple[Tensor, ...]:
    """Queries of the first so many tokens; keys and values of all."""
    if queries == h.shape[1]:
        qkv = attn.qkv(h)
        return (qkv if update is None else qkv + update).split(width, dim=2)  # type: ignore[no-any-return]
    weight, bias = attn.qkv.weight, attn.qkv.bias
    q = F.linear(h[:, :queries], weight[:width], None if bias is None else bias[:width])
    kv = F.linear(h, weight[width:], None if bias is None else bias[width:])
    if update is not None:
        q, kv = q + update[:, :queries, :width], kv + update[:, :, width:]
    return q, *kv.split(width, dim=2)


def _project_apart(attn: Any, h: Tensor, update: Tensor | None, queries: int, width: int) -> tuple[Tensor, ...]:
    """As ``_project``, where the three may be layers of their own, or have biases apart from the joint layer."""
    if attn.qkv is not None:
        parts = _project(attn, h, update, queries, width)
    else:
        parts = attn.q_proj(h[:, :queries]), attn.k_proj(h), attn.v_proj(h)
        if update is not None:
            q, k, v = update.chunk(3, dim=2)
            parts = parts[0] + q[:, :queries], parts[1] + k, parts[2] + v
    biases = (getattr(attn, name, None) for name in ("q_bias", "k_bias", "v_bias"))
    return tuple(p if b is None else p + b.to(p.dtype) for p, b in zip(parts, biases, strict=True))


def _in_heads(x: Tensor, width: int) -> Tensor:
    """``[B, N, width]`` to ``[B, heads, N, head width]``."""
    return x.reshape(*x.shape[:2], -1, width).transpose(1, 2)
