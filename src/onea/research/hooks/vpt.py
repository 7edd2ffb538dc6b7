# SPDX-License-Identifier: Apache-2.0
"""VPT: learned tokens at the end of a frozen ViT's sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onea.vit.hooks import BlockHooks


class VPT(nn.Module, BlockHooks):
    """Tokens that every other token attends to, and that are gone before the network pools its output.

    Shallow: one set joins before the first block and leaves after the last. Deep: every block has its own set, which
    leaves after that block. They start at zero, which is not the same as no tokens: they still draw attention. See
    https://arxiv.org/abs/2203.12119, section 3.
    """

    compilable = True

    def __init__(self, depth: int, width: int, length: int, *, deep: bool):
        super().__init__()
        self.depth, self.length, self.deep = depth, length, deep
        self.prompts = nn.Parameter(torch.zeros(depth if deep else 1, length, width))

    def before_block(self, block: int, x: Tensor) -> Tensor:
        """Append the tokens that this block begins with, if any."""
        if block >= len(self.prompts):
            return x
        return torch.cat([x, self.prompts[block].expand(len(x), -1, -1)], dim=1)

    def after_block(self, block: int, x: Tensor) -> Tensor:
        """Remove the tokens after their last block, so that pooling over tokens never sees them."""
        return x[:, : -self.length] if self.deep or block == self.depth - 1 else x
