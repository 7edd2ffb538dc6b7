# SPDX-License-Identifier: Apache-2.0
"""Hooks into the forward pass of a frozen ViT, for small modules that are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from onea.vit.frozen import FrozenViT


class BlockHooks:
    """The points of a forward pass at which a module can change it; blocks are counted from 0.

    By default, hooks do nothing. A module overrides those that it needs.

    With ``x`` the tokens ``[B, N, width]`` that enter a block, a block computes::

        x = before_block(x)
        h = norm1(x)
        u = x + attention(qkv(h) + qkv_update(h), keys and values prefixed by prefix())
        x = u + mlp(norm2(u)) + mlp_update(u)
        x = after_block(x)

    >>> class Doubled(BlockHooks):
    ...     def after_block(self, block, x):
    ...         return 2 * x
    >>> import torch
    >>> Doubled().after_block(0, torch.ones(2)), Doubled().before_block(0, torch.ones(2))
    (tensor([2., 2.]), tensor([1., 1.]))

    Attributes:
        first_block: the first block that it changes; inputs of this block depend on the frozen network only.
        whole_sequence: whether it needs every token in the last block. Otherwise, a network that uses only its class
            token skips the other tokens there: ``u`` then has one token, while ``h`` has all.
        extra_tokens: number of tokens that it inserts between the prefix tokens and the patches, for rotary positions;
            tokens after the patches do not count.
        compilable: whether forward passes with it may be compiled: it only computes with tensors, in the same way every
            time. A change of their number or shapes triggers a new compilation.
    """

    first_block: int = 0
    whole_sequence = True
    extra_tokens: int = 0
    compilable = False

    def for_inference(self, dtype: torch.dtype) -> BlockHooks:
        """Equivalent hooks that are faster in inference; ``dtype`` is that of the frozen matrices."""
        return self

    def weights(self, vit: FrozenViT) -> dict[str, Tensor]:
        """Replacements of the network's weights by name, for methods that rescale or fine-tune them."""
        return {}

    def tokens(self, x: Tensor, vit: FrozenViT) -> Tensor:
        """The sequence after position embedding; may be extended."""
        return x

    def before_block(self, block: int, x: Tensor) -> Tensor:
        """The sequence before a block."""
        return x

    def after_block(self, block: int, x: Tensor) -> Tensor:
        """The sequence after a block."""
        return x

    def qkv_update(self, block: int, h: Tensor) -> Tensor | None:
        """The update of the queries, keys and values ``[B, N, 3 * width]`` of attention input ``h``."""
        return None

    def prefix(self, block: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values to prepend, each ``[B or 1, heads, length, head width]``."""
        return None

    def mlp_update(self, block: int, u: Tensor) -> Tensor | None:
        """The update of the block's output, given the residual stream before its second norm."""
        return None

    def pool(self, x: Tensor) -> Tensor | None:
        """Features from the normalised output tokens; None for the default pooling."""
        return None


class NoHooks(BlockHooks):
    """The network without any module."""

    whole_sequence = False


NO_HOOKS = NoHooks()
