# SPDX-License-Identifier: Apache-2.0
"""MACIL: a low-rank update per task, folded into the sum of all, that preserves distances within each new class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import seeds
from onea.learner.optimisation import ParamGroup, train
from onea.learner.tasks import Task
from onea.research.methods.cosface import MeanShiftMethod, MeanShiftOptions
from onea.research.methods.lora import FoldedUpdates, LowRank, LowRankUpdates, SummedUpdates, check_rank
from onea.research.methods.presets import published
from onea.schema import Count, NotNegative, Positive
from onea.tensors import to_float64
from onea.vit.heads import GrowingCosineHead, class_means
from onea.vit.hooks import BlockHooks

_PROJECTIONS = ("k", "v")  # MACIL does not update the queries
_SHRINKAGE = 10.0  # weight of the mean variance and of the mean covariance in the metric of a class
_RIDGE, _METRIC_RIDGE, _LEAST_SQUARE = 1e-3, 1e-6, 1e-8  # of the covariance, its inverse, and squared distances
_LEAST_NORM = 1e-7


@dataclass(frozen=True)
class MACILOptions(MeanShiftOptions):
    """Options of MACIL.

    Attributes:
        rank: rank of the update of each task.
        covariance_weight: weight of the loss that preserves Mahalanobis distances within each class of a task.
        patch_weight: weight of the distillation of patch tokens.
        alignment_temperature: temperature of the normalised logits in the alignment.
    """

    weight_decay: NotNegative = 0.0
    rank: Count = 32
    covariance_weight: NotNegative = 1.0
    patch_weight: NotNegative = 0.4
    alignment_temperature: Positive = 0.1


_PUBLISHED = published(20, 0.01, 48, 0.0, later_share=0.5, rank=32)


class MACIL(MeanShiftMethod):
    """Mahalanobis-anchored learning: keys and values use ``W + sum of B_t A_t``. Inference takes one forward pass.

    From the second task on, the network before the task is the teacher of two losses. They and CosFace have no gradient
    in a task of one class, whose update remains zero.
    """

    title = "MACIL"
    paper = "https://arxiv.org/abs/2502.07560"
    trains = "a low-rank update of keys and values per task, and a cosine head"
    stores = "folded updates, a cosine head and a Gaussian per class"
    state = ("folded", *MeanShiftMethod.state)
    Options = MACILOptions
    base_learning_rate = 0.01
    paper_presets: ClassVar = dict.fromkeys(("cifar100", "cub200", "imagenet-a", "imagenet-r", ""), _PUBLISHED)
    auto_preset: ClassVar = {"weight_decay": 0.0, "rank": 32}
    options: MACILOptions

    def setup(self) -> None:
        """Create updates of zero, and a head and Gaussians without classes."""
        super().setup()
        check_rank(self.options.rank, self.vit)
        self.folded = FoldedUpdates(self.vit.depth, self.vit.width, _PROJECTIONS).to(self.runtime.device)

    def hooks(self) -> FoldedUpdates:
        """The sum of the updates of all tasks."""
        return self.folded

    def fine_tune(self, task: Task, rows: GrowingCosineHead) -> list[float]:
        """Train a new update with the new rows of the head, and fold it."""
        updates = self.new_updates(task)
        hooks = SummedUpdates(self.folded, updates)
        has_teacher = len(self.gaussians) and (self.options.covariance_weight or self.options.patch_weight)
        train_updates = self._distil if has_teacher else self.train_by_cosface
        losses = train_updates(hooks, rows, task)
        self.folded.fold(updates)
        return losses

    def new_updates(self, task: Task) -> LowRankUpdates:
        """Updates of all blocks, initialised as zero with random down-projections."""
        width, generator = self.vit.width, seeds.generator(task.seed, task.index, "updates")

        def down() -> Tensor:
            bound = width**-0.5  # Kaiming-uniform with a = sqrt(5)
            return torch.empty(self.options.rank, width).uniform_(-bound, bound, generator=generator)

        blocks = [{name: LowRank(down(), trains_down=True) for name in _PROJECTIONS} for _ in range(self.vit.depth)]
        return LowRankUpdates(blocks).to(self.runtime.device)

    def alignment_head(self) -> nn.Module:
        """The head with normalised logits."""
        return TaskNormalisedHead(self.head, self.sizes.tolist(), self.options.alignment_temperature)

    def _distil(self, hooks: SummedUpdates, rows: GrowingCosineHead, task: Task) -> list[float]:
        """Train with the network before the task as the teacher, in a second forward pass."""
        options, prefix = self.options, self.vit.vit.num_prefix_tokens
        student, teacher = TokenRecorder(hooks), TokenRecorder(self.folded)
        metrics = class_metrics(self.whole_image_features(task, self.folded), task.labels, task.classes)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            features = self.vit(images, student)
            # Without parameters to train there is no graph. Not under no_grad, in which a GPU would sum tokens in
            # another precision.
            before = self.vit(images, teacher)
            covariance = covariance_loss(features, before, labels - task.classes.start, metrics)
            patches = patch_loss(student.recorded[:, prefix:], teacher.recorded[:, prefix:], features)
            classification = self.classification_loss(features, labels, rows, task)
            return classification + options.covariance_weight * covariance + options.patch_weight * patches

        return train([ParamGroup(hooks), ParamGroup(rows)], loss, task, self.recipe(task), self.runtime)


class TokenRecorder(BlockHooks):
    """Runs updates, and records all tokens after the final norm, ``[B, N, width]``."""

    compilable = True  # the tokens are outputs of the forward pass

    def __init__(self, updates: SummedUpdates | FoldedUpdates):
        self.updates = updates
        self.recorded = torch.empty(0)

    def qkv_update(self, block: int, h: Tensor) -> Tensor | None:
        """The updates of a block."""
        return self.updates.qkv_update(block, h)

    def pool(self, x: Tensor) -> None:
        """Record the tokens; the feature is the default one."""
        self.recorded = x


class TaskNormalisedHead(nn.Module):
    """A head whose logits are divided by a temperature and by their norm: the mean of the norms within each task."""

    def __init__(self, head: nn.Module, sizes: list[int], temperature: float):
        super().__init__()
        self.head, self.sizes, self.temperature = head, sizes, temperature

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``[B, classes seen]``."""
        logits: Tensor = self.head(features)
        norms = torch.stack([part.norm(dim=1) for part in logits.split(self.sizes, dim=1)])
        return logits / (self.temperature * norms.mean(0).clamp_min(_LEAST_NORM)[:, None])


