# SPDX-License-Identifier: Apache-2.0
"""A frozen timm network: a transformer with hooks, or any other network as a feature extractor."""

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
    """A timm ``VisionTransformer`` or ``Eva`` whose weights receive no gradient and stay in evaluation mode.

    Attributes:
        name: what the user asked for.
        config: what is known about it beside its tensors: architecture, licence, how images were prepared.
        no_hooks_reason: why the network does not support hooks; empty if it does.
        digest: sha256 of the weights, as they were loaded.
        size: side of the input image in pixels.
        tokens: their number, before hooks make it larger.
        mean: pixel mean that the weights expect.
        std: pixel standard deviation that the weights expect.
        shares_keys: whether several heads share keys and values, so that projections differ in width.
        rotary: whether blocks look up where each patch is, so that they must see all patches, in their places.
        matrix_dtype: the precision in which the frozen matrices are stored.
        fp8: whether the products with them are in eight bits all the same.
    """

    no_hooks_reason = ""
    rotary = False

    # timm's models are untyped to us, hence Any.
    def __init__(
        self,
        vit: Any,
        name: str,
        digest: str,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        config: NetworkConfig | None = None,
    ):
        super().__init__()
        self.name, self.digest, self.mean, self.std = name, digest, mean, std
        self.config = config or NetworkConfig(mean=mean, std=std)
        self.vit: Any = vit.requires_grad_(False).eval()
        self.fp8 = False
        self._compiled: CompiledViT | None = None
        self._look_at(vit)

    def _look_at(self, vit: Any) -> None:
        """Note what the passes ask of the network, because asking it every time takes longer than many a kernel."""
        pieces = block_ops_for(vit)
        if isinstance(pieces, str):
            raise OneaError(f"Backbone '{self.name}' is not a plain vision transformer: {pieces}.")
        self._pieces = pieces
        self.width: int = vit.embed_dim
        self.depth = len(vit.blocks)
        self.heads: int = vit.blocks[0].attn.num_heads
        self.shares_keys = any(getattr(block.attn, "num_kv_groups", 1) > 1 for block in vit.blocks)
        self.rotary = getattr(vit, "rope", None) is not None
        self.matrix_dtype: torch.dtype = vit.blocks[0].attn.proj.weight.dtype
        self._tokens_read = _tokens_read(vit)
        self._cuts_patches = _cuts_patches(vit.patch_embed)
        self._note_size()

    def _note_size(self) -> None:
        self.size: int = self.vit.patch_embed.img_size[0]
        self.tokens: int = self.vit.num_prefix_tokens + self.vit.patch_embed.num_patches

    def with_image_size(self, size: int) -> FrozenViT:
        """Take images of this side from now on; positions are resampled as timm does, weights stay as they are."""
        if size == self.size:
            return self
        patch = self.vit.patch_embed.patch_size[0] if self._cuts_patches else self.vit.patch_embed.feat_ratio()
        if size < patch or size % patch:
            fitting = max(patch, round(size / patch) * patch)
            raise OneaError(f"image_size is {size}, but patches of '{self.name}' are {patch} wide; choose {fitting}.")
        self.vit.set_input_size(img_size=(size, size))
        self.vit.requires_grad_(False)  # resampled positions are new
        self._note_size()
        return self

    def train(self, mode: bool = True) -> FrozenViT:
        """Stay in evaluation mode whatever the parent module does."""
        return super().train(False)

    def cast_matrices(self, dtype: torch.dtype, fp8: bool = False) -> FrozenViT:
        """Store the frozen matrices in the precision autocast would cast them to anyway, once instead of every pass.

        With ``fp8``, those of the blocks are multiplied in eight bits. A last block of which only the class token is
        read stays out: one token gains nothing, and what it rounds is the answer.
        """
        from_fp8(self.vit)
        if fp8:  # of the weights as they are, before they are rounded to less
            to_fp8(self.vit.blocks[: -1 if self._tokens_read else None])
        for module in self.vit.modules():
            if isinstance(module, Fp8Linear):
                module.keep_in(dtype)
            elif isinstance(module, nn.Linear | nn.Conv2d):
                module.to(dtype)
        self.matrix_dtype, self.fp8 = dtype, fp8
        return self

    def compile_for(self, sizes: Collection[int], backend: str = "inductor") -> FrozenViT:
        """Compile the passes of batches up to these sizes when they are first needed; none for never."""
        self._compiled = CompiledViT(self, sizes, backend) if sizes else None
        return self

    def truncate(self, depth: int) -> FrozenViT:
        """Keep the first so many blocks, and read features after the last of them; 0 keeps all.

        Raises:
            OneaError: there are fewer blocks.
        """
        if depth and self.no_hooks_reason:
            raise OneaError(f"depth is {depth}, and '{self.name}' has no blocks that could be counted; leave it out.")
        if not 0 <= depth <= self.depth:
            raise OneaError(f"depth is {depth}, and '{self.name}' has {self.depth} blocks; give 1 to {self.depth}.")
        if depth:
            self.vit.blocks = self.vit.blocks[:depth]
            self.depth = depth
        return self

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run every pass as it is written, so that its operations can be counted."""
        compiled, self._compiled = self._compiled, None
        try:
            yield
        finally:
            self._compiled = compiled

    def forward(
        self, images: Tensor, hooks: BlockHooks = NO_HOOKS, patches: Tensor | None = None, replaced: bool = False
    ) -> Tensor:
        """Features ``[B, width]``: the class token (or the model's own pooling) after the final norm.

        ``patches`` are those of each image that are looked at, ``int64 [B, kept]``; all, if they are not given.
        """
        if not replaced and (weights := hooks.weights(self)):
            with self._weights_as_they_are():
                called: Tensor = torch.func.functional_call(self, weights, (images, hooks, patches, True))
            return called
        if self._compiled and self._compiled.accepts_images(images, hooks):
            return self._compiled(images, hooks, patches)
        return self.forward_eager(images, hooks, patches)

    @contextlib.contextmanager
    def _weights_as_they_are(self) -> Iterator[None]:
        """Compute with the weights themselves, because what stands for them in eight bits is not replaced."""
        layers = [module for module in self.vit.modules() if isinstance(module, Fp8Linear)] if self.fp8 else []
        for layer in layers:
            layer.plain = True
        try:
            yield
        finally:
            for layer in layers:
                layer.plain = False

    def forward_eager(self, images: Tensor, hooks: BlockHooks, patches: Tensor | None = None) -> Tensor:
        """Features, operation by operation."""
        return self.features(self.forward_blocks(self.embed(images, hooks, patches), hooks), hooks)

    def forward_to_block(self, images: Tensor, hooks: BlockHooks = NO_HOOKS, block: int | None = None) -> Tensor:
        """Tokens that enter a block: by default the first that hooks take part in, whatever these have learned."""
        block = hooks.first_block if block is None else block
        if self._compiled and self._compiled.accepts(images, hooks):
            return self._compiled.to_block(images, hooks, block)
        return self.to_block_eager(images, block, hooks)

    def forward_from_block(self, tokens: Tensor, hooks: BlockHooks = NO_HOOKS, patches: Tensor | None = None) -> Tensor:
        """Features of what ``forward_to_block`` gave, in whatever precision; gradients stay in these blocks.

        Of all tokens, or of the first ones and those of some ``patches``, as in ``forward``.
        """
        if self._compiled and self._compiled.accepts(tokens, hooks):
            return self._compiled.from_block(tokens, hooks, patches)
        return self.from_block_eager(tokens, hooks, patches)

    def to_block_eager(self, images: Tensor, block: int, hooks: BlockHooks = NO_HOOKS) -> Tensor:
        """Tokens that enter a block, operation by operation; of hooks only what they do before it counts."""
        return self.forward_blocks(self.embed(images, hooks), hooks, stop=block)

    def from_block_eager(self, tokens: Tensor, hooks: BlockHooks, patches: Tensor | None = None) -> Tensor:
        """Features of such tokens, operation by operation."""
        if patches is not None:
            tokens = select_patches(tokens, patches, self.vit.num_prefix_tokens + hooks.extra_tokens)
        return self.features(self.forward_blocks(tokens.float(), hooks, hooks.first_block), hooks)

    def embed(self, images: Tensor, hooks: BlockHooks = NO_HOOKS, patches: Tensor | None = None) -> Tensor:
        """Tokens that enter the first block."""
        vit = self.vit
        tokens = vit._pos_embed(_patches(vit.patch_embed, images) if self._cuts_patches else vit.patch_embed(images))
        if isinstance(tokens, tuple):  # with rotary positions, which the blocks look up themselves
            tokens = tokens[0]
        if patches is not None:
            tokens = select_patches(tokens, patches, vit.num_prefix_tokens)
        return vit.norm_pre(hooks.tokens(tokens, self))  # type: ignore[no-any-return]

    def forward_blocks(
        self, x: Tensor, hooks: BlockHooks = NO_HOOKS, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Tokens after blocks ``start`` up to, not including, ``stop``; after the last block those that are read."""
        hooks, turned = hooks.for_inference(self.matrix_dtype), rotary_embeddings(self.vit, hooks.extra_tokens)
        for index in range(start, self.depth if stop is None else stop):
            x = self._block(index, self._stream(x, index), hooks, turned[index] if turned else None)
        return x

    def _stream(self, x: Tensor, index: int) -> Tensor:
        """Tokens in the precision that a block adds to: bfloat16 in training, and where products are in eight bits.

        Adding takes as long as reading and writing, and products round far more. Only on a GPU: elsewhere conversions
        take the time that is saved. The class token of a last block is added up in full precision.
        """
        kind = x.device.type
        if not self.fp8 and not (kind == "cuda" and torch.is_grad_enabled()):
            return x
        if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) != torch.bfloat16:
            return x
        return x.float() if self._tokens_read and index == self.depth - 1 else x.bfloat16()

    def features(self, x: Tensor, hooks: BlockHooks = NO_HOOKS) -> Tensor:
        """Features of tokens that left a block, in full precision."""
        x = self.vit.norm(x)
        pooled = hooks.pool(x)
        features: Tensor = self.vit.forward_head(x, pre_logits=True) if pooled is None else pooled
        return features.float()

    def _block(self, index: int, x: Tensor, hooks: BlockHooks, rotation: RotaryEmbedding | None) -> Tensor:
        block, pieces = self.vit.blocks[index], self._pieces
        x = hooks.before_block(index, x)
        h = pieces.enter(block, x)
        # Nobody reads the other tokens of the last block: they serve as keys and values only.
        shortcut = self._tokens_read and index == self.depth - 1 and not hooks.whole_sequence
        read = self._tokens_read if shortcut else x.shape[1]
        mixed = pieces.attend(block, h, hooks.qkv_update(index, h), hooks.prefix(index), read, rotation)
        u = (x[:, :read] + pieces.leave(block, mixed)).to(x.dtype)  # layer scale would make it wider
        x = u + pieces.mlp(block, u)
        beside = hooks.mlp_update(index, u)
        if beside is not None:
            x = x + beside  # after layer scale, unscaled by it
        return hooks.after_block(index, x)


