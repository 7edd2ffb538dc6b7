# SPDX-License-Identifier: Apache-2.0
"""Networks of timm that no hooks can take part in: they give features as they are, for all that trains nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onea.errors import OneaError, is_out_of_memory
from onea.vit.adapter import Adapters
from onea.vit.families import pieces_of
from onea.vit.fp8 import from_fp8
from onea.vit.frozen import FrozenViT
from onea.vit.hooks import NO_HOOKS, BlockHooks
from onea.vit.network_config import NetworkConfig


def frozen(network: Any, name: str, digest: str, config: NetworkConfig) -> FrozenViT:
    """A network of timm, with hooks where they can take part in it."""
    kind = FrozenFeatures if isinstance(pieces_of(network), str) else FrozenViT
    return kind(network, name, digest, config.mean, config.std, config)


class FrozenFeatures(FrozenViT):
    """Any other network of timm: a ConvNeXt, a Swin, a BEiT.

    It has no blocks that could be counted, so its ``depth``, ``heads`` and ``tokens`` are 0.
    """

    def _look_at(self, vit: Any) -> None:
        reason = pieces_of(vit)
        assert isinstance(reason, str)
        missing = [part for part in ("forward_features", "forward_head") if not hasattr(vit, part)]
        if missing:
            raise OneaError(f"Backbone '{self.name}' cannot be used: timm's {type(vit).__name__} has no {missing[0]}.")
        self.frozen_only = reason
        self.width = getattr(vit, "head_hidden_size", None) or vit.num_features
        self.depth = self.heads = self.tokens = 0
        self.shares_keys = False
        weights = (module.weight for module in vit.modules() if isinstance(module, nn.Linear | nn.Conv2d))
        self.matrix_dtype = next(weights).dtype
        args = self.config.model_args
        self.size = int(args.get("img_size") or self.config.input_size or _usual_size(vit))

    def with_image_size(self, size: int) -> FrozenViT:
        """Take images of this side from now on, where the network can."""
        if size == self.size:
            return self
        known = getattr(self.vit, "pretrained_cfg", None) or {}
        try:
            if hasattr(self.vit, "set_input_size"):
                self.vit.set_input_size(img_size=(size, size))
                self.vit.requires_grad_(False)
            elif known.get("fixed_input_size"):
                raise ValueError("its input size is fixed")
            features = self.forward_eager(torch.zeros(1, 3, size, size), NO_HOOKS)  # some sizes fit no window
            assert features.shape == (1, self.width), "it gives no feature"
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            told = (str(error).splitlines() or [type(error).__name__])[0]
            raise OneaError(
                f"Backbone '{self.name}' does not take images of {size} pixels ({told}); leave image_size out."
            ) from error
        self.size = size
        return self

    def keep_matrices_in(self, dtype: torch.dtype, fp8: bool = False) -> FrozenViT:
        """Store linear and convolutional layers in the precision autocast would cast them to anyway."""
        if fp8:
            raise OneaError(f"fp8 is for plain vision transformers, and {self._cannot()}; choose another --precision.")
        from_fp8(self.vit)
        return super().keep_matrices_in(dtype)

    def embed(self, images: Tensor, hooks: BlockHooks = NO_HOOKS, patches: Tensor | None = None) -> Tensor:
        """Tokens are nothing that such a network could show."""
        raise OneaError(f"Hooks cannot take part: {self._cannot()}.")

    def forward_eager(self, images: Tensor, hooks: BlockHooks, patches: Tensor | None = None) -> Tensor:
        """Features, operation by operation."""
        if patches is not None or (hooks is not NO_HOOKS and not (isinstance(hooks, Adapters) and hooks.empty)):
            raise OneaError(f"Hooks cannot take part: {self._cannot()}.")
        features: Tensor = self.vit.forward_head(self.vit.forward_features(images), pre_logits=True)
        if features.dim() == 4:  # some keep the place of what they pooled
            features = features.flatten(1)
        if features.shape[1:] != (self.width,):
            raise OneaError(
                f"Backbone '{self.name}' gives {tuple(features.shape[1:])} numbers, not one feature; choose another."
            )
        return features.float()

    def _cannot(self) -> str:
        return f"of backbone '{self.name}', {self.frozen_only}"


def _usual_size(network: Any) -> int:
    """The side of images that timm says for an architecture."""
    known = getattr(network, "pretrained_cfg", None) or {}
    return int((known.get("input_size") or (3, 224, 224))[1])
