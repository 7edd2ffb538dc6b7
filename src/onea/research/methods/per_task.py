# SPDX-License-Identifier: Apache-2.0
"""Methods that keep the adapter of every task: train a fresh one, freeze it, and run them all at inference."""

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


# EASE's configurations for the ImageNet-21k backbone; alpha is its own, and ignored where there is no such option.
PUBLISHED: dict[str, dict[str, Any]] = {
    "cifar100": _recipe(0.025, 5e-4, 48),
    "cub200": _recipe(0.008, 5e-4, 32, alpha=0.05),
    "imagenet-a": _recipe(0.05, 5e-3, 32),
    "imagenet-r": _recipe(0.05, 5e-3, 16),
    "": _recipe(0.05, 5e-3, 16),
}


class AdapterBank(Method):
    """One frozen adapter per task, in order; a pass through the network for each of them."""

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
        """One for every adapter."""
        return cls.adapters_used(options, tasks)

    @classmethod
    def adapters_used(cls, options: Any, tasks: int) -> int:
        """One for every task."""
        return tasks

    @property
    def bank(self) -> list[Adapters]:
        """The adapters, oldest first."""
        return cast("list[Adapters]", list(self.adapters))

    @property
    def ranges(self) -> list[range]:
        """The label positions of every task learned."""
        return [range(start, stop) for start, stop in pairwise([0, *accumulate(self.sizes)])]

    def add_adapter(self, task: Task) -> dict[str, Any]:
        """Train a fresh adapter with a local head on a task and freeze it; older ones are not touched.

        A task of one class has a constant loss: its adapter stays the identity, and its subspace the plain network's.
        """
        options = self.options
        adapters = self._fresh(seeds.generator(task.seed, task.index, "adapter"))
        head = local_head(self.vit.width, task, options.head, options.head_scale)
        recipe = options.recipe(epochs=self.epochs_for(task))
        losses = train_with_local_head(self.vit, adapters, head, task, recipe, self.runtime)
        self._keep(adapters, len(task.classes))
        return {"epochs": recipe.epochs, "losses": losses}

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The adapters, each frozen once its task was learned."""
        return {f"adapter {index}": adapters for index, adapters in enumerate(self.bank)}

    def state_dict(self) -> Tensors:
        """All adapters and the sizes of their tasks."""
        saved = self.adapters.state_dict(prefix=_ADAPTERS)
        return {**saved, "sizes": torch.tensor(self.sizes, dtype=torch.int64)}

    def load_state_dict(self, state: Tensors) -> None:
        """Rebuild as many adapters as were saved."""
        self.adapters, self.sizes = nn.ModuleList().eval(), []
        for size in state["sizes"].tolist():
            self._keep(self._fresh(torch.Generator()), size)
        self.adapters.load_state_dict(select_prefix(_ADAPTERS, state))

    def _fresh(self, generator: torch.Generator) -> Adapters:
        return new_adapters(self.vit, self.options, generator)

    def _keep(self, adapters: Adapters, classes: int) -> None:
        self.adapters.append(adapters.requires_grad_(False).eval().to(self.runtime.device))
        self.sizes.append(classes)


class PerTaskAdapter(AdapterBank):
    """Every class is judged in the features of its own task's adapter, and the highest cosine wins.

    Cosines, not local softmax confidences: the confidence of a task of one class is always 1, so it would always win.
    Levels of cosines differ between adapters too; they are compared as they are.
    """

    title = "Per-task adapter"
    paper = "https://arxiv.org/abs/2603.10237"
    stores = "an adapter per task, a prototype per class"
    base_learning_rate = 0.0084

    def __init__(self, vit: FrozenViT, options: AdapterOptions, runtime: Runtime, plan: StreamPlan | None = None):
        super().__init__(vit, options, runtime, plan)
        self.prototypes = torch.empty(0, vit.width, device=runtime.device)

    def learn(self, task: Task) -> dict[str, Any]:
        """Train the task's adapter and take the means of its classes under it."""
        report = self.add_adapter(task)
        self.runtime.progress.note("prototypes")
        self.prototypes = torch.cat([self.prototypes, self.compute_prototypes(task, self.bank[-1])])
        return report

    def scores_from_features(self, features: Mapping[str, Tensor]) -> Tensor:
        """Cosine to each prototype of the features under the adapter that made it."""
        own = self.prototypes.split(self.sizes)
        pairs = zip((features[name] for name in self.cacheable_modules()), own, strict=True)
        return torch.cat([cosine_scores(*pair) for pair in pairs], dim=1)

    def state_dict(self) -> Tensors:
        """All adapters and prototypes."""
        return {**super().state_dict(), "prototypes": self.prototypes}

    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a saved state."""
        super().load_state_dict(state)
        self.prototypes = state["prototypes"].to(self.runtime.device)
