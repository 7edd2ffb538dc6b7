"""A timm ViT that never changes, run with whatever is plugged into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.errors import OneaError
from onea.vit.plug import NOTHING, Plug


class FrozenViT(nn.Module):
    """A plain timm ``VisionTransformer`` whose weights receive no gradient and stay in evaluation mode.

    Attributes:
        name: what the user asked for.
        digest: sha256 of the weights, as they were loaded.
        size: side of the input image in pixels.
        mean: pixel mean that the weights expect.
        std: pixel standard deviation that the weights expect.
    """

    # timm's models are untyped to us, hence Any.
    def __init__(
        self,
        vit: Any,
        name: str,
        digest: str,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
    ):
        super().__init__()
        _check_plain(vit, name)
        self.vit: Any = vit.requires_grad_(False).eval()
        self.name, self.digest, self.mean, self.std = name, digest, mean, std
        self.width: int = vit.embed_dim
        self.depth = len(vit.blocks)
        self.heads: int = vit.blocks[0].attn.num_heads
        self.size: int = vit.patch_embed.img_size[0]

    def train(self, mode: bool = True) -> FrozenViT:
        """Stay in evaluation mode whatever the parent module does."""
        return super().train(False)

    def keep_matrices_in(self, dtype: torch.dtype) -> FrozenViT:
        """Store the frozen matrices in the precision autocast would cast them to anyway, once instead of every pass."""
        for module in self.vit.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.to(dtype)
        return self

    def forward(self, images: Tensor, plug: Plug = NOTHING, replaced: bool = False) -> Tensor:
        """Features ``[B, width]``: the class token (or the model's own pooling) after the final norm."""
        if not replaced and (weights := plug.weights(self)):
            called: Tensor = torch.func.functional_call(self, weights, (images, plug, True))
            return called
        return self.features(self.through(self.embed(images, plug), plug), plug)

    def embed(self, images: Tensor, plug: Plug = NOTHING) -> Tensor:
        """Tokens that enter the first block."""
        vit = self.vit
        return vit.norm_pre(plug.tokens(vit._pos_embed(vit.patch_embed(images)), self))  # type: ignore[no-any-return]

    def through(self, x: Tensor, plug: Plug = NOTHING, start: int = 0, stop: int | None = None) -> Tensor:
        """Tokens after blocks ``start`` up to, not including, ``stop``."""
        for index in range(start, self.depth if stop is None else stop):
            x = self._block(index, x, plug)
        return x

    def features(self, x: Tensor, plug: Plug = NOTHING) -> Tensor:
        """Features of tokens that left a block, in full precision."""
        x = self.vit.norm(x)
        read = plug.read(x)
        features: Tensor = self.vit.forward_head(x, pre_logits=True) if read is None else read
        return features.float()

    def _block(self, index: int, x: Tensor, plug: Plug) -> Tensor:
        block = self.vit.blocks[index]
        x = plug.enter(index, x)
        h = block.norm1(x)
        u = x + block.ls1(_attention(block.attn, h, plug.beside_qkv(index, h), plug.prefix(index)))
        x = u + block.ls2(block.mlp(block.norm2(u)))
        beside = plug.beside_mlp(index, u)
        if beside is not None:
            x = x + beside  # after layer scale, unscaled by it
        return plug.leave(index, x)


def _attention(attn: Any, h: Tensor, update: Tensor | None, prefix: tuple[Tensor, Tensor] | None) -> Tensor:
    """timm's self-attention with room for updates of its projections and for prefixed keys and values."""
    qkv = attn.qkv(h)
    if update is not None:
        qkv = qkv + update
    batch, length, _ = h.shape
    q, k, v = qkv.reshape(batch, length, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if prefix is not None:
        keys, values = (part.to(k.dtype).expand(batch, -1, -1, -1) for part in prefix)
        k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
    mixed = F.scaled_dot_product_attention(q, k, v)
    return attn.proj(attn.norm(mixed.transpose(1, 2).reshape(batch, length, -1)))  # type: ignore[no-any-return]


def _check_plain(vit: Any, name: str) -> None:
    from timm.models.vision_transformer import Attention, Block, VisionTransformer

    plain = type(vit) is VisionTransformer and all(
        type(block) is Block and type(block.attn) is Attention and getattr(block.attn, "gate", None) is None
        for block in vit.blocks
    )
    if not plain:
        raise OneaError(
            f"Backbone '{name}' is not a plain vision transformer; choose one whose timm name starts with vit_ or deit."
        )
