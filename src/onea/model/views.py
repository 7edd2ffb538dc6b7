# SPDX-License-Identifier: Apache-2.0
"""The views of an update's images: what its statistics are made of and, where they are fixed, its training."""

from __future__ import annotations

import torch
from torch import Tensor

from onea.data.image_storage import PackedImages, choose_storage_tier
from onea.learner.fixed_views import FixedViews
from onea.learner.merged_adapter import MergingOptions
from onea.model.engine import Engine
from onea.model.images import DecodedImages
from onea.runtime import Runtime
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT


class Views:
    """Each image of an update as it is (view 0), and in random crops.

    Crops are looked at in the precision of the training: what that rounds is far less than what cropping changes. The
    images themselves are, too, unless ``exact`` asks for full precision, in which all answers are given.

    Attributes:
        looks: how many views of each image are looked at; if 1, the image itself counts in place of the others.
        fixed: the same for the training, where it looks at no others.
    """

    def __init__(
        self,
        engine: Engine,
        batch: DecodedImages,
        options: MergingOptions,
        adapters: Adapters,
        seed: int,
        training: tuple[FrozenViT, Runtime],
        exact: bool = False,
    ):
        assert batch.labels is not None
        self._engine, self._pixels, self._labels, self._seed = engine, batch.pixels, batch.labels, seed
        # A network that no adapter fits is never trained, and nobody knows how well it answers in less precision. Eight
        # bits are for training steps alone.
        full = engine.vit, engine.runtime
        self._for_crops = full if engine.vit.frozen_only or training[1].fp8 else training
        self._for_images = full if exact else self._for_crops
        size = len(batch), len(set(batch.labels))
        self.looks = options.looks(*size)
        self.fixed: FixedViews | None = None
        if options.fixed_views:
            vit, runtime = self._for_images
            tier = choose_storage_tier(batch.pixels.nbytes, None, runtime.device)
            images = PackedImages(batch.pixels, engine.preprocess, runtime.device, tier)
            further = range(1, options.drawn_views(*size))
            crops = [engine.draw(batch.labels, seed, view, options.crop_scale) for view in further]
            rows = torch.arange(len(batch))
            self.fixed = FixedViews(
                vit, runtime, images, rows, crops, options.crop_scale, adapters, for_crops=self._for_crops
            )

    def features(self, view: int, adapters: Adapters) -> Tensor:
        """Features of a view of all images, ``[N, width]``, on the CPU."""
        if self.fixed is not None:
            return self.fixed.features(view, adapters).cpu()
        crops = self._engine.draw(self._labels, self._seed, view) if view else None
        by = self._for_crops if view else self._for_images
        return self._engine.features(self._pixels, adapters, crops, by=by)
