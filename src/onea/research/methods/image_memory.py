# SPDX-License-Identifier: Apache-2.0
"""Images of earlier tasks that a method keeps, as rows of the stream's images."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from onea import seeds
from onea.learner.memory import PENDING, Memory, Waiting
from onea.learner.tasks import Task
from onea.merging.operator import Sizes
from onea.tensors import Tensors

_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class KeptImages:
    """Images of earlier tasks.

    Attributes:
        rows: rows of the images, ``[K]``.
        labels: labels of the images, ``[K]``.
    """

    rows: Tensor = _NONE
    labels: Tensor = _NONE

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, task: Task, positions: Tensor) -> Self:
        """The memory with the images at these positions of a task."""
        return replace(
            self,
            rows=torch.cat([self.rows, task.rows[positions]]),
            labels=torch.cat([self.labels, task.labels[positions]]),
        )

    def as_task(self, task: Task) -> Task:
        """The task with its images replaced by the kept images of all classes so far."""
        return replace(task, classes=range(task.classes.stop), rows=self.rows, labels=self.labels)

    def extend(self, task: Task) -> Task:
        """A task with its images, then those of the memory; its labels are numbered from 0 without gaps."""
        if not len(self):
            return task
        labels = torch.cat([task.labels, self.labels])
        classes = labels.unique()
        return replace(
            task,
            classes=range(len(classes)),
            rows=torch.cat([task.rows, self.rows]),
            labels=torch.searchsorted(classes, labels),
        )

    def labels_with(self, task: Task) -> Tensor:
        """The labels of the images of ``extend(task)`` in the stream."""
        return torch.cat([task.labels, self.labels])

    def state_dict(self) -> Tensors:
        """All that is kept, as tensors."""
        return {"rows": self.rows, "labels": self.labels}

    def load(self, state: Tensors) -> Self:
        """The memory with these tensors, on the CPU."""
        return replace(self, **{name: state[name].cpu() for name in self.state_dict()})


@dataclass(frozen=True)
class ImageMemory(KeptImages):
    """Images of earlier tasks, and what the adapter was trained on.

    Attributes:
        policy: which images are kept.
        trained: number of different images of each class so far that the adapter was trained on, ``[classes]``.
    """

    policy: Memory = field(kw_only=True)
    trained: Tensor = _NONE

    def waiting(self, task: Task) -> Waiting:
        """The classes of the task and of the memory that no adapter was trained on."""
        classes = torch.cat([task.labels, self.labels]).unique()
        return Waiting(int((self._trained(task.classes.stop)[classes] == 0).sum()), task.classes.stop)

    def sizes(self, task: Task, is_trained: Tensor) -> Sizes:
        """The sizes of the merge: a class that was trained before is split by its images on each side.

        ``is_trained`` selects the images of ``extend(task)`` that are trained on.
        """
        before = self._trained(task.classes.stop)
        accumulated = {label: int(before[label]) for label in before.nonzero()[:, 0].tolist()}
        return Sizes.from_counts(accumulated, Counter(self.labels_with(task)[is_trained].tolist()))

    def after(self, task: Task, is_trained: Tensor | None) -> ImageMemory:
        """The memory after a task; ``is_trained`` selects the images that an adapter was trained on, if one was."""
        counts = self._trained(task.classes.stop)
        if is_trained is not None:
            labels = self.labels_with(task)
            # Images of the memory are new to the adapter only if their class is.
            is_new = (torch.arange(len(labels)) < len(task)) | (counts[labels] == 0)
            counts = counts + torch.bincount(labels[is_new & is_trained], minlength=len(counts))
        if self.policy == PENDING and is_trained is not None:
            return replace(self, rows=_NONE, labels=_NONE, trained=counts)
        kept = torch.arange(len(task)) if self.policy == PENDING else sample_positions(task, self.policy)
        return replace(self.add(task, kept), trained=counts)

    def state_dict(self) -> Tensors:
        """All that is kept, as tensors."""
        return super().state_dict() | {"trained": self.trained}

    def _trained(self, classes: int) -> Tensor:
        """``trained`` with zeros for new classes."""
        return torch.nn.functional.pad(self.trained, (0, classes - len(self.trained)))


def sample_positions(task: Task, count: int) -> Tensor:
    """Positions of at most ``count`` images of each class of a task, at random."""
    order = torch.randperm(len(task), generator=seeds.generator(task.seed, task.index, "memory"))
    return torch.cat([order[task.labels[order] == label][:count] for label in task.classes])
