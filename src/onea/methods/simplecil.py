# SPDX-License-Identifier: Apache-2.0
"""SimpleCIL: prototypes of the untouched backbone. Trains nothing; the floor that training must beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from onea.methods.contract import Method
from onea.tasks import Task
from onea.tensors import Tensors
from onea.vit.heads import cosine_scores
from onea.vit.plug import NOTHING, Plug


class SimpleCIL(Method):
    """Nearest class mean in the pretrained feature space."""

    title: ClassVar[str] = "SimpleCIL"
    paper: ClassVar[str] = "https://arxiv.org/abs/2303.07338"
    trains: ClassVar[str] = "nothing"
    stores: ClassVar[str] = "a prototype per class"

    prototypes: Tensor | None = None

    def learn(self, task: Task) -> dict[str, Any]:
        """Add the means of the task's classes."""
        new = self.prototypes_of(task)
        self.prototypes = new if self.prototypes is None else torch.cat([self.prototypes, new])
        return {}

    def parts(self) -> dict[str, Plug]:
        """The plain network."""
        return {"plain": NOTHING}

    def scores_from(self, features: Mapping[str, Tensor]) -> Tensor:
        """Cosine to every prototype."""
        assert self.prototypes is not None, "learn a task first"
        return cosine_scores(features["plain"], self.prototypes)

    def state_dict(self) -> Tensors:
        """The prototypes."""
        return {} if self.prototypes is None else {"prototypes": self.prototypes}

    def load_state_dict(self, state: Tensors) -> None:
        """Take the prototypes back."""
        self.prototypes = state["prototypes"].to(self.runtime.device)
