# SPDX-License-Identifier: Apache-2.0
"""ACMap: the mean of the adapters of the first tasks, and centroid prototype mapping for old classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from onea import seeds
from onea.learner.options import AdapterOptions
from onea.learner.tasks import Task
from onea.merging.average import RunningMean
from onea.merging.operator import Sizes
from onea.research.methods.contract import Method
from onea.research.methods.ease import PUBLISHED
from onea.schema import Count
from onea.tensors import Tensors
from onea.vit.adapter import Adapters
from onea.vit.heads import cosine_scores
from onea.vit.hooks import NO_HOOKS, BlockHooks


@dataclass(frozen=True)
class ACMapOptions(AdapterOptions):
    """Options of ACMap.

    Attributes:
        limit: number of adapters that are merged; later tasks train none and only add prototypes.
        acmap_map_at_limit: map old prototypes also in the last task whose adapter is merged. Off reproduces the
            official code, which does not update the prototypes after the last merge.
        acmap_test_dropout: keep dropout on at inference, which the official code does unintentionally.
    """

    limit: Count = 10
    acmap_map_at_limit: bool = True
    acmap_test_dropout: bool = False


class ACMap(Method):
    """Adapter merging with centroid prototype mapping. Inference takes one forward pass."""

    title = "ACMap"
    paper = "https://arxiv.org/abs/2412.18219"
    trains = "an adapter for each of the first tasks"
    stores = "a merged adapter for each of the first tasks, and two prototypes per class"
    state = ("merged", "sources", "prototypes", "sizes")
    Options = ACMapOptions
    base_learning_rate = 0.016
    paper_presets: ClassVar = {data: recipe | {"limit": 10} for data, recipe in PUBLISHED.items()}
    options: ACMapOptions

    def setup(self) -> None:
        """Create empty lists of adapters, prototypes and tasks."""
        device = self.runtime.device
        self.merged: list[Adapters] = []  # the mean of the adapters of tasks 1..i, for each i up to the limit
        self.sizes = torch.empty(0, 2, dtype=torch.int64, device=device)  # classes and images of each task
        self.sources = torch.empty(0, self.vit.width, device=device)  # prototypes as computed in their own task
        self.prototypes = self.sources  # the same, mapped to the newest merged adapter

    @classmethod
    def epochs_per_task(cls, options: ACMapOptions, sizes: Sequence[int]) -> list[int]:
        """The epochs of the first tasks; later tasks train no adapter."""
        epochs_per_task = super().epochs_per_task(options, sizes)
        return [epochs if task < options.limit else 0 for task, epochs in enumerate(epochs_per_task)]

    def learn(self, task: Task) -> dict[str, Any]:
        """Train and merge an adapter up to the limit, compute the new prototypes and map the old ones."""
        report: dict[str, Any] = {"trained": len(self.merged) < self.options.limit}
        if report["trained"]:
            report |= self._train_and_merge(task)
        self.runtime.progress.start_phase("prototypes")
        current = self.compute_prototypes(task, self.merged[-1])
        if report["trained"] and self._should_map():
            shifts = self._shifts(task, current)
            report["shifts"] = [float(shift.norm()) for shift in shifts]
            # From the original prototypes, so that errors of the mapping do not accumulate.
            self.prototypes = self.sources + shifts.repeat_interleave(self.sizes[:, 0], dim=0)
        self.sources = torch.cat([self.sources, current])
        self.prototypes = torch.cat([self.prototypes, current])
        self.sizes = torch.cat([self.sizes, self.sizes.new_tensor([[len(task.classes), len(task)]])])
        return report

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The newest merged adapter, which does not change once the limit is reached."""
        # With dropout at inference, the features also depend on the task, which determines the random seed.
        dropout = f", dropout of task {len(self.sizes)}" if self.options.acmap_test_dropout else ""
        return {f"merge of {len(self.merged)}{dropout}": self.merged[-1]}

    def scores_from_features(self, features: Mapping[str, Tensor]) -> Tensor:
        """Cosine of the adapted features to every mapped prototype."""
        (adapted,) = features.values()
        return cosine_scores(adapted, self.prototypes)

    def features(self, images: Tensor, hooks: BlockHooks = NO_HOOKS) -> Tensor:
        """Features without gradients; with dropout if the option ``acmap_test_dropout`` is set."""
        if not (self.options.acmap_test_dropout and isinstance(hooks, Adapters)):
            return super().features(images, hooks)
        devices = [self.runtime.device] if self.runtime.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            # A fixed seed, so that equal images get equal predictions.
            torch.manual_seed(seeds.derive(0, len(self.sizes), "test dropout"))
            hooks.train()
            try:
                return super().features(images, hooks)
            finally:
                hooks.eval()

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state of any number of tasks."""
        count = min(len(state["sizes"]), self.options.limit)
        self.merged = [self.new_adapters().requires_grad_(False) for _ in range(count)]
        super().load_state_dict(state)

    def _train_and_merge(self, task: Task) -> dict[str, Any]:
        """Train an adapter and average it with the earlier ones, with equal weights for small and large tasks.

        Initial weight replacement: each later task starts from the trained adapter of the first task.
        """
        adapters = self.new_adapters(task.seed)
        if self.merged:
            adapters.load_state_dict(self.merged[0].state_dict())  # the first mean is the first adapter
        report = self.train_with_local_head(adapters, task)
        if self.merged:
            accumulated, new = dict(self.merged[-1].state_dict()), dict(adapters.state_dict())
            classes, images = self.sizes.sum(0).tolist()
            sizes = Sizes(classes, len(task.classes), images, len(task))
            mean = RunningMean()(accumulated, new, sizes, {"count": torch.tensor(len(self.merged))})
            adapters.load_state_dict(mean.tensors)
        self.merged.append(adapters.requires_grad_(False))
        return report

    def _should_map(self) -> bool:
        """Whether old prototypes are mapped after this merge; without a merge they do not change."""
        return len(self.merged) > 1 and (self.options.acmap_map_at_limit or len(self.merged) < self.options.limit)

    def _shifts(self, task: Task, current: Tensor) -> Tensor:
        """Shift of the centroid of the new classes, from each older merged adapter to the newest.

        The centroid is the mean of the class prototypes, not of all images.
        """
        return current.mean(0) - self.compute_prototypes_per_module(task, self.merged[:-1]).mean(1)
