# SPDX-License-Identifier: Apache-2.0
"""SSF: a learned scale and shift after every operation of a frozen ViT."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from onea.errors import OneaError
from onea.vit.frozen import FrozenViT
from onea.vit.hooks import BlockHooks

_Layer = nn.LayerNorm | nn.Linear | nn.Conv2d


class SSF(nn.Module, BlockHooks):
    """``scale * y + shift`` per channel of every output ``y`` of a norm, a linear layer or the patch embedding.

    All of these end in an affine map, so the network runs at its own speed with ``scale * weight`` and
    ``scale * bias + shift`` in place of weight and bias; a layer without a bias gains one. See
    https://arxiv.org/abs/2210.08823, section 3.

    Raises:
        OneaError: an operation of the network is of a kind that has no place for a shift.
    """

    whole_sequence = False

    def __init__(self, vit: FrozenViT, generator: torch.Generator, deviation: float = 0.02):
        super().__init__()
        if kind := why_not_affine(vit):
            raise OneaError(
                f"Backbone '{vit.name}' has a {kind}, which cannot be shifted as SSF does; choose another method."
            )
        self.scale, self.shift = nn.ParameterDict(), nn.ParameterDict()
        for name, layer in _layers(vit):
            channels = len(layer.weight)
            # Near the identity, not at it: the authors draw scales around one and shifts around zero.
            self.scale[_key(name)] = nn.Parameter(1 + deviation * torch.randn(channels, generator=generator))
            self.shift[_key(name)] = nn.Parameter(deviation * torch.randn(channels, generator=generator))

    def weights(self, vit: FrozenViT) -> dict[str, Tensor]:
        """The network's affine maps with scale and shift folded in, in full precision."""
        folded = {}
        for name, layer in _layers(vit):
            scale, shift, weight = self.scale[_key(name)], self.shift[_key(name)], layer.weight.float()
            folded[f"{name}.weight"] = weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
            folded[f"{name}.bias"] = shift if layer.bias is None else layer.bias.float() * scale + shift
            for bias, own in _separate_biases(vit, name, scale):
                folded[bias] = own
        return folded


def _layers(vit: FrozenViT) -> Iterator[tuple[str, _Layer]]:
    for name, module in vit.named_modules():
        if isinstance(module, nn.LayerNorm | nn.Linear | nn.Conv2d):
            yield name, module


def _separate_biases(vit: FrozenViT, name: str, scale: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Biases of a joint projection that its attention keeps apart from it, times their scales."""
    attention, _, layer = name.rpartition(".")
    if layer != "qkv":
        return
    for part, own in zip(("q_bias", "k_bias", "v_bias"), scale.chunk(3), strict=True):
        bias = getattr(vit.get_submodule(attention), part, None)
        if isinstance(bias, nn.Parameter):  # that of the keys is always zero, and no parameter
            yield f"{attention}.{part}", bias.float() * own


def why_not_affine(vit: FrozenViT) -> str:
    """The operation of a network that cannot be shifted, by its kind; empty where all can."""
    for name, module in vit.named_modules():
        known = isinstance(module, nn.Linear | nn.LayerNorm) or name == "vit.patch_embed.proj"
        if isinstance(getattr(module, "weight", None), nn.Parameter) and not known:
            return type(module).__name__
    return ""


def _key(name: str) -> str:
    """A module's name without the dots that parameter names may not have."""
    return name.removeprefix("vit.").replace(".", "_")
