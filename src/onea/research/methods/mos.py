# SPDX-License-Identifier: Apache-2.0
"""MOS: progressively merged adapters, and self-refined adapter retrieval at inference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import seeds
from onea.learner.optimisation import ParamGroup, train
from onea.learner.options import BottleneckOptions
from onea.learner.tasks import Task
from onea.research.methods.alignment import Covariance, Gaussians, align_head
from onea.research.methods.contract import Method
from onea.research.methods.presets import published
from onea.schema import BelowOne, Count, NotNegative, Positive
from onea.tensors import Tensors
from onea.vit.adapter import Adapters
from onea.vit.heads import GrowingHead, cosine_scores, masked_cross_entropy
from onea.vit.hooks import BlockHooks

_HEAD_RATE = 0.1  # learning rate of the head, relative to the adapter


@dataclass(frozen=True)
class MOSOptions(BottleneckOptions):
    """Options of MOS.

    Attributes:
        momentum: weight of the mean of all earlier adapters in each progressive merge.
        mos_ema: when to merge: ``per-step`` (after each optimiser step) or ``official`` (also before each block in
            every forward pass of training, as in the official code, which does so at inference as well).
        regulariser: weight of the loss that separates features from each other and from old class means.
        regulariser_temperature: temperature of that loss.
        covariance: covariance of the Gaussian of each class: ``full`` or ``diagonal``.
        alignment_epochs: epochs of classifier alignment, which retrains the head on sampled features after every task
            but the first; 0 turns it off.
        alignment_learning_rate: learning rate of the classifier alignment.
        alignment_samples: features sampled per class and epoch, and per step, in multiples of the batch size.
        refinements: maximum number of adapters that are retrieved one after the other for an image.
    """

    rank: Count = 16
    momentum: BelowOne = 0.1
    mos_ema: Literal["per-step", "official"] = "per-step"
    regulariser: float = 0.1
    regulariser_temperature: Positive = 0.8
    covariance: Covariance = "full"
    alignment_epochs: int = 30
    alignment_learning_rate: NotNegative = 0.005
    alignment_samples: Count = 5
    refinements: Count = 4


class MOS(Method):
    """Model surgery: progressively merged adapters, and self-refined retrieval of the adapter for each image."""

    title = "MOS"
    paper = "https://arxiv.org/abs/2412.09441"
    trains = "one adapter and a linear head, in every task"
    stores = "an adapter per task, a linear head, and a prototype and a Gaussian per class"
    state = ("working", "snapshots", "head", "gaussians", "prototypes", "sizes")
    adapter_per_task = True
    Options = MOSOptions
    base_learning_rate = 0.015
    paper_presets: ClassVar = {
        "cifar100": published(20, 0.03, 48, rank=16, covariance="full"),
        "cub200": published(10, 0.01, 32, rank=16, covariance="full"),
        "imagenet-a": published(10, 0.05, 32, 5e-3, rank=16, covariance="diagonal"),
        "imagenet-r": published(10, 0.05, 16, 5e-3, rank=16, covariance="full"),
        "": published(10, 0.05, 16, 5e-3, rank=16, covariance="full"),
    }
    auto_preset: ClassVar = {"rank": 16}
    options: MOSOptions

    def setup(self) -> None:
        """Create the adapter, and a head, Gaussians and prototypes without classes."""
        width, device = self.vit.width, self.runtime.device
        self.working = self.new_adapters()  # trained further in every task
        self.snapshots: list[Adapters] = []  # copies of it after each task
        self.head = GrowingHead(width).to(device)
        self.gaussians = Gaussians(width, self.options.covariance, device=device)
        self.prototypes = torch.empty(0, width, device=device)  # with the first snapshot
        self.sizes = torch.empty(0, dtype=torch.int64, device=device)  # classes of each task

    @classmethod
    def forward_passes(cls, options: MOSOptions, tasks: int) -> float:
        """One with the first adapter, and one for each refinement."""
        return min(tasks, 1 + options.refinements)

    def learn(self, task: Task) -> dict[str, Any]:
        """Train and merge the adapter, store a copy, fit Gaussians of the new classes, and align the classifier."""
        if not self.snapshots:
            self.working = self.new_adapters(task.seed)
        self.head.grow(len(task.classes), seeds.generator(task.seed, task.index, "head"))
        merge = self._merge_towards(self.snapshots)
        hooks = _MergingAdapters(self.working, merge) if self.options.mos_ema == "official" else self.working
        report: dict[str, Any] = {"epochs": self.epochs_for(task), "losses": self._train(task, hooks, merge)}
        self.snapshots.append(copy.deepcopy(self.working).requires_grad_(False))
        self.sizes = torch.cat([self.sizes, self.sizes.new_tensor([len(task.classes)])])
        self._fit_classes(task, hooks)
        if len(self.snapshots) > 1 and self.options.alignment_epochs:
            report["alignment_losses"] = self._align(task)
        return report

    def scores(self, images: Tensor) -> Tensor:
        """Two-stage ensemble: the head with the retrieved adapter, and prototypes with the first adapter."""
        first = self.features(images, self.snapshots[0])
        similarities = cosine_scores(first, self.prototypes)
        with torch.no_grad():
            logits = self._retrieved_logits(images, first, similarities)
        return logits.softmax(1) + (len(self.snapshots) * similarities).softmax(1)

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state of any number of tasks."""
        self.snapshots = [self.new_adapters().requires_grad_(False) for _ in state["sizes"]]
        super().load_state_dict(state)

    def _train(self, task: Task, hooks: BlockHooks, merge: Callable[[], None]) -> list[float]:
        options, old_means = self.options, self.gaussians.means

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            features = self.vit(images, hooks)
            classification = masked_cross_entropy(self.head(features), labels, task.classes)
            return classification + options.regulariser * separation_loss(
                features, old_means, options.regulariser_temperature
            )

        trained = [ParamGroup(self.working), ParamGroup(self.head, lr_scale=_HEAD_RATE)]
        return train(trained, loss, task, self.recipe(task), self.runtime, after_step=merge)

    def _merge_towards(self, earlier: Sequence[nn.Module]) -> Callable[[], None]:
        """Progressive merging: ``W <- (1 - m) W + m mean(earlier W)``; none in the first task."""
        parameters = zip(*(adapters.parameters() for adapters in earlier), strict=True)
        means = [torch.stack(same).mean(0) for same in parameters]

        def merge() -> None:
            if means:
                for parameter, mean in zip(self.working.parameters(), means, strict=True):
                    parameter.data.lerp_(mean, self.options.momentum)

        return merge

    def _fit_classes(self, task: Task, hooks: BlockHooks) -> None:
        """A Gaussian of each new class with the newest adapter, and a prototype with the first adapter."""
        self.runtime.progress.start_phase("prototypes")
        self.gaussians.add(self.whole_image_features(task, hooks), task.labels, task.classes)
        is_first = len(self.snapshots) == 1  # the newest adapter is the first one
        new = self.gaussians.means if is_first else self.compute_prototypes(task, self.snapshots[0])
        self.prototypes = torch.cat([self.prototypes, new])

    def _align(self, task: Task) -> list[float]:
        """Classifier alignment: retrain the head on features sampled from the Gaussians of all classes."""
        options, generator = self.options, seeds.generator(task.seed, task.index, "alignment")
        self.runtime.progress.start_phase("classifier alignment")
        return align_head(
            self.head,
            self.gaussians,
            epochs=options.alignment_epochs,
            learning_rate=options.alignment_learning_rate,
            weight_decay=options.weight_decay,
            batch_size=options.alignment_samples * options.batch_size,
            generator=generator,
        )

    def _retrieved_logits(self, images: Tensor, first: Tensor, similarities: Tensor) -> Tensor:
        """Self-refined adapter retrieval.

        Repeat the prediction with the adapter of the predicted task, until it predicts a class of that task. Images
        with the same adapter share a forward pass, and no adapter runs twice for an image.
        """
        task_of = torch.arange(len(self.sizes), device=similarities.device).repeat_interleave(self.sizes)
        chosen = task_of[similarities.argmax(1)]
        logits = torch.zeros_like(similarities)
        rows = torch.arange(len(images), device=similarities.device)  # images whose adapter is not final
        logits_by_adapter = {0: self.head(first)}
        computed = {0: torch.ones(len(images), dtype=torch.bool, device=similarities.device)}
        for _ in range(self.options.refinements):
            for adapter in chosen[rows].unique().tolist():
                selected = rows[chosen[rows] == adapter]
                adapter_logits = logits_by_adapter.setdefault(adapter, torch.zeros_like(similarities))
                is_computed = computed.setdefault(adapter, torch.zeros_like(computed[0]))
                new = selected[~is_computed[selected]]
                if len(new):
                    adapter_logits[new] = self.head(self.features(images[new], self.snapshots[adapter]))
                    is_computed[new] = True
                logits[selected] = adapter_logits[selected]
            predicted = task_of[logits[rows].argmax(1)]
            is_changed = predicted != chosen[rows]
            rows = rows[is_changed]
            if not len(rows):
                break
            chosen[rows] = predicted[is_changed]
        return logits


@dataclass(frozen=True)
class _MergingAdapters(BlockHooks):
    """Adapters as in the official code, which merges all of them before every block."""

    adapters: Adapters
    merge: Callable[[], None]

    def before_block(self, block: int, x: Tensor) -> Tensor:
        self.merge()
        return x

    def mlp_update(self, block: int, u: Tensor) -> Tensor | None:
        return self.adapters.mlp_update(block, u)


def separation_loss(features: Tensor, old_means: Tensor, temperature: float = 0.8) -> Tensor:
    """Loss that separates the rows of ``Q = [old class means; features]`` from each other.

    The mean over the diagonal of ``-log softmax(Q Q^T / temperature)``; rows are not normalised. Zero for a single row.
    """
    with torch.autocast(features.device.type, enabled=False):
        rows = torch.cat([old_means, features.float()])
        return F.cross_entropy(rows @ rows.T / temperature, torch.arange(len(rows), device=rows.device))
