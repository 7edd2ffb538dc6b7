# SPDX-License-Identifier: Apache-2.0
"""A task: one step of a stream, with its classes and their images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onea.data.image_storage import Images, Shard, all_rows


@dataclass(frozen=True)
class StreamPlan:
    """The numbers of classes and tasks of a whole stream, if they are known in advance.

    >>> StreamPlan(classes=100, tasks=10)
    StreamPlan(classes=100, tasks=10)
    """

    classes: int
    tasks: int


@dataclass(frozen=True)
class Task:
    """One step of a stream. Labels are positions in the stream's class order, so a task's are contiguous.

    >>> task = Task(1, "tuesday", range(4, 6), images=..., rows=torch.arange(3), labels=torch.tensor([4, 4, 5]), seed=1)
    >>> len(task), len(task.subset(task.labels == 4))
    (3, 2)

    Attributes:
        index: number of the task, counted from 0.
        classes: labels of its classes.
        images: all images of the stream.
        rows: rows of the task's images, ``int64 [N]``.
        labels: labels of the task's images, ``int64 [N]``.
        seed: seed of the run; every random number depends on it, the index and a purpose.
        cumulative_task: returns a task with the images of all tasks up to this one, for joint training.
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

    def subset(self, mask: Tensor) -> Task:
        """The task with the images that a mask selects, ``bool [N]``."""
        return self if bool(mask.all()) else replace(self, rows=self.rows[mask], labels=self.labels[mask])

    def whole_image_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of whole images in order, as at test time, with their labels."""
        for rows, labels in zip(self.rows.split(size), self.labels.split(size), strict=True):
            yield self.images.test_views(rows), labels

    def train_batches(
        self, size: int, crop_scale: float, order: torch.Generator, crops: torch.Generator, shard: Shard = all_rows
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch: random crops of all images in random order, with labels on the same device.

        ``shard`` selects the images of each batch that this process computes; the labels are those of the whole batch.
        """
        permutation = torch.randperm(len(self), generator=order)
        labels = self.labels[permutation].to(self.images.device).split(size)
        images = self.images.train_batches(self.rows[permutation], size, crop_scale, crops, shard)
        yield from zip(images, labels, strict=True)

    def row_batches(
        self, size: int, crop_scale: float, order: torch.Generator, crops: torch.Generator
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The batches of ``train_batches`` before cropping: rows, crops and labels on the device.

        ``images.train_views`` crops them inside a captured training step.
        """
        permutation = torch.randperm(len(self), generator=order)
        sampled = self.images.sample_crops(len(self), crop_scale, crops)
        parts = (self.rows[permutation], sampled, self.labels[permutation])
        return list(zip(*(part.to(self.images.device).split(size) for part in parts), strict=True))
