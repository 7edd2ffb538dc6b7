# SPDX-License-Identifier: Apache-2.0
"""A trainable copy of a frozen ViT's weights."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from onea.vit.frozen import FrozenViT
from onea.vit.hooks import BlockHooks


class FineTuned(nn.Module, BlockHooks):
    """All weights of a network, to be trained in full precision while the network itself stays as it was.

    The frozen matrices may be stored in a lower precision; small steps would vanish there, hence the copy is float32.
    """

    whole_sequence = False

    def __init__(self, vit: FrozenViT):
        super().__init__()
        self.copy: nn.Module = copy.deepcopy(vit.vit).float().requires_grad_(True)

    def weights(self, vit: FrozenViT) -> dict[str, Tensor]:
        """The copy, under the names of the frozen network."""
        return {f"vit.{name}": value for name, value in self.copy.named_parameters()}
