# SPDX-License-Identifier: Apache-2.0
"""The points of a frozen ViT where small modules plug in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from onea.vit.frozen import FrozenViT


class Plug:
    """Changes nothing. A method's module overrides the points it needs; blocks count from 0.

    With ``x`` the tokens ``[B, N, width]`` that enter a block, a block computes::

        x = enter(x)
        h = norm1(x)
        u = x + attention(qkv(h) + beside_qkv(h), keys and values prefixed by prefix())
        x = u + mlp(norm2(u)) + beside_mlp(u)
        x = leave(x)

    Attributes:
        whole_sequence: whether it must see every token in the last block. One that does not lets a network that reads
            only its class token skip the others there: ``u`` then has one token, ``h`` still has all.
    """

    whole_sequence = True

    def weights(self, vit: FrozenViT) -> dict[str, Tensor]:
        """Replacements for the network's own weights, by name; for what rescales or retunes them."""
        return {}

    def tokens(self, x: Tensor, vit: FrozenViT) -> Tensor:
        """The sequence after position embedding; may be made longer."""
        return x

    def enter(self, block: int, x: Tensor) -> Tensor:
        """The sequence before a block."""
        return x

    def leave(self, block: int, x: Tensor) -> Tensor:
        """The sequence after a block."""
        return x

    def beside_qkv(self, block: int, h: Tensor) -> Tensor | None:
        """What to add to the queries, keys and values ``[B, N, 3 * width]`` of attention input ``h``."""
        return None

    def prefix(self, block: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values to put in front, each ``[B or 1, heads, length, head width]``."""
        return None

    def beside_mlp(self, block: int, u: Tensor) -> Tensor | None:
        """What to add to the block's output, given the residual stream before its second norm."""
        return None

    def read(self, x: Tensor) -> Tensor | None:
        """Features from the normed output tokens, where they are not the network's own."""
        return None


class Nothing(Plug):
    """The network as it is."""

    whole_sequence = False


NOTHING = Nothing()
