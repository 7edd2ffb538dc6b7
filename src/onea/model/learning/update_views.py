# SPDX-License-Identifier: Apache-2.0
"""The views of the images of an update, and their features before and after the training."""

from __future__ import annotations

import torch
from torch import Tensor

from onea.data.image_storage import Images, PackedImages, choose_storage_tier
from onea.learner.fixed_views import FixedViews
from onea.learner.merged_adapter import MergedAdapter, MergingOptions
from onea.model.engine import Engine
from onea.model.learning.images import DecodedImages
from onea.model.state import State
from onea.runtime import Runtime
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT


class UpdateViews:
    """Views of the images of an update: the whole image (view 0) and random crops.

    Features are computed in the precision of the training; with FP8, and with networks that take no adapter, in full
    precision.

    Attributes:
        vit: the network to train with.
        runtime: the runtime to train with.
        earlier_adapter: the merged adapter before the update.
        num_views: the number of views of each image; if 1, the whole image is also used for the other views.
        fixed: the views that the training uses, if they are fixed; otherwise None.
    """

    def __init__(
        self,
        engine: Engine,
        state: State,
        batch: DecodedImages,
        options: MergingOptions,
        seed: int,
        training: tuple[FrozenViT, Runtime],
        may_train: bool,
        size: tuple[int, int],
    ):
        assert batch.labels is not None
        self.vit, self.runtime = training
        self._engine, self._pixels, self._labels, self._seed = engine, batch.pixels, batch.labels, seed
        self._scale, self._adapters = options.scale, engine.adapters(state)
        counts = state.adapter_images
        self.earlier_adapter = MergedAdapter(self._adapters.state_dict(), len(counts), sum(counts.values()))
        self._earlier_features: Tensor | None = None
        # A network without adapters is never trained, so its accuracy in lower precision is unknown. FP8 is only for
        # training steps.
        full = engine.vit.no_hooks_reason or self.runtime.fp8
        self._network = (engine.vit, engine.runtime) if full else training
        self.num_views = options.num_views(*size)
        self.fixed: FixedViews | None = None
        if may_train and options.training_views:
            crops = [
                engine.sample_crops(batch.labels, seed, view, options.crop_scale)
                for view in range(1, options.num_fixed_views(len(batch), len(set(batch.labels))))
            ]
            self.fixed = FixedViews(
                *self._network,
                self._store(self._network[1].device),
                torch.arange(len(batch)),
                crops,
                options.crop_scale,
                self._adapters,
            )

    def discard_fixed(self) -> None:
        """Free the tokens of the fixed views, which only an update that trains needs."""
        self.fixed = None

    def features(self, view: int, adapter: MergedAdapter) -> Tensor:
        """Features of a view of all images, ``[N, width]``, on the CPU."""
        if adapter is not self.earlier_adapter:
            return self._compute(view, self._engine.adapters_from(adapter.tensors, self._scale))
        if view:
            return self._compute(view, self._adapters)
        if self._earlier_features is None:
            self._earlier_features = self._compute(0, self._adapters)
        return self._earlier_features

    def training_images(self) -> Images:
        """The images in the storage that the training reads from."""
        if self.fixed is not None:
            return self.fixed.images
        return self._store(self.runtime.device, self.runtime.pixel_dtype)

    def _store(self, device: torch.device, dtype: torch.dtype = torch.float32) -> PackedImages:
        tier = choose_storage_tier(self._pixels.nbytes, None, device)
        return PackedImages(self._pixels, self._engine.preprocess, device, tier, dtype)

    def _compute(self, view: int, adapters: Adapters) -> Tensor:
        if self.fixed is not None:
            return self.fixed.features(view, adapters).cpu()
        crops = self._engine.sample_crops(self._labels, self._seed, view) if view else None
        return self._engine.features(self._pixels, adapters, crops, self.runtime.progress, self._network)
