# SPDX-License-Identifier: Apache-2.0
"""How large the inputs of a block's linear layers can become, told from the weights alone, whatever the images are.

A layer norm leaves tokens of a known length, so what its gains, and the layer behind it, can make of them has a limit,
channel by channel. Who knows it need not search every row of tokens for its largest value. No hook comes between a norm
and these layers. What attention gathers is not among them: prefixes and updates of the values change it.

A token's length seldom lies in one direction: numbers are mostly smaller than their limit by the root of the width, 28
for ViT-B. A floating-point format has the same precision there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

# Both factors of a product in eight bits are off by 1/16 at most, and its result in bfloat16 by 1/256: 1.134 in all.
# The rest is for factors below the smallest normal number.
_ROUNDED = 1.25
_STEEPEST = 1.13  # the slope of GELU at the root of 2, rounded up; that of its approximation is no larger


def norm_limits(norm: nn.LayerNorm) -> Tensor:
    """Of what leaves a norm. One channel of ``d`` has all of a token's length at most: the root of ``d - 1``.

    >>> norm_limits(nn.LayerNorm(5, elementwise_affine=False))
    tensor([2., 2., 2., 2., 2.])
    """
    gain, shift = _affine(norm)
    return gain.abs() * math.sqrt(len(gain) - 1) + shift.abs()


def hidden_limits(norm: nn.LayerNorm, layer: nn.Linear) -> Tensor:
    """Of what leaves a linear layer behind a norm, in eight bits or in more, and an activation that enlarges nothing.

    Each channel is the product of a row of weights with a token that is ``sqrt(d)`` long, and what is fixed.
    """
    weight = layer.weight.detach().float()
    gain, shift = (part.to(weight.device) for part in _affine(norm))
    fixed = weight @ shift if layer.bias is None else weight @ shift + layer.bias.detach().float()
    # Rounding adds a share of the sizes of all terms, even where they cancel each other.
    fixed = torch.maximum(fixed.abs(), weight.abs() @ shift.abs())
    lengths: Tensor = (weight * gain).norm(dim=1)
    return _ROUNDED * (lengths * math.sqrt(len(gain)) + fixed)


def gradient_limits(layer: nn.Linear) -> Tensor:
    """Of gradients of length 1 that passed a linear layer, in eight bits or in more, and a GELU behind which it is.

    >>> gradient_limits(nn.Linear(3, 3)).shape
    torch.Size([3])
    """
    lengths: Tensor = layer.weight.detach().float().norm(dim=0)
    return _ROUNDED * _STEEPEST * lengths


def input_limits(block: Any) -> dict[nn.Module, Tensor]:
    """The limits of what enters linear layers of a block, channel by channel, for those layers whose inputs have any.

    Empty for blocks without layer norms in front of attention and MLP. An MLP with gates multiplies two hidden layers,
    and one with a norm of its own changes the hidden one: then only what the block's norms leave has limits.
    """
    from timm.layers import Mlp
    from timm.models.eva import EvaBlock
    from timm.models.vision_transformer import Block

    found: dict[nn.Module, Tensor] = {}
    if type(block) not in (Block, EvaBlock):
        return found
    for norm, parent, names in (
        (block.norm1, block.attn, ("qkv", "q_proj", "k_proj", "v_proj")),
        (block.norm2, block.mlp, ("fc1", "fc1_g", "fc1_x")),
    ):
        if isinstance(norm, nn.LayerNorm):
            layers = (getattr(parent, name, None) for name in names)
            found |= {layer: norm_limits(norm) for layer in layers if isinstance(layer, nn.Linear)}
    mlp = block.mlp
    plain = type(mlp) is Mlp and isinstance(mlp.norm, nn.Identity) and _enlarges_nothing(mlp.act)
    if plain and mlp.fc1 in found:
        found[mlp.fc2] = hidden_limits(block.norm2, mlp.fc1)
    return found


def _enlarges_nothing(activation: nn.Module) -> bool:
    """Whether it is known to multiply each number by something between 0 and 1."""
    from timm.layers import GELU, GELUTanh, QuickGELU

    return type(activation) in (nn.ReLU, nn.GELU, nn.SiLU, GELU, GELUTanh, QuickGELU)


def _affine(norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """What a norm multiplies each channel by, and what it adds."""
    (width,) = norm.normalized_shape
    gain = torch.ones(width) if norm.weight is None else norm.weight.detach().float()
    return gain, torch.zeros_like(gain) if norm.bias is None else norm.bias.detach().float()
