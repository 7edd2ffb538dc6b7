# SPDX-License-Identifier: Apache-2.0
"""Images of earlier tasks that a method keeps, as rows of the stream's images."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onea import seeds
from onea.learner.memory import PENDING, Memory, Waiting
from onea.learner.tasks import Task
from onea.merging.operator import Sizes
from onea.tensors import Tensors

_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class ImageMemory:
    """Images of earlier tasks, and what the adapter was trained on.

    Attributes:
        policy: which images are kept.
        rows: rows of the images, ``[K]``.
        labels: labels of the images, ``[K]``.
        trained: number of different images of each class so far that the adapter was trained on, ``[classes]``.
    """

    policy: Memory
    rows: Tensor = _NONE
    labels: Tensor = _NONE
    trained: Tensor = _NONE

    def __len__(self) -> int:
        return len(self.rows)

    def waiting(self, task: Task) -> Waiting:
        """The classes of the task and of the memory that no adapter was trained on."""
        classes = torch.cat([task.labels, self.labels]).unique()
        return Waiting(int((self._trained(task.classes.stop)[classes] == 0).sum()), task.classes.stop)

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
        rows, labels = self.rows, self.labels
        if self.policy == PENDING and is_trained is not None:
            return replace(self, rows=_NONE, labels=_NONE, trained=counts)
        kept = torch.arange(len(task))
        if self.policy != PENDING:
            order = torch.randperm(len(task), generator=seeds.generator(task.seed, task.index, "memory"))
            kept = torch.cat([order[task.labels[order] == label][: self.policy] for label in task.classes])
        return replace(
            self, rows=torch.cat([rows, task.rows[kept]]), labels=torch.cat([labels, task.labels[kept]]), trained=counts
        )

    def state_dict(self) -> Tensors:
        """All that is kept, as tensors."""
        return {"rows": self.rows, "labels": self.labels, "trained": self.trained}

    def load(self, state: Tensors) -> ImageMemory:
        """A memory with this policy from tensors."""
        return replace(self, rows=state["rows"], labels=state["labels"], trained=state["trained"])

    def _trained(self, classes: int) -> Tensor:
        """``trained`` with zeros for new classes."""
        return torch.nn.functional.pad(self.trained, (0, classes - len(self.trained)))
