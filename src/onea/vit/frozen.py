"""A timm ViT that never changes, with the points where small modules plug in."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from onea.errors import OneaError


class Plug(Protocol):
    """Something that runs beside the frozen blocks."""

    def beside_mlp(self, block: int, u: Tensor) -> Tensor:
        """What to add to block ``block``'s output, given the residual stream before its second norm."""


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

    def forward(self, images: Tensor, plug: Plug | None = None) -> Tensor:
        """Features ``[B, width]``: the class token (or the model's own pooling) after the final norm."""
        vit = self.vit
        x = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))
        for index, block in enumerate(vit.blocks):
            u = x + block.ls1(block.attn(block.norm1(x)))
            x = u + block.ls2(block.mlp(block.norm2(u)))
            if plug is not None:
                x = x + plug.beside_mlp(index, u)  # added after layer scale, unscaled by it
        features: Tensor = vit.forward_head(vit.norm(x), pre_logits=True)
        return features.float()


def _check_plain(vit: Any, name: str) -> None:
    from timm.models.vision_transformer import Block, VisionTransformer

    if type(vit) is not VisionTransformer or not all(type(block) is Block for block in vit.blocks):
        raise OneaError(
            f"Backbone '{name}' is not a plain vision transformer; choose one whose timm name starts with vit_ or deit."
        )
