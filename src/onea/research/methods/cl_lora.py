# SPDX-License-Identifier: Apache-2.0
"""CL-LoRA: task-shared LoRA in the first half of the network, task-specific LoRA in the second half."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from onea import seeds
from onea.learner.local_head import local_head
from onea.learner.optimisation import Loss, ParamGroup, train
from onea.learner.options import TrainingOptions
from onea.learner.tasks import Task
from onea.research.methods.contract import Method
from onea.research.methods.lora import PROJECTIONS, LowRank, LowRankUpdates, SummedUpdates, check_rank
from onea.research.methods.presets import published
from onea.schema import Positive
from onea.tensors import Tensors
from onea.vit.heads import cosine_scores

_PROJECTIONS = ("q", "v")  # CL-LoRA does not update the keys
_DISTILLATION_STEP = 0  # the first of the two optimiser steps per batch


@dataclass(frozen=True)
class CLLoRAOptions(TrainingOptions):
    """Options of CL-LoRA.

    Attributes:
        rank: rank of each update.
        head_scale: initial scale of the local cosine head, which is discarded after the task.
        distillation: weight of the knowledge distillation from the shared updates of the previous task.
        temperature: temperature of the knowledge distillation.
        orthogonality: weight of the loss that makes the block weights of a task orthogonal to those of earlier tasks.
    """

    learning_rate: float = 0.05
    weight_decay: float = 5e-4
    batch_size: int = 32
    epochs: int = 20
    rank: int = 10
    head_scale: float = 1.0
    distillation: float = 5.0
    temperature: Positive = 2.0
    orthogonality: float = 1e-4


class CLLoRA(Method):
    """Scores are cosines to the prototypes of each task, in the features of that task's specific updates."""

    title = "CL-LoRA"
    paper = "https://arxiv.org/abs/2505.24816"
    trains = "low-rank updates of queries and values: shared ones, and new ones per task"
    stores = "shared updates, updates and block weights per task, and a prototype per class"
    state = ("shared", "specific", "prototypes", "sizes")
    adapter_per_task = True
    Options = CLLoRAOptions
    base_learning_rate = 0.0078
    paper_presets: ClassVar = {
        "cifar100": published(30, 0.03, 64, 1e-4, rank=8),
        "imagenet-a": published(25, 0.05, 32, 5e-3, rank=10),
        "imagenet-r": published(20, 0.05, 32, rank=10),
        # Not published: the settings of ImageNet-R.
        "cub200": published(20, 0.05, 32, rank=10),
        "": published(20, 0.05, 32, rank=10),
    }
    auto_preset: ClassVar = {"rank": 8}
    options: CLLoRAOptions

    def setup(self) -> None:
        """Create the shared updates, and empty lists of specific updates and prototypes."""
        check_rank(self.options.rank, self.vit)
        self.half = self.vit.depth - self.vit.depth // 2  # blocks with shared updates; includes a middle block
        self.shared = self.new_shared(torch.Generator())
        self.specific: list[LowRankUpdates] = []
        self.prototypes = torch.empty(0, self.vit.width, device=self.runtime.device)
        self.sizes = torch.empty(0, dtype=torch.int64, device=self.runtime.device)  # classes of each task

    @classmethod
    def forward_passes(cls, options: Any, tasks: int) -> float:
        """The first half of the network runs once, the second half once per task."""
        return 0.5 + 0.5 * tasks

    def learn(self, task: Task) -> dict[str, Any]:
        """Train the shared updates further and new specific ones, then compute the prototypes of the task."""
        teacher = copy.deepcopy(self.shared).requires_grad_(False) if self.specific else None
        if not self.specific:
            self.shared = self.new_shared(seeds.generator(task.seed, task.index, "shared"))
        shared = self.shared
        specific = self.new_specific(seeds.generator(task.seed, task.index, "specific"))
        hooks = SummedUpdates(shared, specific)
        head = local_head(self.vit.width, task, "cosine", self.options.head_scale).to(self.runtime.device)
        earlier = [past.gains.detach() for past in self.specific if past.gains is not None]

        def distillation_loss(images: Tensor, labels: Tensor) -> Tensor:
            # Early exit: features after the shared half, classified by the current head. As published, the targets are
            # not detached: both sides train the head, only the student side trains the shared updates.
            assert teacher is not None
            student_logits = head(self.early_features(images, shared))
            # Detached rather than under no_grad, in which a GPU would sum tokens in another precision.
            before = self.early_features(images, teacher).detach()
            return self.options.distillation * distillation(student_logits, head(before), self.options.temperature)

        def classification_loss(images: Tensor, labels: Tensor) -> Tensor:
            logits = head(self.vit(images, hooks)).float()
            loss = F.cross_entropy(logits, labels - task.classes.start)
            assert specific.gains is not None
            return loss + self.options.orthogonality * overlap(specific.gains, earlier) if earlier else loss

        # Two steps per batch: distillation, then cross-entropy with a new forward pass. The official code builds both
        # graphs before the first step changes the weights.
        losses: list[Loss] = [distillation_loss, classification_loss] if teacher else [classification_loss]
        weights_of_rows = [row_weights(up) for up in teacher.ups()] if teacher else []

        def reassign_gradients(step: int) -> None:
            if weights_of_rows and step == _DISTILLATION_STEP:
                for up, weights in zip(shared.ups(), weights_of_rows, strict=True):
                    if up.grad is not None:
                        up.grad.mul_(weights[:, None])

        recipe = self.recipe(task)
        trained = [ParamGroup(shared), ParamGroup(specific), ParamGroup(head)]
        mean_losses = train(trained, losses, task, recipe, self.runtime, before_step=reassign_gradients)
        self.runtime.progress.start_phase("prototypes")
        self.specific.append(specific)
        self.prototypes = torch.cat([self.prototypes, self.compute_prototypes(task, hooks)])
        self.sizes = torch.cat([self.sizes, self.sizes.new_tensor([len(task.classes)])])
        return {"epochs": recipe.epochs, "losses": mean_losses, "without_gradient": len(task.classes) == 1}

    def new_shared(self, generator: torch.Generator) -> LowRankUpdates:
        """Updates of the first half, whose down-projections are random, orthonormal and frozen."""
        return self._updates(range(self.half), generator, trains_down=False, gains=None)

    def new_specific(self, generator: torch.Generator) -> LowRankUpdates:
        """Task-specific updates of the second half and their block weights (mu), all of which are trained."""
        blocks = range(self.half, self.vit.depth)
        gains = torch.empty(len(PROJECTIONS), len(blocks)).uniform_(0.5, 1.5, generator=generator)
        return self._updates(blocks, generator, trains_down=True, gains=gains)

    def early_features(self, images: Tensor, shared: LowRankUpdates) -> Tensor:
        """Features after the shared half of the network."""
        return self.vit.features(self.vit.forward_blocks(self.vit.embed(images), shared, stop=self.half))

    def scores(self, images: Tensor) -> Tensor:
        """Cosines to the prototypes of each task, in the features of that task."""
        with torch.no_grad(), self.runtime.autocast():
            tokens = self.vit.forward_blocks(self.vit.embed(images), self.shared, stop=self.half)
            features = (
                self.vit.features(self.vit.forward_blocks(tokens, specific, start=self.half))
                for specific in self.specific
            )
            pairs = zip(features, self.prototypes.split(self.sizes.tolist()), strict=True)
            return torch.cat([cosine_scores(*pair) for pair in pairs], dim=1)

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state of any number of tasks."""
        self.specific = [self.new_specific(torch.Generator()) for _ in state["sizes"]]
        super().load_state_dict(state)

    def _updates(
        self, blocks: range, generator: torch.Generator, *, trains_down: bool, gains: Tensor | None
    ) -> LowRankUpdates:
        width, rank = self.vit.width, self.options.rank
        updates = [
            {name: LowRank(orthonormal_rows(rank, width, generator), trains_down=trains_down) for name in _PROJECTIONS}
            for _ in blocks
        ]
        return LowRankUpdates(updates, blocks.start, gains).eval().to(self.runtime.device)


def orthonormal_rows(rank: int, width: int, generator: torch.Generator) -> Tensor:
    """A random matrix ``[rank, width]`` with orthonormal rows, from the QR decomposition of uniform numbers."""
    columns: Tensor = torch.linalg.qr(torch.rand(width, rank, generator=generator))[0]
    return columns.T.contiguous()


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Cross-entropy between softened predictions of teacher and student, without the usual factor of T squared."""
    targets = F.softmax(teacher.float() / temperature, dim=1)
    return F.cross_entropy(student.float() / temperature, targets)


def row_weights(up: Tensor) -> Tensor:
    """Gradient reassignment: factor on the gradient of each row of an up-projection, 1 on average.

    >>> row_weights(torch.tensor([[3.0, 4.0], [0.0, 15.0]])), row_weights(torch.zeros(2, 2))
    (tensor([0.5000, 1.5000]), tensor([1., 1.]))
    """
    norms = up.detach().norm(dim=1)
    total = norms.sum()
    # All zero after a first task of one class, which has no gradient: equal weights.
    return torch.where(total > 0, len(norms) * norms / total.clamp_min(torch.finfo(up.dtype).tiny), 1.0)


def overlap(gains: Tensor, earlier: list[Tensor]) -> Tensor:
    """Mean absolute cosine between a task's block weights and those of each earlier task."""
    past = torch.stack([weights.flatten() for weights in earlier])
    return F.cosine_similarity(past, gains.flatten()[None], dim=1).abs().mean()
