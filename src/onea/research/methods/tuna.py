# SPDX-License-Identifier: Apache-2.0
"""TUNA: an adapter per task, chosen by entropy, and a universal adapter merged from all of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from onea import schedules
from onea.learner.optimisation import Schedule
from onea.learner.options import BottleneckOptions
from onea.learner.tasks import Task
from onea.research.methods.cosface import CosFaceMethod, CosFaceOptions
from onea.research.methods.presets import published
from onea.schema import Count, NotNegative
from onea.tensors import Tensors
from onea.vit.adapter import Adapters
from onea.vit.heads import GrowingCosineHead
from onea.vit.hooks import BlockHooks

_OFFICIAL_HALF_PERIOD = 5  # epochs of the alignment after which the official learning rate rises again
_SNAPSHOT = "snapshots."


@dataclass(frozen=True)
class TUNAOptions(CosFaceOptions, BottleneckOptions):
    """Options of TUNA.

    Attributes:
        single_class: how to handle a task of one class, whose loss is constant: ``skip`` it without adding an adapter,
            or ``train`` as in the official code, which adds a copy of the previous adapter, changed by weight decay
            only. The alignment learns the class in both cases.
        orthogonality: weight of the loss that makes the up-projections of a task orthogonal to those of earlier tasks;
            divided by e^t in task t.
        tuna_universal: the adapter whose prediction is added to that of the chosen one: ``paper`` (merged from all
            adapters) or ``official`` (the newest adapter, because the official code never uses the merged one).
        tuna_detach: earlier adapters do not change. Off is the official code, in which the orthogonality loss also
            trains their up-projections.
        tuna_alignment: learning rate schedule of the alignment: ``cosine``, or ``official`` (a cosine that reaches zero
            after five epochs and rises again).
    """

    batch_size: Count = 16
    rank: Count = 16
    alignment_epochs: int = 30
    alignment_learning_rate: NotNegative = 0.005
    alignment_samples: Count = 80
    orthogonality: NotNegative = 1e-3
    tuna_universal: Literal["paper", "official"] = "paper"
    tuna_detach: bool = True
    tuna_alignment: Literal["cosine", "official"] = "cosine"


# The published number of samples is five times the batch size.
_IMAGENET_R = published(10, 0.02, 32, rank=16, alignment_samples=160)


class TUNA(CosFaceMethod):
    """Task-specific and universal adapters. The head is shared by all of them."""

    title = "TUNA"
    paper = "https://arxiv.org/abs/2508.08165"
    trains = "an adapter per task, from the previous one, and a cosine head"
    stores = "an adapter per task, a cosine head and a Gaussian per class"
    state = ("snapshots", *CosFaceMethod.state)
    adapter_per_task = True
    jitter = 1e-4
    official_rho_sign = -1
    Options = TUNAOptions
    base_learning_rate = 0.01
    paper_presets: ClassVar = {
        "cifar100": published(15, 0.01, 16, rank=16, alignment_samples=80, orthogonality=0.0, rho="none"),
        "imagenet-a": published(
            20,
            0.01,
            16,
            rank=16,
            margin=0.3,
            alignment_epochs=10,
            alignment_learning_rate=0.01,
            alignment_samples=80,
        ),
        "imagenet-r": _IMAGENET_R,
        # Not published: the settings of ImageNet-R.
        "cub200": _IMAGENET_R,
        "": _IMAGENET_R,
    }
    auto_preset: ClassVar = {"rank": 16}
    options: TUNAOptions

    def setup(self) -> None:
        """Create a head and Gaussians without classes, and no adapter."""
        super().setup()
        self.snapshots: list[Adapters] = []  # copies of the adapter after each task that trained it
        self.universal: Adapters | None = None  # merged from them

    @classmethod
    def forward_passes(cls, options: TUNAOptions, tasks: int) -> float:
        """One for each adapter, and one with the universal adapter once it is merged from several."""
        return tasks + (tasks > 1 and options.tuna_universal == "paper")

    @classmethod
    def adapters_used(cls, options: TUNAOptions, tasks: int) -> int:
        """As many as forward passes."""
        return int(cls.forward_passes(options, tasks))

    def initialise(self, task: Task) -> None:
        """Add an adapter, initially the identity, that the first task trains unless it is skipped."""
        self._set_snapshots([self.new_adapters(task.seed)])

    def hooks(self) -> Adapters:
        """The newest adapter."""
        return self.snapshots[-1]

    def adapt(self, task: Task, rows: GrowingCosineHead) -> dict[str, Any]:
        """Train a copy of the newest adapter."""
        earlier = self.snapshots if len(self.sizes) else []  # the first task replaces the initial adapter
        adapters = copy.deepcopy(self.snapshots[-1]).requires_grad_(True)
        trained_earlier = earlier if self._trains_earlier() else []
        for adapter in (adapter for snapshot in trained_earlier for adapter in snapshot.adapters()):
            adapter.up.weight.requires_grad_(True)
        regulariser = self._orthogonality(task, adapters, earlier) if earlier and self.options.orthogonality else None
        losses = self.train_by_cosface(adapters, rows, task, others=trained_earlier, regulariser=regulariser)
        self._set_snapshots([*earlier, adapters])
        return {"losses": losses}

    def alignment_schedule(self) -> Schedule:
        """A cosine over all epochs, or the official one."""
        if self.options.tuna_alignment == "official":
            return lambda epoch, _: schedules.cosine(epoch, _OFFICIAL_HALF_PERIOD)
        return super().alignment_schedule()

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The adapters, each frozen after its task, then the universal adapter, which each new adapter changes."""
        change = f" after task {len(self.sizes)}" if self._trains_earlier() else ""
        modules: dict[str, BlockHooks] = {
            f"adapter {index}{change}": snapshot for index, snapshot in enumerate(self.snapshots)
        }
        if self.universal is not None:
            modules[f"universal adapter of {len(self.snapshots)}{change}"] = self.universal
        return modules

    def scores_from_features(self, features: Mapping[str, Tensor]) -> Tensor:
        """The probabilities of the adapter with the least entropy, plus those of the universal adapter."""
        with torch.no_grad():
            probabilities = torch.stack([self.head(features[name]).softmax(1) for name in self.cacheable_modules()])
        specific, universal = probabilities[: len(self.snapshots)], probabilities[-1]
        chosen = torch.special.entr(specific).sum(2).argmin(0)
        return specific[chosen, torch.arange(len(chosen), device=chosen.device)] + universal

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state of any number of adapters."""
        count = len({name.split(".")[1] for name in state if name.startswith(_SNAPSHOT)})
        self.snapshots = [self.new_adapters() for _ in range(count)]
        super().load_state_dict(state)
        self._set_snapshots(self.snapshots)

    def _orthogonality(self, task: Task, adapters: Adapters, earlier: Sequence[Adapters]) -> Callable[[], Tensor]:
        """The weighted orthogonality loss of a task's adapter."""
        weight = self.options.orthogonality * math.exp(-task.index - 1)

        def directions() -> Tensor:
            return torch.stack([mean_directions(snapshot) for snapshot in earlier])

        fixed = None if self._trains_earlier() else directions()
        return lambda: weight * overlap(mean_directions(adapters), directions() if fixed is None else fixed)

    def _trains_earlier(self) -> bool:
        """Whether training changes the adapters of earlier tasks."""
        return not self.options.tuna_detach and self.options.orthogonality > 0

    def _set_snapshots(self, snapshots: list[Adapters]) -> None:
        """Freeze the adapters of all tasks, and merge them."""
        self.snapshots = [snapshot.requires_grad_(False) for snapshot in snapshots]
        is_merged = len(snapshots) > 1 and self.options.tuna_universal == "paper"
        self.universal = merge_adapters(self.snapshots) if is_merged else None


