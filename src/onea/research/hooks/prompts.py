# SPDX-License-Identifier: Apache-2.0
"""Prompts for one batch as light hooks, and the tensors they are cut from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from onea.vit.frozen import FrozenViT
from onea.vit.hooks import BlockHooks


class InputPrompts(BlockHooks):
    """Extra input tokens ``[B or 1, length, width]`` between class token and patches; their outputs are the feature.

    They sit where the class token sits: they take its position vector, and the frozen patches keep their own.
    """

    compilable = True

    def __init__(self, vit: FrozenViT, prompts: Tensor):
        self._vit, self._prompts = vit.vit, prompts
        self._start = 0 if vit.vit.cls_token is None else 1
        self.extra_tokens = prompts.shape[1]

    def tokens(self, x: Tensor, vit: FrozenViT) -> Tensor:
        """Insert the prompts behind the class token."""
        prompts = self._prompts.to(x.dtype)
        if self._start and self._vit.pos_embed is not None and not self._vit.no_embed_class:
            prompts = prompts + self._vit.pos_embed[:, :1]
        prompts = prompts.expand(len(x), -1, -1)
        return torch.cat([x[:, : self._start], prompts, x[:, self._start :]], dim=1)

    def pool(self, x: Tensor) -> Tensor:
        """The mean of the prompts' outputs, in place of the class token."""
        stop = self._start + self._prompts.shape[1]
        # The second norm is of networks that pool by mean; in all others it is the identity.
        features: Tensor = self._vit.fc_norm(x[:, self._start : stop].mean(1))
        return features


class PrefixPrompts(BlockHooks):
    """Keys and values put in front of those of some blocks: by block, both ``[B or 1, length, width]``.

    They come after the projections, so that neither the sequence nor its queries change. A block that has none
    runs as it is: a prefix of zeros would not be none, for it takes its share of the attention.
    """

    whole_sequence = False
    compilable = True

    def __init__(self, heads: int, by_block: Mapping[int, tuple[Tensor, Tensor]]):
        self._heads, self._by_block = heads, by_block

    def prefix(self, block: int) -> tuple[Tensor, Tensor] | None:
        """The block's keys and values, split into heads."""
        if block not in self._by_block:
            return None
        keys, values = self._by_block[block]
        return self._split(keys), self._split(values)

    def _split(self, prompts: Tensor) -> Tensor:
        batch, length, width = prompts.shape
        return prompts.reshape(batch, length, self._heads, width // self._heads).transpose(1, 2)


class Growing(nn.Module):
    """Rows of one shape to which every task adds its own; only the newest can be trained.

    The older rows are no parameters, so no gradient, weight decay or momentum of a later task reaches them.
    """

    old: Tensor

    def __init__(self, *shape: int):
        super().__init__()
        self.register_buffer("old", torch.empty(0, *shape))
        self.new = nn.Parameter(torch.empty(0, *shape))

    def __len__(self) -> int:
        return len(self.old) + len(self.new)

    def grow(self, rows: Tensor) -> None:
        """Settle the rows so far and add new ones."""
        self.old = torch.cat([self.old, self.new.detach()])
        self.new = nn.Parameter(rows.to(self.old.device, copy=True))

    def load_rows(self, rows: Tensor) -> None:
        """Take saved rows back, however many they are."""
        self.old = rows.to(self.old.device, copy=True)
        self.new = nn.Parameter(self.old[:0].clone())

    def forward(self) -> Tensor:
        """All rows; gradients flow to the newest alone."""
        return torch.cat([self.old, self.new])
