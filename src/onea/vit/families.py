# SPDX-License-Identifier: Apache-2.0
"""Which of timm's networks take hooks, told by their classes and not by their names, and the pieces of their blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onea.vit.attention import Rotation, attention, rotary_attention

Prefix = tuple[Tensor, Tensor] | None


class Pieces:
    """The pieces of timm's ``Block`` between which hooks take part; never an object, only a place for functions."""

    @staticmethod
    def enter(block: Any, x: Tensor) -> Tensor:
        """Tokens to what attention reads."""
        return block.norm1(x)  # type: ignore[no-any-return]

    @staticmethod
    def attend(
        block: Any, h: Tensor, update: Tensor | None, prefix: Prefix, queries: int, rotation: Rotation | None
    ) -> Tensor:
        """What the first so many tokens gather from all of them."""
        return attention(block.attn, h, update, prefix, queries)

    @staticmethod
    def leave(block: Any, mixed: Tensor) -> Tensor:
        """What attention gathered to what is added to the tokens."""
        return block.ls1(mixed)  # type: ignore[no-any-return]

    @staticmethod
    def mlp(block: Any, u: Tensor) -> Tensor:
        """Tokens after attention to what is added to them."""
        return block.ls2(block.mlp(block.norm2(u)))  # type: ignore[no-any-return]


class PostNormPieces(Pieces):
    """Of timm's ``ResPostBlock``: the norms come behind attention and MLP instead of in front of them."""

    @staticmethod
    def enter(block: Any, x: Tensor) -> Tensor:
        """The tokens as they are."""
        return x

    @staticmethod
    def leave(block: Any, mixed: Tensor) -> Tensor:
        """The norm of what was gathered."""
        return block.norm1(mixed)  # type: ignore[no-any-return]

    @staticmethod
    def mlp(block: Any, u: Tensor) -> Tensor:
        """The norm of the MLP's answer."""
        return block.norm2(block.mlp(u))  # type: ignore[no-any-return]


def _attend_rotated(
    block: Any, h: Tensor, update: Tensor | None, prefix: Prefix, queries: int, rotation: Rotation | None
) -> Tensor:
    """What the first so many tokens gather from all of them, by where each patch is."""
    return rotary_attention(block.attn, h, update, prefix, queries, rotation)


class EvaPieces(Pieces):
    """Of timm's ``EvaBlock``: layer scales are plain tensors, and may be missing."""

    attend = staticmethod(_attend_rotated)

    @staticmethod
    def leave(block: Any, mixed: Tensor) -> Tensor:
        """What attention gathered to what is added to the tokens."""
        return mixed if block.gamma_1 is None else block.gamma_1 * mixed

    @staticmethod
    def mlp(block: Any, u: Tensor) -> Tensor:
        """Tokens after attention to what is added to them."""
        answer: Tensor = block.mlp(block.norm2(u))
        return answer if block.gamma_2 is None else block.gamma_2 * answer


class EvaPostNormPieces(PostNormPieces):
    """Of timm's ``EvaBlockPostNorm``."""

    attend = staticmethod(_attend_rotated)


def pieces_of(vit: Any) -> type[Pieces] | str:
    """The pieces of a network's blocks; or why no hooks can take part in it, as the end of a sentence."""
    from timm.layers import AttentionRope
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
    from timm.models.vision_transformer import Attention, Block, ResPostBlock, VisionTransformer

    plain: dict[type, type[Pieces]] = {Block: Pieces, ResPostBlock: PostNormPieces}
    eva: dict[type, type[Pieces]] = {EvaBlock: EvaPieces, EvaBlockPostNorm: EvaPostNormPieces}
    families = {
        VisionTransformer: (plain, (Attention,)),
        VisionTransformerDistilled: (plain, (Attention,)),
        Eva: (eva, (EvaAttention, AttentionRope)),
    }
    if type(vit) not in families:
        return f"it is timm's {type(vit).__name__}, which adapters, prompts and LoRA do not fit"
    kinds, attentions = families[type(vit)]
    for block in vit.blocks:
        if type(block) not in kinds:
            return f"its blocks are timm's {type(block).__name__}, without a place between attention and MLP"
        if type(block.attn) not in attentions:
            return f"its attention is timm's {type(block.attn).__name__}, which prompts and LoRA do not fit"
        if getattr(block.attn, "gate", None) is not None:
            return "its attention has gates, which prompts and LoRA do not fit"
    return kinds[type(vit.blocks[0])]


def rotations(vit: Any, extra: int) -> list[Rotation] | None:
    """The rotary positions of every block, with so many tokens put before the patches; None where there are none."""
    rope = getattr(vit, "rope", None)
    if rope is None:
        return None
    table = rope.get_embed(shape=vit.patch_embed.grid_size) if vit.dynamic_img_size else rope.get_embed()
    tables = table.unbind() if vit.rope_mixed else (table,) * len(vit.blocks)
    return [Rotation(each, vit.num_prefix_tokens + extra) for each in tables]
