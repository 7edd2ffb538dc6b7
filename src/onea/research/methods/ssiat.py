# SPDX-License-Identifier: Apache-2.0
"""SSIAT: one adapter that is trained further in every task, and shifted Gaussians of old classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from onea.learner.options import BottleneckOptions
from onea.learner.tasks import Task
from onea.research.methods.cosface import MeanShiftMethod, MeanShiftOptions
from onea.research.methods.presets import published
from onea.schema import Positive
from onea.vit.adapter import Adapters
from onea.vit.heads import GrowingCosineHead


@dataclass(frozen=True)
class SSIATOptions(MeanShiftOptions, BottleneckOptions):
    """Options of SSIAT."""

    sigma: Positive = 4.0


def _published(margin: float = 0.0) -> dict[str, Any]:
    return published(20, 0.01, 48, later_share=0.5, rank=64, margin=margin)


class SSIAT(MeanShiftMethod):
    """Semantically shifted incremental adapter tuning. Inference takes one forward pass."""

    title = "SSIAT"
    paper = "https://arxiv.org/abs/2403.19979"
    trains = "one adapter and a cosine head, in every task"
    stores = "one adapter, a cosine head and a Gaussian per class"
    state = ("adapter", *MeanShiftMethod.state)
    Options = SSIATOptions
    base_learning_rate = 0.02
    paper_presets: ClassVar = {
        "cifar100": _published(),
        "imagenet-a": _published(margin=0.3),
        "imagenet-r": _published(),
        # The published configuration is incomplete: the settings of ImageNet-R.
        "cub200": _published(),
        "": _published(),
    }
    options: SSIATOptions

    def setup(self) -> None:
        """Create the adapter, and a head and Gaussians without classes."""
        super().setup()
        self.adapter = self.new_adapters().requires_grad_(False)

    def initialise(self, task: Task) -> None:
        """Initialise the adapter with the seed of the run."""
        self.adapter = self.new_adapters(task.seed).requires_grad_(False)

    def hooks(self) -> Adapters:
        """The adapter."""
        return self.adapter

    def fine_tune(self, task: Task, rows: GrowingCosineHead) -> list[float]:
        """Train the adapter further, with the new rows of the head."""
        losses = self.train_by_cosface(self.adapter.requires_grad_(True), rows, task)
        self.adapter.requires_grad_(False)
        return losses