def merge_adapters(adapters: Sequence[Adapters]) -> Adapters:
    """The universal adapter: each entry is the one of largest magnitude among those with the sign of their mean."""
    states = [each.state_dict() for each in adapters]
    merged = copy.deepcopy(adapters[0])
    merged.load_state_dict({name: elect_largest(torch.stack([state[name] for state in states])) for name in states[0]})
    return merged


def elect_largest(values: Tensor) -> Tensor:
    """Of entries along the first dimension, the one of largest magnitude that has the sign of their mean.

    A mean of zero counts as negative.

    >>> elect_largest(torch.tensor([[1.0, -2.0, 4.0], [3.0, 1.0, -4.0]]))
    tensor([ 3., -2., -4.])
    """
    sign = torch.where(values.mean(0) > 0, 1.0, -1.0)
    return sign * (values * sign).clamp_min(0).amax(0)


def mean_directions(adapters: Adapters) -> Tensor:
    """The mean of the normalised rows of each up-projection, ``[blocks, rank]``."""
    return torch.stack([F.normalize(adapter.up.weight, dim=1).mean(0) for adapter in adapters.adapters()])


def overlap(new: Tensor, earlier: Tensor) -> Tensor:
    """Orthogonality loss of the mean directions ``[blocks, rank]`` of a task and those of earlier tasks.

    The dot product of the means is the mean of all dot products of rows, whose absolute value is averaged over blocks
    and summed over tasks.
    """
    return (new * earlier).sum(2).abs().mean(1).sum()
