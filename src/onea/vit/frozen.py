# SPDX-License-Identifier: Apache-2.0
"""Frozen timm networks: transformers with hooks, and other networks as feature extractors."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.errors import OneaError, is_out_of_memory
from onea.vit.adapter import Adapters
from onea.vit.batching import select_patches
from onea.vit.blocks import RotaryEmbedding, block_ops_for, rotary_embeddings
from onea.vit.compiled import CompiledViT
from onea.vit.fp8 import Fp8Linear, from_fp8, to_fp8
from onea.vit.hooks import NO_HOOKS, BlockHooks
from onea.vit.network_config import NetworkConfig


class FrozenViT(nn.Module):
    """A timm ``VisionTransformer`` or ``Eva`` with frozen weights, always in evaluation mode.

    Attributes:
        name: as given by the user.
        config: architecture, licence and preprocessing.
        no_hooks_reason: why the network does not support hooks; empty if it does.
        digest: sha256 of the weights as loaded.
        size: side of the input image in pixels.
        tokens: number of tokens, without those of hooks.
        mean: mean of the pixels, for normalisation.
        std: standard deviation of the pixels, for normalisation.
        shares_keys: whether several heads share keys and values, which makes the projections differ in width.
        rotary: whether blocks use rotary positions, and therefore need all patches in order.
        matrix_dtype: the dtype in which the frozen matrices are stored.
        fp8: whether products with them are in FP8.
    """

    no_hooks_reason = ""
    rotary = False

    def __init__(self, vit: Any, name: str, digest: str, config: NetworkConfig):
        super().__init__()
        self.name, self.digest, self.config, self.mean, self.std = name, digest, config, config.mean, config.std
        self.vit: Any = vit.requires_grad_(False).eval()  # Any, because timm is untyped
        self.fp8 = False
        self._compiled: CompiledViT | None = None
        self._inspect(vit)

    def _inspect(self, vit: Any) -> None:
        """Cache the attributes that forward passes need, because looking them up takes longer than many kernels."""
        ops = block_ops_for(vit)
        if isinstance(ops, str):
            raise OneaError(f"Backbone '{self.name}' is not a plain vision transformer: {ops}.")
        self._ops = ops
        self.width: int = vit.embed_dim
        self.depth = len(vit.blocks)
        self.heads: int = vit.blocks[0].attn.num_heads
        self.shares_keys = any(getattr(block.attn, "num_kv_groups", 1) > 1 for block in vit.blocks)
        self.rotary = getattr(vit, "rope", None) is not None
        self.matrix_dtype: torch.dtype = vit.blocks[0].attn.proj.weight.dtype
        self._num_pooled = _num_pooled(vit)
        self._is_plain_patch_embed = _is_plain_patch_embed(vit.patch_embed)
        self._update_size()

    def _update_size(self) -> None:
        self.size: int = self.vit.patch_embed.img_size[0]
        self.tokens: int = self.vit.num_prefix_tokens + self.vit.patch_embed.num_patches

    def with_image_size(self, size: int) -> FrozenViT:
        """Change the input size; positions are resampled as in timm, other weights stay the same."""
        if size == self.size:
            return self
        patch = self.vit.patch_embed.patch_size[0] if self._is_plain_patch_embed else self.vit.patch_embed.feat_ratio()
        if size < patch or size % patch:
            fitting = max(patch, round(size / patch) * patch)
            raise OneaError(f"image_size is {size}, but patches of '{self.name}' are {patch} wide; choose {fitting}.")
        self.vit.set_input_size(img_size=(size, size))
        self.vit.requires_grad_(False)  # resampled positions are new
        self._update_size()
        return self

    def train(self, mode: bool = True) -> FrozenViT:
        """Stay in evaluation mode, even if the parent module is switched to training."""
        return super().train(False)

    def cast_matrices(self, dtype: torch.dtype, fp8: bool = False) -> FrozenViT:
        """Cast the frozen matrices once to the dtype that autocast would cast them to in every forward pass.

        With ``fp8``, products in the blocks are in FP8, except in the last block if only its class token is used: there
        FP8 saves no time, and its rounding would affect the feature directly.
        """
        from_fp8(self.vit)
        if fp8:  # from the original weights, before they are rounded
            to_fp8(self.vit.blocks[: -1 if self._num_pooled else None])
        for module in self.vit.modules():
            if isinstance(module, Fp8Linear):
                module.cast_originals(dtype)
            elif isinstance(module, nn.Linear | nn.Conv2d):
                module.to(dtype)
        self.matrix_dtype, self.fp8 = dtype, fp8
        return self

    def compile_for(self, sizes: Collection[int], backend: str = "inductor") -> FrozenViT:
        """Compile forward passes for batches up to these sizes on first use; no sizes switch compilation off."""
        self._compiled = CompiledViT(self, sizes, backend) if sizes else None
        return self

    def truncate(self, depth: int) -> FrozenViT:
        """Keep the first ``depth`` blocks, and use the output of the last of them; 0 keeps all.

        Raises:
            OneaError: there are fewer blocks.
        """
        if depth and self.no_hooks_reason:
            raise OneaError(f"depth is {depth}, but '{self.name}' has no sequence of blocks; leave it out.")
        if not 0 <= depth <= self.depth:
            raise OneaError(f"depth is {depth}, but '{self.name}' has {self.depth} blocks; give 1 to {self.depth}.")
        if depth:
            self.vit.blocks = self.vit.blocks[:depth]
            self.depth = depth
        return self

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run forward passes uncompiled, to count their operations."""
        compiled, self._compiled = self._compiled, None
        try:
            yield
        finally:
            self._compiled = compiled

    def forward(
        self, images: Tensor, hooks: BlockHooks = NO_HOOKS, patches: Tensor | None = None, replaced: bool = False
    ) -> Tensor:
        """Features ``[B, width]``: the class token (or the model's own pooling) after the final norm.

        ``patches`` selects patches of each image, ``int64 [B, kept]``; without it, all are used.
        """
        if not replaced and (weights := hooks.weights(self)):
            with self._without_fp8():
                features: Tensor = torch.func.functional_call(self, weights, (images, hooks, patches, True))
            return features
        if self._compiled and self._compiled.accepts_images(images, hooks):
            return self._compiled(images, hooks, patches)
        return self.forward_eager(images, hooks, patches)

    @contextlib.contextmanager
    def _without_fp8(self) -> Iterator[None]:
        """Use the original weights, because replacing them does not change their FP8 copies."""
        layers = [module for module in self.vit.modules() if isinstance(module, Fp8Linear)] if self.fp8 else []
        for layer in layers:
            layer.disabled = True
        try:
            yield
        finally:
            for layer in layers:
                layer.disabled = False

    def forward_eager(self, images: Tensor, hooks: BlockHooks, patches: Tensor | None = None) -> Tensor:
        """``forward`` without compilation."""
        return self.features(self.forward_blocks(self.embed(images, hooks, patches), hooks), hooks)

    def forward_to_block(self, images: Tensor, hooks: BlockHooks = NO_HOOKS, block: int | None = None) -> Tensor:
        """Tokens that enter a block: by default the first block with hooks, so that they do not depend on training."""
        block = hooks.first_block if block is None else block
        if self._compiled and self._compiled.accepts(images, hooks):
            return self._compiled.to_block(images, hooks, block)
        return self.to_block_eager(images, block, hooks)

    def forward_from_block(self, tokens: Tensor, hooks: BlockHooks = NO_HOOKS, patches: Tensor | None = None) -> Tensor:
        """Features of tokens from ``forward_to_block``, in any precision; gradients flow through the later blocks only.

        ``patches`` selects patches as in ``forward``.
        """
        if self._compiled and self._compiled.accepts(tokens, hooks):
            return self._compiled.from_block(tokens, hooks, patches)
        return self.from_block_eager(tokens, hooks, patches)

    def to_block_eager(self, images: Tensor, block: int, hooks: BlockHooks = NO_HOOKS) -> Tensor:
        """``forward_to_block`` without compilation."""
        return self.forward_blocks(self.embed(images, hooks), hooks, stop=block)

    def from_block_eager(self, tokens: Tensor, hooks: BlockHooks, patches: Tensor | None = None) -> Tensor:
        """``forward_from_block`` without compilation."""
        if patches is not None:
            tokens = select_patches(tokens, patches, self.vit.num_prefix_tokens + hooks.extra_tokens)
        return self.features(self.forward_blocks(tokens.float(), hooks, hooks.first_block), hooks)

    def embed(self, images: Tensor, hooks: BlockHooks = NO_HOOKS, patches: Tensor | None = None) -> Tensor:
        """Tokens that enter the first block."""
        vit = self.vit
        tokens = vit._pos_embed(
            _embed_patches(vit.patch_embed, images) if self._is_plain_patch_embed else vit.patch_embed(images)
        )
        if isinstance(tokens, tuple):  # with rotary positions, which are computed elsewhere
            tokens = tokens[0]
        if patches is not None:
            tokens = select_patches(tokens, patches, vit.num_prefix_tokens)
        return vit.norm_pre(hooks.tokens(tokens, self))  # type: ignore[no-any-return]

    def forward_blocks(
        self, x: Tensor, hooks: BlockHooks = NO_HOOKS, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Tokens after blocks ``start`` to ``stop``, exclusive; after the last block only those that are pooled."""
        hooks, rotary = hooks.for_inference(self.matrix_dtype), rotary_embeddings(self.vit, hooks.extra_tokens)
        for index in range(start, self.depth if stop is None else stop):
            x = self._block(index, self._cast_stream(x, index), hooks, rotary[index] if rotary else None)
        return x

    def _cast_stream(self, x: Tensor, index: int) -> Tensor:
        """Cast the residual stream: to bfloat16 in training and with FP8, on a GPU.

        Additions are memory-bound, and matrix products round far more. On a CPU, the conversions take as much time as
        they save. The class token of the last block stays in float32.
        """
        kind = x.device.type
        if not self.fp8 and not (kind == "cuda" and torch.is_grad_enabled()):
            return x
        if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) != torch.bfloat16:
            return x
        return x.float() if self._num_pooled and index == self.depth - 1 else x.bfloat16()

    def features(self, x: Tensor, hooks: BlockHooks = NO_HOOKS) -> Tensor:
        """Features of the tokens after the last block, in float32."""
        x = self.vit.norm(x)
        pooled = hooks.pool(x)
        features: Tensor = self.vit.forward_head(x, pre_logits=True) if pooled is None else pooled
        return features.float()

    def _block(self, index: int, x: Tensor, hooks: BlockHooks, rotation: RotaryEmbedding | None) -> Tensor:
        block, ops = self.vit.blocks[index], self._ops
        x = hooks.before_block(index, x)
        h = ops.pre_attention(block, x)
        # The other tokens of the last block are not pooled, and are needed only as keys and values.
        pooled_only = self._num_pooled and index == self.depth - 1 and not hooks.whole_sequence
        queries = self._num_pooled if pooled_only else x.shape[1]
        mixed = ops.attention(block.attn, h, hooks.qkv_update(index, h), hooks.prefix(index), queries, rotation)
        u = (x[:, :queries] + ops.post_attention(block, mixed)).to(x.dtype)  # layer scale is in float32
        x = u + ops.mlp(block, u)
        update = hooks.mlp_update(index, u)
        if update is not None:
            x = x + update  # layer scale does not apply to the update
        return hooks.after_block(index, x)


def _num_pooled(vit: Any) -> int:
    """The number of prefix tokens from which a network computes its feature; 0 if it uses all tokens."""
    if vit.global_pool != "token" or getattr(vit, "attn_pool", None) is not None:
        return 0
    return 2 if hasattr(vit, "dist_token") else 1


def _is_plain_patch_embed(embed: Any) -> bool:
    """Whether a patch embedding is one convolution with non-overlapping patches."""
    from timm.layers import PatchEmbed

    return type(embed) is PatchEmbed and (embed.flatten or str(embed.output_fmt.value) == "NHWC")


def _embed_patches(embed: Any, images: Tensor) -> Tensor:
    """timm's patch embedding as one matrix product: its convolution takes 8 % of a forward pass on an H200 in bf16."""
    (rows, columns), (height, width) = embed.grid_size, embed.patch_size
    side = tuple(images.shape[2:])
    if side != embed.img_size or side != (rows * height, columns * width):
        return embed(images)  # type: ignore[no-any-return]
    cells = images.unflatten(3, (columns, width)).unflatten(2, (rows, height))
    patches = cells.permute(0, 2, 4, 1, 3, 5).flatten(3)
    tokens = F.linear(patches.flatten(1, 2), embed.proj.weight.flatten(1), embed.proj.bias)
    return embed.norm(tokens if embed.flatten else tokens.unflatten(1, (rows, columns)))  # type: ignore[no-any-return]


def freeze(network: Any, name: str, digest: str, config: NetworkConfig) -> FrozenViT:
    """Freeze a timm network: as ``FrozenViT`` if it supports hooks, else as ``FrozenFeatures``."""
    kind = FrozenFeatures if isinstance(block_ops_for(network), str) else FrozenViT
    return kind(network, name, digest, config)


class FrozenFeatures(FrozenViT):
    """Any other timm network: a ConvNeXt, a Swin, a BEiT. Hooks are not supported.

    It has no sequence of blocks, so ``depth``, ``heads`` and ``tokens`` are 0.
    """

    def _inspect(self, vit: Any) -> None:
        reason = block_ops_for(vit)
        assert isinstance(reason, str)
        missing = [part for part in ("forward_features", "forward_head") if not hasattr(vit, part)]
        if missing:
            raise OneaError(f"Backbone '{self.name}' cannot be used: timm's {type(vit).__name__} has no {missing[0]}.")
        self.no_hooks_reason = reason
        self.width = getattr(vit, "head_hidden_size", None) or vit.num_features
        self.depth = self.heads = self.tokens = 0
        self.shares_keys = False
        weights = (module.weight for module in vit.modules() if isinstance(module, nn.Linear | nn.Conv2d))
        self.matrix_dtype = next(weights).dtype
        default = (getattr(vit, "pretrained_cfg", None) or {}).get("input_size") or (3, 224, 224)
        self.size = int(self.config.model_args.get("img_size") or self.config.input_size or default[1])

    def with_image_size(self, size: int) -> FrozenViT:
        """Change the input size, if the network supports it."""
        if size == self.size:
            return self
        pretrained = getattr(self.vit, "pretrained_cfg", None) or {}
        try:
            if hasattr(self.vit, "set_input_size"):
                self.vit.set_input_size(img_size=(size, size))
                self.vit.requires_grad_(False)
            elif pretrained.get("fixed_input_size"):
                raise ValueError("its input size is fixed")
            self.forward_eager(torch.zeros(1, 3, size, size), NO_HOOKS)  # some sizes do not fit its windows
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise OneaError(
                f"Backbone '{self.name}' does not take images of {size} pixels ({reason}); leave image_size out."
            ) from error
        self.size = size
        return self

    def cast_matrices(self, dtype: torch.dtype, fp8: bool = False) -> FrozenViT:
        """Cast linear and convolutional layers to the dtype that autocast would cast them to."""
        if fp8:
            raise OneaError(
                f"fp8 needs a plain vision transformer, which backbone '{self.name}' is not ({self.no_hooks_reason}); "
                "choose another --precision."
            )
        from_fp8(self.vit)
        return super().cast_matrices(dtype)

    def embed(self, images: Tensor, hooks: BlockHooks = NO_HOOKS, patches: Tensor | None = None) -> Tensor:
        """Not supported."""
        raise self._no_hooks_error()

    def forward_eager(self, images: Tensor, hooks: BlockHooks, patches: Tensor | None = None) -> Tensor:
        """``forward`` without compilation."""
        if patches is not None or (hooks is not NO_HOOKS and not (isinstance(hooks, Adapters) and hooks.empty)):
            raise self._no_hooks_error()
        features: Tensor = self.vit.forward_head(self.vit.forward_features(images), pre_logits=True)
        if features.dim() == 4:  # with spatial dimensions of size 1
            features = features.flatten(1)
        if features.shape[1:] != (self.width,):
            raise OneaError(
                f"Backbone '{self.name}' returns features of shape {tuple(features.shape[1:])}, not one vector; "
                "choose another."
            )
        return features.float()

    def _no_hooks_error(self) -> OneaError:
        return OneaError(f"Backbone '{self.name}' does not support hooks: {self.no_hooks_reason}.")
