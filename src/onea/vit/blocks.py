# SPDX-License-Identifier: Apache-2.0
"""The blocks of timm's vision transformers with hooks: the supported classes, their steps, and their attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.vit.short_attention import is_supported, short_attention

_MAX_FUSED_QUERIES = 1024  # images x heads x tokens; measured on two cores


class RotaryEmbedding(NamedTuple):
    """Rotary position embedding of the patches; other tokens have none.

    Attributes:
        table: sines and cosines, ``[patches, 2 x head width]`` or one such table for each head.
        start: index of the first patch in the sequence.
    """

    table: Tensor
    start: int

    def rotate(self, x: Tensor, half: bool) -> Tensor:
        """Apply the embedding to queries or keys ``[B, heads, N, head width]``."""
        from timm.layers import apply_rot_embed_cat

        stop = self.start + self.table.shape[-2]
        if x.shape[2] <= self.start:  # only prefix tokens
            return x
        rotated = apply_rot_embed_cat(x[:, :, self.start : stop], self.table, half=half).type_as(x)
        return torch.cat([x[:, :, : self.start], rotated, x[:, :, stop:]], dim=2)


Prefix = tuple[Tensor, Tensor] | None


def attention(
    attn: Any, h: Tensor, update: Tensor | None, prefix: Prefix, queries: int, rotation: RotaryEmbedding | None
) -> Tensor:
    """Self-attention for the first ``queries`` tokens."""
    width = attn.num_heads * attn.head_dim
    if queries == h.shape[1]:  # one projection, because kernel launches take most of the time for a single image
        qkv = attn.qkv(h) if update is None else attn.qkv(h) + update
        plain = prefix is None and isinstance(attn.q_norm, nn.Identity) and isinstance(attn.k_norm, nn.Identity)
        if plain and is_supported(qkv, attn.num_heads):
            return attn.proj(attn.norm(short_attention(qkv, attn.num_heads)))  # type: ignore[no-any-return]
        q, k, v = qkv.unflatten(2, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4).unbind()
    else:
        q, k, v = (_split_heads(part, attn.head_dim) for part in _project(attn, h, update, queries, width))
    q, k = attn.q_norm(q), attn.k_norm(k)
    return _attend(attn, q, k, v, prefix)


def rotary_attention(
    attn: Any, h: Tensor, update: Tensor | None, prefix: Prefix, queries: int, rotation: RotaryEmbedding | None
) -> Tensor:
    """Self-attention of timm's ``EvaAttention`` and ``AttentionRope`` for the first ``queries`` tokens."""
    width = attn.proj.in_features  # older timm versions lack head_dim
    q, k, v = (
        _split_heads(part, width // attn.num_heads) for part in _project_separately(attn, h, update, queries, width)
    )
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rotation is not None:
        half = getattr(attn, "rotate_half", False)
        q, k = rotation.rotate(q, half), rotation.rotate(k, half)
    q, k = q.type_as(v), k.type_as(v)
    if k.shape[1] < q.shape[1]:  # several heads share keys and values
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    return _attend(attn, q, k, v, prefix)


def _attend(attn: Any, q: Tensor, k: Tensor, v: Tensor, prefix: Prefix) -> Tensor:
    if prefix is not None:
        keys, values = (part.to(k.dtype).expand(len(k), -1, -1, -1) for part in prefix)
        k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
    mixed = _scaled_dot_product(q, k, v)
    return attn.proj(attn.norm(mixed.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scaled dot-product attention: PyTorch's fused kernel, except where it is slower.

    On a CPU in bf16 the fused kernel trains 2-7 times slower; in inference it is twice as fast with few images, and no
    faster with many.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        is_training = q.requires_grad or k.requires_grad or v.requires_grad
        if is_training or q.shape[:-1].numel() > _MAX_FUSED_QUERIES:
            return torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT, dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v)


def _project(attn: Any, h: Tensor, update: Tensor | None, queries: int, width: int) -> tuple[Tensor, ...]:
    """Queries of the first tokens; keys and values of all."""
    if queries == h.shape[1]:
        qkv = attn.qkv(h)
        return (qkv if update is None else qkv + update).split(width, dim=2)  # type: ignore[no-any-return]
    weight, bias = attn.qkv.weight, attn.qkv.bias
    q = F.linear(h[:, :queries], weight[:width], None if bias is None else bias[:width])
    kv = F.linear(h, weight[width:], None if bias is None else bias[width:])
    if update is not None:
        q, kv = q + update[:, :queries, :width], kv + update[:, :, width:]
    return q, *kv.split(width, dim=2)


def _project_separately(attn: Any, h: Tensor, update: Tensor | None, queries: int, width: int) -> tuple[Tensor, ...]:
    """Like ``_project``, for separate query, key and value layers, or separate biases."""
    if attn.qkv is not None:
        parts = _project(attn, h, update, queries, width)
    else:
        parts = attn.q_proj(h[:, :queries]), attn.k_proj(h), attn.v_proj(h)
        if update is not None:
            q, k, v = update.chunk(3, dim=2)
            parts = parts[0] + q[:, :queries], parts[1] + k, parts[2] + v
    biases = (getattr(attn, name, None) for name in ("q_bias", "k_bias", "v_bias"))
    return tuple(p if b is None else p + b.to(p.dtype) for p, b in zip(parts, biases, strict=True))


def _split_heads(x: Tensor, width: int) -> Tensor:
    """``[B, N, width]`` to ``[B, heads, N, head width]``."""
    return x.reshape(*x.shape[:2], -1, width).transpose(1, 2)


class BlockOps:
    """The steps of timm's ``Block``, between which hooks are called; a namespace of functions."""

    attention = staticmethod(attention)

    @staticmethod
    def pre_attention(block: Any, x: Tensor) -> Tensor:
        """The input of attention."""
        return block.norm1(x)  # type: ignore[no-any-return]

    @staticmethod
    def post_attention(block: Any, mixed: Tensor) -> Tensor:
        """The update of the tokens from the output of attention."""
        return block.ls1(mixed)  # type: ignore[no-any-return]

    @staticmethod
    def mlp(block: Any, u: Tensor) -> Tensor:
        """The update of the tokens from the MLP."""
        return block.ls2(block.mlp(block.norm2(u)))  # type: ignore[no-any-return]


class PostNormOps(BlockOps):
    """timm's ``ResPostBlock``: norms after attention and MLP instead of before them."""

    @staticmethod
    def pre_attention(block: Any, x: Tensor) -> Tensor:
        """The tokens, unchanged."""
        return x

    @staticmethod
    def post_attention(block: Any, mixed: Tensor) -> Tensor:
        """The normalised output of attention."""
        return block.norm1(mixed)  # type: ignore[no-any-return]

    @staticmethod
    def mlp(block: Any, u: Tensor) -> Tensor:
        """The normalised output of the MLP."""
        return block.norm2(block.mlp(u))  # type: ignore[no-any-return]


class EvaOps(BlockOps):
    """timm's ``EvaBlock``: rotary positions; layer scales are plain tensors or missing."""

    attention = staticmethod(rotary_attention)

    @staticmethod
    def post_attention(block: Any, mixed: Tensor) -> Tensor:
        """The update of the tokens from the output of attention."""
        return mixed if block.gamma_1 is None else block.gamma_1 * mixed

    @staticmethod
    def mlp(block: Any, u: Tensor) -> Tensor:
        """The update of the tokens from the MLP."""
        update: Tensor = block.mlp(block.norm2(u))
        return update if block.gamma_2 is None else block.gamma_2 * update


class EvaPostNormOps(PostNormOps):
    """timm's ``EvaBlockPostNorm``."""

    attention = staticmethod(rotary_attention)


def block_ops_for(vit: Any) -> type[BlockOps] | str:
    """The operations of a network's blocks; or why hooks are not supported, as the end of a sentence."""
    from timm.layers import AttentionRope
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
    from timm.models.vision_transformer import Attention, Block, ResPostBlock, VisionTransformer

    plain: dict[type, type[BlockOps]] = {Block: BlockOps, ResPostBlock: PostNormOps}
    eva: dict[type, type[BlockOps]] = {EvaBlock: EvaOps, EvaBlockPostNorm: EvaPostNormOps}
    families = {
        VisionTransformer: (plain, (Attention,)),
        VisionTransformerDistilled: (plain, (Attention,)),
        Eva: (eva, (EvaAttention, AttentionRope)),
    }
    if type(vit) not in families:
        return f"it is timm's {type(vit).__name__}, which does not support adapters, prompts or LoRA"
    kinds, attentions = families[type(vit)]
    for block in vit.blocks:
        if type(block) not in kinds:
            return f"its blocks are timm's {type(block).__name__}, which have no step between attention and MLP"
        if type(block.attn) not in attentions:
            return f"its attention is timm's {type(block.attn).__name__}, which does not support prompts or LoRA"
        if getattr(block.attn, "gate", None) is not None:
            return "its attention has gates, which do not support prompts or LoRA"
    return kinds[type(vit.blocks[0])]


def rotary_embeddings(vit: Any, extra: int) -> list[RotaryEmbedding] | None:
    """The rotary embedding of every block, with ``extra`` more tokens before the patches; None without one."""
    rope = getattr(vit, "rope", None)
    if rope is None:
        return None
    table = rope.get_embed(shape=vit.patch_embed.grid_size) if vit.dynamic_img_size else rope.get_embed()
    tables = table.unbind() if vit.rope_mixed else (table,) * len(vit.blocks)
    return [RotaryEmbedding(table, vit.num_prefix_tokens + extra) for table in tables]
