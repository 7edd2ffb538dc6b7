# SPDX-License-Identifier: Apache-2.0
"""timm's own ViT without an adapter, with the images, precision and prototypes of a column: what an adapter adds."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from onea.bench.answering import Answer
from onea.bench.scene import Scene
from onea.vit.heads import cosine_scores


def timm_column(precision: str, compiled: bool) -> str:
    """The name of this baseline's column."""
    return f"timm {precision} {'compiled' if compiled else 'eager'}"


class TimmBaseline:
    """timm's forward pass with the weights, precision and input pipeline of a scene."""

    def __init__(self, scene: Scene, compiled: bool):
        self.scene = scene
        self.name = timm_column(scene.runtime.precision, compiled)
        network: Any = copy.deepcopy(scene.method.vit.vit)
        if compiled:  # as our own network is
            network = torch.compile(network, dynamic=False, fullgraph=True, mode="reduce-overhead")
        self.network: Any = network

    def answer(self, batch: int) -> Answer:
        """Scores of stored images, as our own inference gives them."""
        images, rows = self.scene.prepared.test.images, torch.arange(batch)
        prototypes = self.scene.method.prototypes

        def scores() -> Tensor:
            pixels = images.plain(rows)
            with torch.no_grad(), self.scene.runtime.autocast():
                features: Tensor = self.network(pixels)
            return cosine_scores(features.float(), prototypes)

        return scores
