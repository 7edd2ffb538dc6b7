# SPDX-License-Identifier: Apache-2.0
"""Methods with a frozen adapter per task, all of which are used at inference: EASE, and the nearest mean per adapter.

EASE is an expandable subspace ensemble, with synthesised prototypes of old classes in new subspaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from onea.errors import OneaError
from onea.learner.options import AdapterOptions
from onea.learner.tasks import Task
from onea.research.methods.contract import Method
from onea.research.methods.presets import published
from onea.schema import NotNegative
from onea.tensors import Tensors
from onea.vit.adapter import Adapters
from onea.vit.heads import cosine_scores
from onea.vit.hooks import NO_HOOKS, BlockHooks

_PLAIN = "plain"  # the pretrained network without adapters

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
        self.runtime.progress.start_phase("prototypes")
        return report

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The adapters, each frozen after its task."""
        return {f"adapter {index}": adapters for index, adapters in enumerate(self.adapters)}

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state of any number of tasks."""
        self.adapters = [self.new_adapters().requires_grad_(False) for _ in state["sizes"]]
        super().load_state_dict(state)


class PerTaskAdapter(AdapterBank):
    """Nearest class mean, where the features of a class are those of the adapter of its task.

    Scores are cosines rather than softmax probabilities within a task, because the probability in a task of one class
    is always 1. The cosines of different adapters are compared without calibration.
    """

    title = "Per-task adapter"
    paper = "https://arxiv.org/abs/2603.10237"
    stores = "an adapter per task and a prototype per class"
    base_learning_rate = 0.013

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


@dataclass(frozen=True)
class EASEOptions(AdapterOptions):
    """Options of EASE.

    Attributes:
        alpha: total weight of the subspaces of other tasks, relative to 1 for that of the task of a class.
        ease_recalc: synthesise all missing prototypes again after every task, from all classes with prototypes in the
            subspace. Off synthesises them once, when the subspace is new, from the classes of its task.
        ptm_beta: weight of the features of the pretrained network as one more subspace (and forward pass); 0 turns it
            off.
    """

    alpha: NotNegative = 0.1
    ease_recalc: bool = True
    ptm_beta: NotNegative = 0.0


class EASE(AdapterBank):
    """Expandable subspace ensemble: every adapter scores all classes, with the largest weight on those of its task.

    ``prototypes[j, c]`` is the prototype of class c in subspace j. It is a mean of features if c arrived with or after
    adapter j. The images of earlier classes are no longer available, so their prototypes in subspace j are synthesised.
    """

    title = "EASE"
    paper = "https://arxiv.org/abs/2403.12030"
    stores = "an adapter per task, and a prototype per class and task"
    Options = EASEOptions
    base_learning_rate = 0.013
    options: EASEOptions

    def setup(self) -> None:
        """Create empty lists of adapters and prototypes."""
        super().setup()
        self.prototypes = torch.empty(0, 0, self.vit.width, device=self.runtime.device)
        self.plain = torch.empty(0, self.vit.width, device=self.runtime.device)

    @classmethod
    def forward_passes(cls, options: EASEOptions, tasks: int) -> float:
        """One for each adapter, and one of the pretrained network if ``ptm_beta`` is not 0."""
        return super().forward_passes(options, tasks) + bool(options.ptm_beta)

    def learn(self, task: Task) -> dict[str, Any]:
        """Train the task's adapter and compute the prototypes of all classes in all subspaces."""
        report = self.add_adapter(task)
        new = self.compute_prototypes_per_module(task, list(self.cacheable_modules().values()))
        if self.options.ptm_beta:
            self.plain, new = torch.cat([self.plain, new[-1]]), new[:-1]
        old = torch.cat([self.prototypes, self.prototypes.new_zeros(1, *self.prototypes.shape[1:])])
        self.prototypes = synthesise_prototypes(torch.cat([old, new], dim=1), self.ranges, self.options.ease_recalc)
        return report

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The adapters, and the pretrained network if ``ptm_beta`` is not 0."""
        return super().cacheable_modules() | ({_PLAIN: NO_HOOKS} if self.options.ptm_beta else {})

    def scores_from_features(self, features: Mapping[str, Tensor]) -> Tensor:
        """Weighted sum of the cosines in all subspaces; the features of each subspace are normalised separately."""
        weights = subspace_weights(self.sizes, self.options.alpha)
        subspaces = zip(super().cacheable_modules(), self.prototypes, weights, strict=True)
        total = torch.zeros((), device=self.prototypes.device)
        for name, prototypes, weight in subspaces:
            total = total + weight * cosine_scores(features[name], prototypes)
        if self.options.ptm_beta:
            total = total + self.options.ptm_beta * cosine_scores(features[_PLAIN], self.plain)
        return total

    def state_dict(self) -> Tensors:
        """All adapters and prototypes."""
        return super().state_dict() | ({"plain": self.plain} if self.options.ptm_beta else {})

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state."""
        super().load_state_dict(state)
        if self.options.ptm_beta:
            if "plain" not in state:
                raise OneaError("This state was saved with ptm_beta 0; continue without ptm_beta, or start a new run.")
            self.plain = state["plain"].to(self.runtime.device)


def synthesise_prototypes(prototypes: Tensor, ranges: Sequence[range], include_later: bool) -> Tensor:
    """Synthesise the missing prototypes from the real ones: the paper's prototype complement.

    The prototype of an old class in a later subspace j is a weighted mean of prototypes there. The weights are the
    softmax (without temperature) of the cosines between the old class and those classes in the old class's subspace i.

    Args:
        prototypes: ``[tasks, classes, width]``; entries of classes older than the subspace are ignored.
        ranges: the classes of each task.
        include_later: average over the classes of task j and all later tasks, rather than over those of task j only.
    """
    complete = prototypes.clone()
    for i, old in enumerate(ranges):
        for j in range(i + 1, len(ranges)):
            sources = slice(ranges[j].start, ranges[-1].stop if include_later else ranges[j].stop)
            similarity = cosine_scores(prototypes[i, old.start : old.stop], prototypes[i, sources])
            complete[j, old.start : old.stop] = similarity.softmax(1) @ prototypes[j, sources]
    return complete


def subspace_weights(sizes: Tensor, alpha: float) -> Tensor:
    """Weight of each subspace for each class, ``[tasks, classes]``: 1 for the subspace of the class's task.

    The paper's subspace reweighting. The other subspaces share ``alpha`` equally, as in the official code.

    >>> subspace_weights(torch.tensor([1, 2, 1]), 0.1)
    tensor([[1.0000, 0.0500, 0.0500, 0.0500],
            [0.0500, 1.0000, 1.0000, 0.0500],
            [0.0500, 0.0500, 0.0500, 1.0000]])
    """
    tasks = torch.arange(len(sizes), device=sizes.device)
    is_own = tasks.repeat_interleave(sizes)[None, :] == tasks[:, None]
    return torch.where(is_own, 1.0, alpha / max(len(sizes) - 1, 1))
