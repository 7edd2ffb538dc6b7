# SPDX-License-Identifier: Apache-2.0
"""A task, one step of a stream: its classes and their images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onea.data.image_storage import Images, Shard, whole


@dataclass(frozen=True)
class StreamPlan:
    """The numbers of classes and tasks of a whole stream, known in advance; None for methods that need neither.

    >>> StreamPlan(classes=100, tasks=10)
    StreamPlan(classes=100, tasks=10)
    """

    classes: int
    tasks: int


@dataclass(frozen=True)
class Task:
    """One step of a stream. Labels are positions in the stream's class order, so a task's are contiguous.

    >>> task = Task(1, "tuesday", range(4, 6), images=..., rows=torch.arange(3), labels=torch.tensor([4, 4, 5]), seed=1)
    >>> len(task), len(task.only(task.labels == 4))
    (3, 2)

    Attributes:
        index: counted from 0.
        classes: the positions of its classes.
        images: where its images are.
        rows: which of them, ``int64 [N]``.
        labels: their classes, ``int64 [N]``.
        seed: of the run; every draw derives from it, the index and a purpose.
        cumulative_task: makes one task of all tasks up to this one, for an upper bound: it needs the old images.
    """

    index: int
    name: str
    classes: range
    images: Images
    rows: Tensor
    labels: Tensor
    seed: int
    cumulative_task: Callable[[], Task] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, chosen: Tensor) -> Task:
        """The same task with these of its images, ``bool [N]``."""
        return self if bool(chosen.all()) else replace(self, rows=self.rows[chosen], labels=self.labels[chosen])

    def plain_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Test-time views of all images, in order, with their labels."""
        for rows, labels in zip(self.rows.split(size), self.labels.split(size), strict=True):
            yield self.images.plain(rows), labels

    def augmented_batches(
        self, size: int, crop_scale: float, order: torch.Generator, crops: torch.Generator, shard: Shard = whole
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Training views of all images once, in random order, with their labels on the same device.

        ``shard`` picks the part of each batch whose images are wanted; the labels are always the whole batch's.
        """
        chosen = torch.randperm(len(self), generator=order)
        labels = self.labels[chosen].to(self.images.device).split(size)
        images = self.images.augmented_batches(self.rows[chosen], size, crop_scale, crops, shard)
        yield from zip(images, labels, strict=True)

    def drawn_batches(
        self, size: int, crop_scale: float, order: torch.Generator, crops: torch.Generator
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """What decides the batches of ``augmented_batches``, on the device: rows, crops as drawn, and labels.

        ``images.cropped`` makes the images of them.
        """
        chosen = torch.randperm(len(self), generator=order)
        drawn = self.images.draw(len(self), crop_scale, crops)
        parts = (self.rows[chosen], drawn, self.labels[chosen])
        return list(zip(*(part.to(self.images.device).split(size) for part in parts), strict=True))