def class_metrics(features: Tensor, labels: Tensor, classes: range) -> Tensor:
    """Factors ``L`` of the metric ``M = L L^T`` of each class, ``[classes, width, width]``.

    The metric is the inverse of the shrunk covariance ``S + 10 v I + 10 c (1 - I)``, where v is the mean variance and c
    the mean of the other entries of S. It is positive definite for every covariance, also of a single image.
    """
    exact = to_float64(features)
    labels = labels.to(exact.device)
    means = class_means(exact, labels, classes)
    identity = torch.eye(exact.shape[1], dtype=exact.dtype, device=exact.device)
    factors = []
    for position, mean in zip(classes, means, strict=True):
        centred = exact[labels == position] - mean
        covariance = centred.T @ centred / max(len(centred) - 1, 1)
        variance = covariance.diagonal().mean()
        others = (covariance.sum() - covariance.trace()) / max(covariance.numel() - len(covariance), 1)
        shrunk = covariance + _SHRINKAGE * (variance * identity + others * (1 - identity)) + _RIDGE * identity
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(shrunk))
        factors.append(torch.linalg.cholesky(inverse + _METRIC_RIDGE * identity).float())
    return torch.stack(factors).to(features.device)


def covariance_loss(features: Tensor, before: Tensor, labels: Tensor, metrics: Tensor) -> Tensor:
    """Change of the distances between features ``[B, width]`` of the same class, summed over pairs, per image.

    Features are normalised, and their distance is measured by the metric of their class (see ``class_metrics``).
    Labels are counted from the first class of the task.
    """

    def distances(rows: Tensor) -> Tensor:
        # With the factors of all classes: selecting one for each image would copy B matrices.
        whitened = torch.einsum("bd,cde->bce", F.normalize(rows.float(), dim=1), metrics)
        own = whitened[torch.arange(len(rows), device=rows.device), labels]
        return ((own[:, None] - own[None]).square().sum(2) + _LEAST_SQUARE).sqrt()

    with torch.autocast(features.device.type, enabled=False):
        pairs = (labels[:, None] == labels[None, :]).triu(1)
        return ((distances(features) - distances(before)).abs() * pairs).sum() / len(labels)


def patch_loss(patches: Tensor, before: Tensor, features: Tensor) -> Tensor:
    """Mean change of normalised patch tokens ``[B, N, width]``, weighted by their angle to the feature of the image.

    The weight is the angle divided by pi, without gradient.
    """
    with torch.autocast(features.device.type, enabled=False):
        patches, before = patches.float(), before.float()
        cosines = F.cosine_similarity(features.detach().float()[:, None], patches.detach(), dim=2)
        changes = torch.linalg.vector_norm(F.normalize(patches, dim=2) - F.normalize(before, dim=2), dim=2)
        weighted: Tensor = cosines.clamp(-1, 1).acos() / torch.pi * changes
        return weighted.mean()
