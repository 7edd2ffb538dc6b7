# SPDX-License-Identifier: Apache-2.0
"""Views of images that stay the same for a whole task, so that what lies below the adapter is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from onea import seeds
from onea.data.image_storage import Images, Shard, choose_storage_tier
from onea.learner.tasks import Task
from onea.learner.training import Batches
from onea.runtime import Runtime
from onea.vit.batching import EVALUATION_BATCH, pad_rows
from onea.vit.frozen import FrozenViT
from onea.vit.hooks import BlockHooks

MOST_ON_HOST = 2**30  # bytes of tokens in the host's memory, and never more than half of what is free


class FixedViews:
    """A few views of each image: the first is the image as it is, the others are random crops.

    The tokens that enter a block do not depend on what is learned in it and above. They are computed when a view is
    first needed and kept for every later look at it, where those of all views have room. Where they have not,
    they are computed each time: that takes longer, but memory does not decide what is learned.

    Args:
        vit: computes the tokens.
        runtime: where, and in which precision.
        images: whose views they are.
        rows: which of them, ``int64 [N]``.
        crops: of each view after the first, as ``images.draw`` gives them for the rows.
        crop_scale: with which they were drawn.
        hooks: take part in the passes below.
        dtype: of what is kept. Half precision has three more bits than bfloat16, and tokens of a ViT are far smaller
            than its largest number.
        for_crops: the same network and runtime in another precision, for all views but the first, if there is one.
        block: the tokens are those that enter it; by default the first that hooks take part in.

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
        for_crops: tuple[FrozenViT, Runtime] | None = None,
        block: int | None = None,
    ):
        self.vit, self.runtime, self.images, self.rows = vit, runtime, images, rows
        self._for_crops = for_crops or (vit, runtime)
        self._crops, self._crop_scale, self._hooks, self._block = crops, crop_scale, hooks, block
        self.count = 1 + len(crops)
        shape = torch.Size((self.count, len(rows), vit.tokens, vit.width))
        place = _place_for(shape.numel() * dtype.itemsize, runtime.device)
        self._kept = None if place is None else torch.empty(shape, dtype=dtype, device=place)
        self._filled: set[int] = set()  # views whose tokens are kept by now

    @classmethod
    def drawn(
        cls,
        vit: FrozenViT,
        runtime: Runtime,
        task: Task,
        count: int,
        crop_scale: float,
        hooks: BlockHooks,
        block: int | None = None,
    ) -> FixedViews:
        """So many views of the images of a task, decided by its seed."""
        generators = (seeds.generator(task.seed, task.index, f"fixed view {view}") for view in range(1, count))
        crops = [task.images.draw(len(task), crop_scale, generator) for generator in generators]
        return cls(vit, runtime, task.images, task.rows, crops, crop_scale, hooks, block=block)

    def features(self, view: int, hooks: BlockHooks) -> Tensor:
        """Features of a view of all images, ``[N, width]`` float32 on the device, for inference.

        ``hooks`` begin where the tokens enter.
        """
        assert self._block in (None, hooks.first_block)
        found = torch.empty(len(self.rows), self.vit.width, device=self.runtime.device)
        vit, runtime = self._looks_at(view)
        for part, tokens in self._parts(view):
            with torch.no_grad(), runtime.autocast():
                found[part] = vit.forward_from_block(tokens, hooks)
        return found

    def tokens(self, positions: Tensor, views: Tensor) -> Tensor:
        """What enters the block: one view of each of these images, by its place in ``rows``."""
        asked = views.unique().tolist()
        if self._kept is None:
            parts = [self._compute(positions[views == view], view) for view in asked]
            return torch.cat(parts)[views.argsort(stable=True).argsort().to(self.runtime.device)]
        self._fill(asked)
        where = self._kept.device
        return self._look_up(positions.to(where), views.to(where))

    def batches(self, task: Task, size: int, count: int) -> Batches:
        """Training batches of tokens, of some of these images: every epoch takes the next of so many views of each.

        These are at most as many as there are. Neighbours are at different views, so that a batch holds all of them.
        """
        positions, count = self._positions(task.rows), min(count, self.count)

        def batches(epoch: int, order: torch.Generator, shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
            chosen = torch.randperm(len(task), generator=order)
            at, views = positions[chosen], (positions + epoch)[chosen] % count
            labels = task.labels[chosen].to(self.runtime.device)
            if self._kept is None:
                tokens = self.tokens
            else:  # one upload for all batches: a copy inside the training step would make the device wait for the host
                self._fill(views.unique().tolist())
                at, views, tokens = at.to(self._kept.device), views.to(self._kept.device), self._look_up
            for part in zip(at.split(size), views.split(size), labels.split(size), strict=True):
                yield tokens(shard(part[0]), shard(part[1])), part[2]

        return batches

    def _look_up(self, positions: Tensor, views: Tensor) -> Tensor:
        """Tokens that are kept, by indices where they are kept."""
        assert self._kept is not None
        return self._kept[views, positions].to(self.runtime.device)

    def _fill(self, views: Sequence[int]) -> None:
        """Compute and keep the tokens of these views, unless they are kept already."""
        for view in views:
            if view not in self._filled:
                for _ in self._parts(view):
                    pass  # they are kept on the way

    def plain(self, rows: Tensor) -> Tensor:
        """Tokens of images as they are, by their rows among all images."""
        return self.tokens(self._positions(rows), torch.zeros_like(rows))

    def _positions(self, rows: Tensor) -> Tensor:
        """The places of rows among those that have views."""
        ordered, places = self.rows.sort()
        return places[torch.searchsorted(ordered, rows)]

    def _parts(self, view: int) -> Iterator[tuple[slice, Tensor]]:
        """The tokens of a view of all images, part by part; new ones are kept as they come, if they are kept at all."""
        kept, filled = self._kept, view in self._filled
        for start in range(0, len(self.rows), EVALUATION_BATCH):
            part = slice(start, min(start + EVALUATION_BATCH, len(self.rows)))
            if kept is not None and filled:
                yield part, kept[view, part].to(self.runtime.device)
                continue
            tokens = self._compute(torch.arange(part.start, part.stop), view)
            if kept is not None:
                most = torch.finfo(kept.dtype).max
                kept[view, part] = tokens.clamp(-most, most).to(kept)
                # Rounded like those of every later look: whoever compares two must not take the rounding for a change.
                tokens = kept[view, part].to(self.runtime.device)
            yield part, tokens
        if kept is not None:
            self._filled.add(view)

    def _compute(self, positions: Tensor, view: int) -> Tensor:
        padded = pad_rows(positions)
        rows = self.rows[padded]
        if view:
            images = self.images.cropped(rows, self._crops[view - 1][padded], self._crop_scale)
        else:
            images = self.images.plain(rows)
        vit, runtime = self._looks_at(view)
        with torch.no_grad(), runtime.autocast():
            return vit.forward_to_block(images, self._hooks, self._block)[: len(positions)].float()

    def _looks_at(self, view: int) -> tuple[FrozenViT, Runtime]:
        """The network that a view is computed with, and where."""
        return self._for_crops if view else (self.vit, self.runtime)


def _place_for(size: int, device: torch.device) -> torch.device | None:
    """The memory that keeps so many bytes, if there is any."""
    tier = choose_storage_tier(size, None, device)
    if tier == "device" and device.type != "cpu":
        return device
    return torch.device("cpu") if tier != "disk" and size <= MOST_ON_HOST else None
