# SPDX-License-Identifier: Apache-2.0
"""Views of images that are fixed for a whole task, so that the blocks below the adapter run once for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from onea import seeds
from onea.data.image_storage import Images, Shard, choose_storage_tier
from onea.learner.optimisation import Batches
from onea.learner.tasks import Task
from onea.runtime import Runtime
from onea.vit.batching import EVALUATION_BATCH, pad_rows
from onea.vit.frozen import FrozenViT
from onea.vit.hooks import BlockHooks

MAX_HOST_BYTES = 2**32  # of a cache in host memory, which is also at most half of the free memory


class FixedViews:
    """Some views of each image, the first the whole image, the others random crops, with a cache of their tokens.

    The tokens that enter a block do not depend on the training of this block and later ones. They are computed when a
    view is first used, and cached if there is enough memory for all views. Otherwise they are computed every time: this
    takes longer but gives the same result.

    Args:
        vit: computes the tokens.
        runtime: device and precision.
        images: all images.
        rows: the images with views, ``int64 [N]``.
        crops: crops of each view after the first, from ``images.sample_crops`` for these rows.
        crop_scale: argument of ``images.sample_crops``.
        hooks: hooks of all blocks, below and above the tokens.
        dtype: dtype of the cache. Half precision has three more bits than bfloat16, and tokens of a ViT are far
            smaller than its largest number.
        block: the block that the tokens enter; by default the first block with a hook.

    Attributes:
        count: the number of views of each image.
    """

    def __init__(
        self,
        vit: FrozenViT,
        runtime: Runtime,
        images: Images,
        rows: Tensor,
        crops: Sequence[Tensor],
        crop_scale: float,
        hooks: BlockHooks,
        dtype: torch.dtype = torch.float16,
        block: int | None = None,
    ):
        self.vit, self.runtime, self.images, self.rows = vit, runtime, images, rows
        self._crops, self._crop_scale, self._hooks, self._block = crops, crop_scale, hooks, block
        self.count = 1 + len(crops)
        shape = torch.Size((self.count, len(rows), vit.tokens, vit.width))
        device = _cache_device(shape.numel() * dtype.itemsize, runtime.device)
        self._cache = None if device is None else torch.empty(shape, dtype=dtype, device=device)
        self._cached_views: set[int] = set()

    @classmethod
    def sample(
        cls,
        vit: FrozenViT,
        runtime: Runtime,
        task: Task,
        count: int,
        crop_scale: float,
        hooks: BlockHooks,
        block: int | None = None,
    ) -> FixedViews:
        """``count`` views of the images of a task, with random crops that depend on its seed."""
        generators = (seeds.generator(task.seed, task.index, f"fixed view {view}") for view in range(1, count))
        crops = [task.images.sample_crops(len(task), crop_scale, generator) for generator in generators]
        return cls(vit, runtime, task.images, task.rows, crops, crop_scale, hooks, block=block)

    def features(self, view: int, hooks: BlockHooks) -> Tensor:
        """Features of a view of all images, ``[N, width]`` float32 on the device, in evaluation mode.

        ``hooks`` begin at the block that the tokens enter.
        """
        assert self._block in (None, hooks.first_block)
        features = torch.empty(len(self.rows), self.vit.width, device=self.runtime.device)
        for part, tokens in self._token_batches(view):
            with torch.no_grad(), self.runtime.autocast():
                features[part] = self.vit.forward_from_block(tokens, hooks)
        return features

    def tokens(self, positions: Tensor, views: Tensor) -> Tensor:
        """The input of the block for a view of each image; ``positions`` are indices into ``rows``."""
        unique = views.unique().tolist()
        if self._cache is None:
            parts = [self._compute(positions[views == view], view) for view in unique]
            return torch.cat(parts)[views.argsort(stable=True).argsort().to(self.runtime.device)]
        self._fill_cache(unique)
        device = self._cache.device
        return self._look_up(positions.to(device), views.to(device))

    def batches(self, task: Task, size: int, count: int) -> Batches:
        """Training batches of tokens of a task's images; in each epoch, the next of ``count`` views of each image.

        Neighbouring images have different views, so that each batch contains all views.
        """
        positions, count = self._positions(task.rows), min(count, self.count)

        def batches(epoch: int, order: torch.Generator, shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
            permutation = torch.randperm(len(task), generator=order)
            shuffled, views = positions[permutation], (positions + epoch)[permutation] % count
            labels = task.labels[permutation].to(self.runtime.device)
            load_tokens = self.tokens
            if self._cache is not None:
                self._fill_cache(views.unique().tolist())
                load_tokens, device = self._look_up, self._cache.device
                # One upload for all batches: a copy inside the training step would make the device wait for the host.
                shuffled, views = shuffled.to(device), views.to(device)
            for batch in zip(shuffled.split(size), views.split(size), labels.split(size), strict=True):
                yield load_tokens(shard(batch[0]), shard(batch[1])), batch[2]

        return batches

    def test_views(self, rows: Tensor) -> Tensor:
        """Tokens of whole images; ``rows`` are rows of all images."""
        return self.tokens(self._positions(rows), torch.zeros_like(rows))

    def _look_up(self, positions: Tensor, views: Tensor) -> Tensor:
        """Cached tokens; the indices are on the device of the cache."""
        assert self._cache is not None
        return self._cache[views, positions].to(self.runtime.device)

    def _fill_cache(self, views: Sequence[int]) -> None:
        for view in views:
            if view not in self._cached_views:
                for _ in self._token_batches(view):
                    pass  # each batch is cached

    def _positions(self, rows: Tensor) -> Tensor:
        """The positions of rows in ``self.rows``."""
        ordered, positions = self.rows.sort()
        return positions[torch.searchsorted(ordered, rows)]

    def _token_batches(self, view: int) -> Iterator[tuple[slice, Tensor]]:
        """The tokens of a view of all images in batches, which are cached if there is a cache."""
        cache, is_cached = self._cache, view in self._cached_views
        for start in range(0, len(self.rows), EVALUATION_BATCH):
            part = slice(start, min(start + EVALUATION_BATCH, len(self.rows)))
            if cache is not None and is_cached:
                yield part, cache[view, part].to(self.runtime.device)
                continue
            tokens = self._compute(torch.arange(part.start, part.stop), view)
            if cache is not None:
                largest = torch.finfo(cache.dtype).max
                cache[view, part] = tokens.clamp(-largest, largest).to(cache)
                # Rounded like later reads from the cache: otherwise the rounding would look like a drift of features.
                tokens = cache[view, part].to(self.runtime.device)
            yield part, tokens
        if cache is not None:
            self._cached_views.add(view)

    def _compute(self, positions: Tensor, view: int) -> Tensor:
        padded = pad_rows(positions)
        rows = self.rows[padded]
        if view:
            images = self.images.train_views(rows, self._crops[view - 1][padded], self._crop_scale)
        else:
            images = self.images.test_views(rows)
        with torch.no_grad(), self.runtime.autocast():
            return self.vit.forward_to_block(images, self._hooks, self._block)[: len(positions)].float()


def _cache_device(size: int, device: torch.device) -> torch.device | None:
    """The device with enough memory for a cache of this size, if there is one."""
    tier = choose_storage_tier(size, None, device)
    if tier == "device" and device.type != "cpu":
        return device
    return torch.device("cpu") if tier != "disk" and size <= MAX_HOST_BYTES else None
