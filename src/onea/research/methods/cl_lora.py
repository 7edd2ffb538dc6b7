# SPDX-License-Identifier: Apache-2.0
"""CL-LoRA: task-shared LoRA in the first half of the network, task-specific LoRA in the second half."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import seeds
from onea.learner.local_head import local_head
from onea.learner.options import TrainingOptions
from onea.learner.tasks import StreamPlan, Task
from onea.learner.training import Loss, ParamGroup, train
from onea.research.methods.contract import Method
from onea.research.methods.lora import PROJECTIONS, LowRank, LowRankUpdates, SummedUpdates, check_rank
from onea.runtime import Runtime
from onea.schema import Positive
from onea.tensors import Tensors
from onea.vit.frozen import FrozenViT
from onea.vit.heads import cosine_scores

_PROJECTIONS = ("q", "v")  # CL-LoRA does not update the keys
_KD_STEP = 0  # the first of the two optimiser steps per batch


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


def _recipe(epochs: int, rate: float, batch: int, decay: float, rank: int) -> dict[str, Any]:
    return {"epochs": epochs, "learning_rate": rate, "batch_size": batch, "weight_decay": decay, "rank": rank}


class CLLoRA(Method):
    """Scores are cosines to the prototypes of each task, in the features of that task's specific updates."""

    title = "CL-LoRA"
    paper = "https://arxiv.org/abs/2505.24816"
    trains = "low-rank updates of queries and values: shared ones, and new ones per task"
    stores = "shared updates, updates and block weights per task, a prototype per class"
    Options = CLLoRAOptions
    base_learning_rate = 0.0078
    paper_presets: ClassVar = {
        "cifar100": _recipe(30, 0.03, 64, 1e-4, 8),
        "imagenet-a": _recipe(25, 0.05, 32, 5e-3, 10),
        "imagenet-r": _recipe(20, 0.05, 32, 5e-4, 10),
        # Not published: the settings of ImageNet-R.
        "cub200": _recipe(20, 0.05, 32, 5e-4, 10),
        "": _recipe(20, 0.05, 32, 5e-4, 10),
    }
    auto_preset: ClassVar = {"rank": 8}
    options: CLLoRAOptions

    def __init__(self, vit: FrozenViT, options: CLLoRAOptions, runtime: Runtime, plan: StreamPlan | None = None):
        super().__init__(vit, options, runtime, plan)
        check_rank(options.rank, vit)
        self.half = vit.depth - vit.depth // 2  # a middle block is shared
        self.shared: LowRankUpdates | None = None
        self.specific: list[LowRankUpdates] = []
        self.prototypes: list[Tensor] = []

    @classmethod
    def forward_passes(cls, options: Any, tasks: int) -> float:
        """The first half of the network runs once, the second half once per task."""
        return 0.5 + 0.5 * tasks

    @classmethod
    def adapters_used(cls, options: Any, tasks: int) -> int:
        """One for each task."""
        return tasks

    def learn(self, task: Task) -> dict[str, Any]:
        """Train the shared updates further and new specific ones, then compute the prototypes of the task."""
        teacher = None if self.shared is None else copy.deepcopy(self.shared).requires_grad_(False)
        if self.shared is None:
            self.shared = self.new_shared(seeds.generator(task.seed, task.index, "shared"))
        shared = self.shared
        specific = self.new_specific(seeds.generator(task.seed, task.index, "specific"))
        hooks = SummedUpdates(shared, specific)
        head = local_head(self.vit.width, task, "cosine", self.options.head_scale).to(self.runtime.device)
        earlier = [past.gains.detach() for past in self.specific if past.gains is not None]

        def kd(images: Tensor, labels: Tensor) -> Tensor:
            # Early exit: features after the shared half, classified by the current head. As published the targets are
            # not detached: the head is trained by both sides, the shared updates by the student side only.
            assert teacher is not None
            student_logits = head(self.early_features(images, shared))
            # Detached rather than under no_grad, in which a GPU would sum tokens in another precision.
            before = self.early_features(images, teacher).detach()
            return self.options.distillation * distillation(student_logits, head(before), self.options.temperature)

        def ce(images: Tensor, labels: Tensor) -> Tensor:
            logits = head(self.vit(images, hooks)).float()
            loss = F.cross_entropy(logits, labels - task.classes.start)
            assert specific.gains is not None
            return loss + self.options.orthogonality * overlap(specific.gains, earlier) if earlier else loss

        # Two steps per batch: distillation, then cross-entropy with a new forward pass. The official code builds both
        # graphs before the first step changes the weights.
        losses: list[Loss] = [kd, ce] if teacher else [ce]
        rows = [row_weights(up) for up in teacher.ups()] if teacher else []

        def reassign(step: int) -> None:
            if rows and step == _KD_STEP:
                for up, weights in zip(shared.ups(), rows, strict=True):
                    if up.grad is not None:
                        up.grad.mul_(weights[:, None])

        recipe = self.options.recipe(epochs=self.epochs_for(task))
        trained = [ParamGroup(shared), ParamGroup(specific), ParamGroup(head)]
        means = train(trained, losses, task, recipe, self.runtime, before_step=reassign)
        self.runtime.progress.note("prototypes")
        self.specific.append(specific)
        self.prototypes.append(self.compute_prototypes(task, hooks))
        return {"epochs": recipe.epochs, "losses": means, "without_gradient": len(task.classes) == 1}

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
        assert self.shared is not None, "learn a task first"
        with torch.no_grad(), self.runtime.autocast():
            tokens = self.vit.forward_blocks(self.vit.embed(images), self.shared, stop=self.half)
            return torch.cat(
                [
                    cosine_scores(
                        self.vit.features(self.vit.forward_blocks(tokens, specific, start=self.half)), prototypes
                    )
                    for specific, prototypes in zip(self.specific, self.prototypes, strict=True)
                ],
                dim=1,
            )

    def state_dict(self) -> Tensors:
        """The shared and specific updates, the prototypes and the sizes of the tasks."""
        if self.shared is None:
            return {}
        return {
            **_as_module(self.shared, self.specific).state_dict(),
            "prototypes": torch.cat(self.prototypes),
            "sizes": torch.tensor([len(prototypes) for prototypes in self.prototypes]),
        }

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state."""
        if not state:
            return
        updates = dict(state)
        prototypes, sizes = updates.pop("prototypes"), updates.pop("sizes").tolist()
        overwritten = torch.Generator()  # the random values are replaced by the saved ones
        self.shared = self.new_shared(overwritten)
        self.specific = [self.new_specific(overwritten) for _ in sizes]
        _as_module(self.shared, self.specific).load_state_dict(updates)
        self.prototypes = list(prototypes.to(self.runtime.device).split(sizes))

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
    """Gradient reassignment: factor on the gradient of each row of an up-projection, one on average.

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


def _as_module(shared: LowRankUpdates, specific: list[LowRankUpdates]) -> nn.Module:
    return nn.ModuleDict({"shared": shared, "specific": nn.ModuleList(specific)})
