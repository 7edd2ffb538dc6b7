# SPDX-License-Identifier: Apache-2.0
"""Methods with a frozen adapter per task, all of which run at inference."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from onea import seeds
from onea.learner.local_head import local_head, new_adapters, train_with_local_head
from onea.learner.options import AdapterOptions
from onea.learner.tasks import StreamPlan, Task
from onea.research.methods.contract import Method
from onea.runtime import Runtime
from onea.tensors import Tensors, select_prefix
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT
from onea.vit.heads import cosine_scores
from onea.vit.hooks import BlockHooks

_ADAPTERS = "adapters."


def _recipe(rate: float, decay: float, batch: int, alpha: float = 0.1) -> dict[str, Any]:
    return {
        "learning_rate": rate,
        "weight_decay": decay,
        "batch_size": batch,
        "epochs": 20,
        "rank": 64,
        "alpha": alpha,
    }


# EASE's configurations for the ImageNet-21k backbone; alpha is ignored by methods without that option.
PUBLISHED: dict[str, dict[str, Any]] = {
    "cifar100": _recipe(0.025, 5e-4, 48),
    "cub200": _recipe(0.008, 5e-4, 32, alpha=0.05),
    "imagenet-a": _recipe(0.05, 5e-3, 32),
    "imagenet-r": _recipe(0.05, 5e-3, 16),
    "": _recipe(0.05, 5e-3, 16),
}


class AdapterBank(Method):
    """A frozen adapter per task, each with its own forward pass."""

    trains = "an adapter per task"
    Options = AdapterOptions
    paper_presets: ClassVar = PUBLISHED
    options: AdapterOptions

    def __init__(self, vit: FrozenViT, options: AdapterOptions, runtime: Runtime, plan: StreamPlan | None = None):
        super().__init__(vit, options, runtime, plan)
        self.adapters = nn.ModuleList().eval()
        self.sizes: list[int] = []

    @classmethod
    def forward_passes(cls, options: Any, tasks: int) -> float:
        """One for each adapter."""
        return cls.adapters_used(options, tasks)

    @classmethod
    def adapters_used(cls, options: Any, tasks: int) -> int:
        """One for each task."""
        return tasks

    @property
    def bank(self) -> list[Adapters]:
        """The adapters in the order of their tasks."""
        return cast("list[Adapters]", list(self.adapters))

    @property
    def ranges(self) -> list[range]:
        """The classes of each task, as positions."""
        return [range(start, stop) for start, stop in pairwise([0, *accumulate(self.sizes)])]

    def add_adapter(self, task: Task) -> dict[str, Any]:
        """Train a new adapter with a local head on a task and freeze it.

        A task of one class has a constant loss: its adapter remains the identity.
        """
        options = self.options
        adapters = self._new_adapters(seeds.generator(task.seed, task.index, "adapter"))
        head = local_head(self.vit.width, task, options.head, options.head_scale)
        recipe = options.recipe(epochs=self.epochs_for(task))
        losses = train_with_local_head(self.vit, adapters, head, task, recipe, self.runtime)
        self._append(adapters, len(task.classes))
        return {"epochs": recipe.epochs, "losses": losses}

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The adapters, each frozen after its task."""
        return {f"adapter {index}": adapters for index, adapters in enumerate(self.bank)}

    def state_dict(self) -> Tensors:
        """All adapters and the sizes of their tasks."""
        saved = self.adapters.state_dict(prefix=_ADAPTERS)
        return {**saved, "sizes": torch.tensor(self.sizes, dtype=torch.int64)}

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state."""
        self.adapters, self.sizes = nn.ModuleList().eval(), []
        for size in state["sizes"].tolist():
            self._append(self._new_adapters(torch.Generator()), size)
        self.adapters.load_state_dict(select_prefix(_ADAPTERS, state))

    def _new_adapters(self, generator: torch.Generator) -> Adapters:
        return new_adapters(self.vit, self.options, generator)

    def _append(self, adapters: Adapters, classes: int) -> None:
        self.adapters.append(adapters.requires_grad_(False).eval().to(self.runtime.device))
        self.sizes.append(classes)


class PerTaskAdapter(AdapterBank):
    """Nearest class mean, where each class is compared in the features of its own task's adapter.

    Scores are cosines rather than softmax probabilities within a task, because the probability in a task of one class
    is always 1. The cosines of different adapters are compared without calibration.
    """

    title = "Per-task adapter"
    paper = "https://arxiv.org/abs/2603.10237"
    stores = "an adapter per task, a prototype per class"
    base_learning_rate = 0.0084

    def __init__(self, vit: FrozenViT, options: AdapterOptions, runtime: Runtime, plan: StreamPlan | None = None):
        super().__init__(vit, options, runtime, plan)
        self.prototypes = torch.empty(0, vit.width, device=runtime.device)

    def learn(self, task: Task) -> dict[str, Any]:
        """Train the task's adapter and compute the means of its classes with it."""
        report = self.add_adapter(task)
        self.runtime.progress.note("prototypes")
        self.prototypes = torch.cat([self.prototypes, self.compute_prototypes(task, self.bank[-1])])
        return report

    def scores_from_features(self, features: Mapping[str, Tensor]) -> Tensor:
        """Cosine of the features of each adapter to the prototypes of its task."""
        prototypes = self.prototypes.split(self.sizes)
        pairs = zip((features[name] for name in self.cacheable_modules()), prototypes, strict=True)
        return torch.cat([cosine_scores(*pair) for pair in pairs], dim=1)

    def state_dict(self) -> Tensors:
        """All adapters and prototypes."""
        return {**super().state_dict(), "prototypes": self.prototypes}

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state."""
        super().load_state_dict(state)
        self.prototypes = state["prototypes"].to(self.runtime.device)
