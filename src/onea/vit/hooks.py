# SPDX-License-Identifier: Apache-2.0
"""Hooks into a frozen ViT, for small modules that are trained beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from onea.vit.frozen import FrozenViT


class BlockHooks:
    """The points at which a module takes part in a pass through the network; blocks count from 0.

    These do nothing. A method's module overrides those that it needs.

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
        first_block: the first block that it takes part in; the network alone computes what enters it.
        whole_sequence: whether it must see every token in the last block. One that does not lets a network that reads
            only its class token skip the others there: ``u`` then has one token, ``h`` still has all.
        extra_tokens: how many tokens it puts between the network's own first ones and the patches. A network with
            rotary positions must know where its patches are; tokens behind them need no telling.
        compilable: whether passes with it may be compiled: it computes the same at every pass, with tensors only. One
            whose tensors change in number or shape is compiled anew each time they do.
    """

    first_block: int = 0
    whole_sequence = True
    extra_tokens: int = 0
    compilable = False

    def for_inference(self, dtype: torch.dtype) -> BlockHooks:
        """What does the same in fewer steps while nothing is trained, given the type of the network's products."""
        return self

    def weights(self, vit: FrozenViT) -> dict[str, Tensor]:
        """Replacements for the network's own weights, by name; for what rescales or retunes them."""
        return {}

    def tokens(self, x: Tensor, vit: FrozenViT) -> Tensor:
        """The sequence after position embedding; may be made longer."""
        return x

    def before_block(self, block: int, x: Tensor) -> Tensor:
        """The sequence before a block."""
        return x

    def after_block(self, block: int, x: Tensor) -> Tensor:
        """The sequence after a block."""
        return x

    def qkv_update(self, block: int, h: Tensor) -> Tensor | None:
        """The term to add to the queries, keys and values ``[B, N, 3 * width]`` of attention input ``h``."""
        return None

    def prefix(self, block: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values to put in front, each ``[B or 1, heads, length, head width]``."""
        return None

    def mlp_update(self, block: int, u: Tensor) -> Tensor | None:
        """The term to add to the block's output, given the residual stream before its second norm."""
        return None

    def pool(self, x: Tensor) -> Tensor | None:
        """Features from the normed output tokens; None for the network's own pooling."""
        return None


class NoHooks(BlockHooks):
    """The network without any module."""

    whole_sequence = False


NO_HOOKS = NoHooks()
