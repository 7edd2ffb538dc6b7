# SPDX-License-Identifier: Apache-2.0
"""ACMap: the mean of the adapters of the first tasks, and centroid prototype mapping for old classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onea import seeds
from onea.learner.local_head import local_head, new_adapters, train_with_local_head
from onea.learner.options import AdapterOptions
from onea.learner.tasks import StreamPlan, Task
from onea.merging.average import RunningMean
from onea.merging.operator import Sizes
from onea.research.methods.contract import Method
from onea.runtime import Runtime
from onea.schema import Count
from onea.tensors import Tensors, add_prefix, select_prefix
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT
from onea.vit.heads import cosine_scores
from onea.vit.hooks import NO_HOOKS, BlockHooks

_MERGED = "merged."


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


def _recipe(rate: float, batch: int, decay: float) -> dict[str, Any]:
    return {"epochs": 20, "learning_rate": rate, "batch_size": batch, "weight_decay": decay, "rank": 64, "limit": 10}


class ACMap(Method):
    """Adapter merging with centroid prototype mapping. Inference takes one forward pass."""

    title = "ACMap"
    paper = "https://arxiv.org/abs/2412.18219"
    trains = "an adapter for each of the first tasks"
    stores = "a merged adapter for each of the first tasks, two prototypes per class"
    Options = ACMapOptions
    base_learning_rate = 0.1
    paper_presets: ClassVar = {
        "cifar100": _recipe(0.025, 48, 5e-4),
        "cub200": _recipe(0.008, 32, 5e-4),
        "imagenet-a": _recipe(0.05, 32, 5e-3),
        "imagenet-r": _recipe(0.05, 16, 5e-3),
        "": _recipe(0.05, 16, 5e-3),
    }
    options: ACMapOptions

    def __init__(self, vit: FrozenViT, options: ACMapOptions, runtime: Runtime, plan: StreamPlan | None = None):
        super().__init__(vit, options, runtime, plan)
        self.merged = nn.ModuleList()  # the mean of the adapters of tasks 1..i, for each i up to the limit
        self.sizes: list[tuple[int, int]] = []  # classes and images of each task
        self.sources = torch.empty(0, vit.width, device=runtime.device)  # prototypes as computed in their own task
        self.prototypes = self.sources  # the same, mapped to the newest merged adapter

    @classmethod
    def epochs_per_task(cls, options: ACMapOptions, sizes: Sequence[int]) -> list[int]:
        """Only the tasks up to the limit train."""
        planned = super().epochs_per_task(options, sizes)
        return [epochs if task < options.limit else 0 for task, epochs in enumerate(planned)]

    def learn(self, task: Task) -> dict[str, Any]:
        """Train and merge an adapter up to the limit, compute the new prototypes and map the old ones."""
        report: dict[str, Any] = {"trained": len(self.merged) < self.options.limit}
        if report["trained"]:
            trained, report["losses"] = self._train(task)
            self._merge(trained, task)
            report["epochs"] = self.epochs_for(task)
        self.runtime.progress.note("prototypes")
        current = self.compute_prototypes(task, self._merged(-1))
        if report["trained"] and self._is_mapping():
            shifts = self._shifts(task, current)
            report["shifts"] = [float(shift.norm()) for shift in shifts]
            classes = torch.tensor([count for count, _ in self.sizes], device=self.runtime.device)
            # From the original prototypes, so that errors of the mapping do not accumulate.
            self.prototypes = self.sources + shifts.repeat_interleave(classes, dim=0)
        self.sources = torch.cat([self.sources, current])
        self.prototypes = torch.cat([self.prototypes, current])
        self.sizes.append((len(task.classes), len(task)))
        return report

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The newest merged adapter, which does not change once the limit is reached."""
        # Dropout at inference has another random seed in every task, so the features differ.
        dropout = f", dropout of task {len(self.sizes)}" if self.options.acmap_test_dropout else ""
        return {f"merge of {len(self.merged)}{dropout}": self._merged(-1)}

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
            torch.manual_seed(
                seeds.derive(0, len(self.sizes), "test dropout")
            )  # the same prediction for the same images
            hooks.train()
            try:
                return super().features(images, hooks)
            finally:
                hooks.eval()

    def state_dict(self) -> Tensors:
        """The merged adapters, the original and the mapped prototypes, and the sizes of the tasks."""
        return {
            **add_prefix(_MERGED, self.merged.state_dict()),
            "sources": self.sources,
            "prototypes": self.prototypes,
            "sizes": torch.tensor(self.sizes, dtype=torch.int64).reshape(-1, 2),
        }

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state."""
        self.sizes = [(classes, images) for classes, images in state["sizes"].tolist()]
        merged = select_prefix(_MERGED, state)
        self.merged = nn.ModuleList()
        for _ in {name.split(".")[0] for name in merged}:
            self._append(self._new_adapters(seed=0))
        self.merged.load_state_dict(merged)
        self.sources = state["sources"].to(self.runtime.device)
        self.prototypes = state["prototypes"].to(self.runtime.device)

    def _train(self, task: Task) -> tuple[Adapters, list[float]]:
        """Initial weight replacement: each later task starts from the trained adapter of the first task."""
        adapters = self._new_adapters(task.seed)
        if len(self.merged):
            adapters.load_state_dict(self._merged(0).state_dict())  # the first mean is the first adapter
        head = local_head(self.vit.width, task, self.options.head, self.options.head_scale)
        recipe = self.options.recipe(epochs=self.epochs_for(task))
        losses = train_with_local_head(self.vit, adapters, head, task, recipe, self.runtime)
        return adapters, losses

    def _merge(self, trained: Adapters, task: Task) -> None:
        """Average with equal weights, whatever the sizes of the tasks."""
        if len(self.merged):
            accumulated, new = dict(self._merged(-1).state_dict()), dict(trained.state_dict())
            classes, images = (sum(counts) for counts in zip(*self.sizes, strict=True))
            sizes = Sizes(classes, len(task.classes), images, len(task))
            mean = RunningMean()(accumulated, new, sizes, {"count": torch.tensor(len(self.merged))})
            trained.load_state_dict(mean.tensors)
        self._append(trained)

    def _is_mapping(self) -> bool:
        """Whether old prototypes are mapped after this merge; without a merge they do not change."""
        return len(self.merged) > 1 and (self.options.acmap_map_at_limit or len(self.merged) < self.options.limit)

    def _shifts(self, task: Task, current: Tensor) -> Tensor:
        """Shift of the centroid of the new classes, from each older merged adapter to the newest.

        The centroid is the mean of the class prototypes, not of all images.
        """
        older = self.compute_prototypes_per_module(task, [self._merged(index) for index in range(len(self.merged) - 1)])
        return current.mean(0) - older.mean(1)

    def _new_adapters(self, seed: int) -> Adapters:
        return new_adapters(self.vit, self.options, seeds.generator(seed, 0, "adapter"))

    def _append(self, adapters: Adapters) -> None:
        self.merged.append(adapters.requires_grad_(False).eval().to(self.runtime.device))

    def _merged(self, index: int) -> Adapters:
        adapters = self.merged[index]
        assert isinstance(adapters, Adapters)
        return adapters