def _tokens_read(vit: Any) -> int:
    """How many of its first tokens a network makes its feature of; 0 for all."""
    if vit.global_pool != "token" or getattr(vit, "attn_pool", None) is not None:
        return 0
    return 2 if hasattr(vit, "dist_token") else 1


def _cuts_patches(embed: Any) -> bool:
    """Whether a patch embedding is one convolution of patches beside each other, and leaves tokens last."""
    from timm.layers import PatchEmbed

    return type(embed) is PatchEmbed and (embed.flatten or str(embed.output_fmt.value) == "NHWC")


def _patches(embed: Any, images: Tensor) -> Tensor:
    """timm's patch embedding as one matrix product: its convolution took 8 % of a pass on an H200 in bf16."""
    (rows, columns), (height, width) = embed.grid_size, embed.patch_size
    side = tuple(images.shape[2:])
    if side != embed.img_size or side != (rows * height, columns * width):
        return embed(images)  # type: ignore[no-any-return]
    cut = images.unflatten(3, (columns, width)).unflatten(2, (rows, height))
    patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3)
    tokens = F.linear(patches.flatten(1, 2), embed.proj.weight.flatten(1), embed.proj.bias)
    return embed.norm(tokens if embed.flatten else tokens.unflatten(1, (rows, columns)))  # type: ignore[no-any-return]


def freeze(network: Any, name: str, digest: str, config: NetworkConfig) -> FrozenViT:
    """A network of timm, with hooks where they can take part in it."""
    kind = FrozenFeatures if isinstance(block_ops_for(network), str) else FrozenViT
    return kind(network, name, digest, config.mean, config.std, config)


class FrozenFeatures(FrozenViT):
    """Any other network of timm: a ConvNeXt, a Swin, a BEiT.

    It has no blocks that could be counted, so its ``depth``, ``heads`` and ``tokens`` are 0.
    """

    def _look_at(self, vit: Any) -> None:
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

    def cast_matrices(self, dtype: torch.dtype, fp8: bool = False) -> FrozenViT:
        """Store linear and convolutional layers in the precision autocast would cast them to anyway."""
        if fp8:
            raise OneaError(f"fp8 is for plain vision transformers, and {self._cannot()}; choose another --precision.")
        from_fp8(self.vit)
        return super().cast_matrices(dtype)

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
        return f"of backbone '{self.name}', {self.no_hooks_reason}"


def _usual_size(network: Any) -> int:
    """The side of images that timm says for an architecture."""
    known = getattr(network, "pretrained_cfg", None) or {}
    return int((known.get("input_size") or (3, 224, 224))[1])
