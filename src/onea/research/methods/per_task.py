# SPDX-License-Identifier: Apache-2.0
"""Methods with a frozen adapter per task, all of which run at inference."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from onea.learner.options import AdapterOptions
from onea.learner.tasks import Task
from onea.research.methods.contract import Method
from onea.research.methods.presets import published
from onea.tensors import Tensors
from onea.vit.adapter import Adapters
from onea.vit.heads import cosine_scores
from onea.vit.hooks import BlockHooks

# EASE's configurations for the ImageNet-21k backbone; alpha is ignored by methods without that option.
PUBLISHED: dict[str, dict[str, Any]] = {
    "cifar100": published(20, 0.025, 48, rank=64, alpha=0.1),
    "cub200": published(20, 0.008, 32, rank=64, alpha=0.05),
    "imagenet-a": published(20, 0.05, 32, 5e-3, rank=64, alpha=0.1),
    "imagenet-r": published(20, 0.05, 16, 5e-3, rank=64, alpha=0.1),
    "": published(20, 0.05, 16, 5e-3, rank=64, alpha=0.1),
}


class AdapterBank(Method):
    """A frozen adapter per task, each with its own forward pass."""

    trains = "an adapter per task"
    state = ("adapters", "sizes", "prototypes")
    adapter_per_task = True
    Options = AdapterOptions
    paper_presets: ClassVar = PUBLISHED
    options: AdapterOptions

    def setup(self) -> None:
        """Create empty lists of adapters and prototypes."""
        self.adapters: list[Adapters] = []
        self.sizes = torch.empty(0, dtype=torch.int64, device=self.runtime.device)  # classes of each task
        self.prototypes = torch.empty(0, self.vit.width, device=self.runtime.device)

    @property
    def ranges(self) -> list[range]:
        """The classes of each task, as positions."""
        return [range(start, stop) for start, stop in pairwise([0, *self.sizes.cumsum(0).tolist()])]

    @classmethod
    def forward_passes(cls, options: Any, tasks: int) -> float:
        """One for each adapter."""
        return tasks

    def add_adapter(self, task: Task) -> dict[str, Any]:
        """Train a new adapter with a local head on a task and freeze it.

        A task of one class has a constant loss: its adapter remains the identity.
        """
        adapters = self.new_adapters(task.seed, task.index)
        report = self.train_with_local_head(adapters, task)
        self.adapters.append(adapters.requires_grad_(False))
        self.sizes = torch.cat([self.sizes, self.sizes.new_tensor([len(task.classes)])])
        self.runtime.progress.note("prototypes")
        return report

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The adapters, each frozen after its task."""
        return {f"adapter {index}": adapters for index, adapters in enumerate(self.adapters)}

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state of any number of tasks."""
        self.adapters = [self.new_adapters().requires_grad_(False) for _ in state["sizes"]]
        super().load_state_dict(state)


class PerTaskAdapter(AdapterBank):
    """Nearest class mean, where each class is compared in the features of its own task's adapter.

    Scores are cosines rather than softmax probabilities within a task, because the probability in a task of one class
    is always 1. The cosines of different adapters are compared without calibration.
    """

    title = "Per-task adapter"
    paper = "https://arxiv.org/abs/2603.10237"
    stores = "an adapter per task, a prototype per class"
    base_learning_rate = 0.0084

    def learn(self, task: Task) -> dict[str, Any]:
        """Train the task's adapter and compute the means of its classes with it."""
        report = self.add_adapter(task)
        self.prototypes = torch.cat([self.prototypes, self.compute_prototypes(task, self.adapters[-1])])
        return report

    def scores_from_features(self, features: Mapping[str, Tensor]) -> Tensor:
        """Cosine of the features of each adapter to the prototypes of its task."""
        prototypes = self.prototypes.split(self.sizes.tolist())
        pairs = zip((features[name] for name in self.cacheable_modules()), prototypes, strict=True)
        return torch.cat([cosine_scores(*pair) for pair in pairs], dim=1)
