# SPDX-License-Identifier: Apache-2.0
"""EASE: a feature subspace per task, and old classes guessed in the subspaces that came after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onea.errors import OneaError
from onea.learner.options import AdapterOptions
from onea.learner.tasks import StreamPlan, Task
from onea.research.methods.per_task import AdapterBank
from onea.runtime import Runtime
from onea.schema import NotNegative
from onea.tensors import Tensors
from onea.vit.frozen import FrozenViT
from onea.vit.heads import cosine_scores
from onea.vit.hooks import NO_HOOKS, BlockHooks

_PLAIN = "plain"


@dataclass(frozen=True)
class EASEOptions(AdapterOptions):
    """Options of EASE.

    Attributes:
        alpha: weight of the other tasks' subspaces together, against 1 for a class's own.
        ease_recalc: guess all missing prototypes again after every task, from all classes that know the subspace; off
            guesses them once, when the subspace is new, from its own task's classes.
        ptm_beta: weight of the plain network's features as one more subspace (and pass); 0 leaves it out.
    """

    alpha: NotNegative = 0.1
    ease_recalc: bool = True
    ptm_beta: NotNegative = 0.0


class EASE(AdapterBank):
    """Expandable subspace ensemble: all adapters score all classes, each class's own adapter above all.

    ``prototypes[j, c]`` is class c in subspace j. It is real, a mean of features, where c arrived with or after
    adapter j; an earlier class has no images left to pass through adapter j, so its prototype there is synthetic.
    """

    title = "EASE"
    paper = "https://arxiv.org/abs/2403.12030"
    stores = "an adapter per task, a prototype per class and task"
    Options = EASEOptions
    base_learning_rate = 0.019
    options: EASEOptions

    def __init__(self, vit: FrozenViT, options: EASEOptions, runtime: Runtime, plan: StreamPlan | None = None):
        super().__init__(vit, options, runtime, plan)
        self.prototypes = torch.empty(0, 0, vit.width, device=runtime.device)
        self.plain = torch.empty(0, vit.width, device=runtime.device)

    @classmethod
    def forward_passes(cls, options: EASEOptions, tasks: int) -> float:
        """One for every adapter, and one more where the plain network's features count too."""
        return super().forward_passes(options, tasks) + bool(options.ptm_beta)

    def learn(self, task: Task) -> dict[str, Any]:
        """Train the task's adapter, then complete the prototypes of all classes in all subspaces."""
        report = self.add_adapter(task)
        self.runtime.progress.note("prototypes")
        new = self.compute_prototypes_per_module(task, list(self.cacheable_modules().values()))
        if self.options.ptm_beta:
            self.plain, new = torch.cat([self.plain, new[-1]]), new[:-1]
        old = torch.cat([self.prototypes, self.prototypes.new_zeros(1, *self.prototypes.shape[1:])])
        self.prototypes = synthesise(torch.cat([old, new], dim=1), self.ranges, self.options.ease_recalc)
        return report

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The adapters and, where it counts, the plain network behind them."""
        return super().cacheable_modules() | ({_PLAIN: NO_HOOKS} if self.options.ptm_beta else {})

    def scores_from_features(self, features: Mapping[str, Tensor]) -> Tensor:
        """Cosines in every subspace, weighted per class; each block of features is normalised by itself."""
        weights = subspace_weights(self.sizes, self.options.alpha).to(self.prototypes.device)
        subspaces = zip(super().cacheable_modules(), self.prototypes, weights, strict=True)
        total = torch.zeros((), device=self.prototypes.device)
        for name, prototypes, weight in subspaces:
            total = total + weight * cosine_scores(features[name], prototypes)
        if self.options.ptm_beta:
            total = total + self.options.ptm_beta * cosine_scores(features[_PLAIN], self.plain)
        return total

    def real(self) -> Tensor:
        """Mask of the prototypes that are means of features, ``bool [tasks, classes]``; the others are synthetic."""
        arrived = _task_of_class(self.sizes)
        return arrived[None, :] >= torch.arange(len(self.sizes))[:, None]

    def state_dict(self) -> Tensors:
        """All adapters and prototypes."""
        plain = {"plain": self.plain} if self.options.ptm_beta else {}
        return {**super().state_dict(), "prototypes": self.prototypes, **plain}

    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a saved state."""
        super().load_state_dict(state)
        self.prototypes = state["prototypes"].to(self.runtime.device)
        if self.options.ptm_beta:
            if "plain" not in state:
                raise OneaError("This state was saved with ptm_beta 0; continue it without ptm_beta, or start anew.")
            self.plain = state["plain"].to(self.runtime.device)


def synthesise(prototypes: Tensor, ranges: Sequence[range], growing: bool) -> Tensor:
    """Prototypes with the synthetic ones written anew from the real ones alone: the paper's prototype complement.

    An old class resembles some donors, classes known in both subspaces; how much, is measured in the old class's own
    subspace i, and the donors' prototypes in the later subspace j are mixed in those shares (a softmax without
    temperature).

    Args:
        prototypes: ``[tasks, classes, width]``; those of classes older than the subspace are not read.
        ranges: the classes of each task.
        growing: donors are all classes from task j on, rather than those of task j alone.
    """
    complete = prototypes.clone()
    for i, old in enumerate(ranges):
        for j in range(i + 1, len(ranges)):
            donors = slice(ranges[j].start, ranges[-1].stop if growing else ranges[j].stop)
            alike = cosine_scores(prototypes[i, old.start : old.stop], prototypes[i, donors])
            complete[j, old.start : old.stop] = alike.softmax(1) @ prototypes[j, donors]
    return complete


def subspace_weights(sizes: Sequence[int], alpha: float) -> Tensor:
    """The weight of each subspace's cosine for each class, ``[tasks, classes]``: 1 for a class's own.

    The paper's subspace reweight; that the others share ``alpha`` equally is the official code's.

    >>> subspace_weights([1, 2, 1], 0.1)
    tensor([[1.0000, 0.0500, 0.0500, 0.0500],
            [0.0500, 1.0000, 1.0000, 0.0500],
            [0.0500, 0.0500, 0.0500, 1.0000]])
    """
    tasks = len(sizes)
    own = _task_of_class(sizes)[None, :] == torch.arange(tasks)[:, None]
    return torch.where(own, 1.0, alpha / max(tasks - 1, 1))


def _task_of_class(sizes: Sequence[int]) -> Tensor:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
