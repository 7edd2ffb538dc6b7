# SPDX-License-Identifier: Apache-2.0
"""Per-task adapters: nothing merged, nothing shared. What One-A's single adapter is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from onea.learner.options import AdapterOptions
from onea.learner.tasks import StreamPlan, Task
from onea.research.methods.adapter_bank import AdapterBank
from onea.runtime import Runtime
from onea.tensors import Tensors
from onea.vit.frozen import FrozenViT
from onea.vit.heads import cosine_scores


class PerTaskAdapter(AdapterBank):
    """Every class is judged in the features of its own task's adapter, and the highest cosine wins.

    Cosines, not local softmax confidences: the confidence of a task of one class is always 1, so it would always win.
    Levels of cosines differ between adapters too; they are compared as they are.
    """

    title: ClassVar[str] = "Per-task adapter"
    paper: ClassVar[str] = "https://arxiv.org/abs/2603.10237"
    stores: ClassVar[str] = "an adapter per task, a prototype per class"
    base_learning_rate: ClassVar[float | None] = 0.0084

    def __init__(self, vit: FrozenViT, options: AdapterOptions, runtime: Runtime, plan: StreamPlan | None = None):
        super().__init__(vit, options, runtime, plan)
        self.prototypes = torch.empty(0, vit.width, device=runtime.device)

    def learn(self, task: Task) -> dict[str, Any]:
        """Train the task's adapter and take the means of its classes under it."""
        report = self.add_adapter(task)
        self.runtime.progress.note("prototypes")
        self.prototypes = torch.cat([self.prototypes, self.prototypes_of(task, self.bank[-1])])
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
