# SPDX-License-Identifier: Apache-2.0
"""Training of an adapter with a local head over the classes of one task, which is discarded afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import seeds
from onea.learner.optimisation import Batches, BatchSampler, ParamGroup, Recipe, train
from onea.learner.options import BottleneckOptions
from onea.learner.tasks import Task
from onea.runtime import Runtime
from onea.vit.adapter import Adapters
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.frozen import FrozenViT
from onea.vit.heads import CosineHead, LinearHead
from onea.vit.hooks import BlockHooks

Network = Callable[..., Tensor]  # FrozenViT or its upper blocks: (input, hooks[, patches]) to features


def new_adapters(
    vit: FrozenViT, options: BottleneckOptions, generator: torch.Generator, first_block: int = 0
) -> Adapters:
    """A randomly initialised adapter, which does not change the output of the network."""
    return Adapters(
        vit.depth,
        vit.width,
        options.rank,
        generator=generator,
        scale=options.scale,
        dropout=options.dropout,
        first_block=first_block,
    )


def local_head(width: int, task: Task, kind: str, scale: float = 1.0) -> nn.Module:
    """A randomly initialised head over the classes of a task."""
    return new_head(width, len(task.classes), kind, scale, seeds.generator(task.seed, task.index, "head"))


def new_head(width: int, classes: int, kind: str, scale: float, generator: torch.Generator) -> nn.Module:
    """A randomly initialised linear or cosine head."""
    if kind == "cosine":
        return CosineHead(width, classes, generator, scale)
    return LinearHead(width, classes, generator)


def contrastive_loss(features: Tensor, labels: Tensor, margin: float = 0.07) -> Tensor:
    """Attract images of the same class, and repel those of different classes above a cosine of ``margin`` (Eq. 17).

    ``mean_(i,j same) (1 - cos_ij) + mean_(i,j different) max(0, cos_ij - margin)`` over ordered pairs of the batch. The
    mean over no pairs is zero.
    """
    unit = F.normalize(features.float(), dim=1)
    cosine = unit @ unit.T
    same = labels[:, None] == labels[None, :]
    pairs = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return _masked_mean(1 - cosine, same & pairs) + _masked_mean((cosine - margin).clamp_min(0), ~same)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp_min(1)


def contrastive_weight(classes: int, smallest: float = 0.01, largest: float = 0.1, decay: float = 2.3979) -> float:
    """The weight of the contrastive loss, large for tasks of few classes (Eq. 18).

    >>> [round(contrastive_weight(n), 4) for n in (1, 2, 3, 36)]
    [0.1, 0.0182, 0.0107, 0.01]
    """
    return smallest + (largest - smallest) * math.exp(-decay * (classes - 1))


def class_weights(task: Task, balance: float) -> Tensor:
    """The weight of each class of a task in the loss, ``n^-balance`` for ``n`` images; on average one per image."""
    counts = torch.bincount(task.labels - task.classes.start, minlength=len(task.classes)).double()
    weights = counts.clamp_min(1) ** -balance
    return (weights * (counts.sum() / (weights * counts).sum())).float()


def train_with_local_head(
    network: Network,
    hooks: BlockHooks,
    head: nn.Module,
    task: Task,
    recipe: Recipe,
    runtime: Runtime,
    *,
    contrastive_weight: float = 0.0,
    margin: float = 0.07,
    head_lr_scale: float = 1.0,
    batches: Batches | None = None,
    should_stop: Callable[[], bool] | None = None,
    patch_sampler: BatchSampler | None = None,
    epochs: range | None = None,
    purpose: str = "",
    class_weights: Tensor | None = None,
) -> list[float]:
    """Train hooks, which are a module, together with a local head; returns the mean loss of each epoch.

    The loss is ``(1 - w) cross-entropy + w contrastive`` with ``w = contrastive_weight``, over the classes of the task.

    Args:
        network: computes features of a batch with the hooks.
        hooks: to be trained.
        head: to be trained, over the classes of the task.
        task: the training images.
        recipe: hyper-parameters.
        runtime: device and precision.
        contrastive_weight: weight of the contrastive loss.
        margin: margin of the contrastive loss.
        head_lr_scale: factor on the learning rate of the head.
        batches: inputs of the network, if not random crops of the task's images.
        should_stop: called after each epoch; True ends the training.
        patch_sampler: selects the patches of each image, if not all are used.
        epochs: see ``train``.
        purpose: see ``train``.
        class_weights: weight of each class of the task in the cross-entropy; by default 1.
    """
    assert isinstance(hooks, nn.Module)
    weight = contrastive_weight
    weights = None if class_weights is None else class_weights.to(runtime.device)

    def loss(images: Tensor, labels: Tensor, *sampled: Tensor) -> Tensor:
        features = runtime.processes.gather(network(images, hooks, *sampled), len(labels))
        local = labels - task.classes.start
        total = (1 - weight) * _cross_entropy(head(features).float(), local, weights)
        return total + weight * contrastive_loss(features, labels, margin) if weight else total

    return train(
        [ParamGroup(hooks.to(runtime.device)), ParamGroup(head.to(runtime.device), lr_scale=head_lr_scale)],
        loss,
        task,
        recipe,
        runtime,
        sharded=True,
        batches=batches,
        should_stop=should_stop,
        # Adapters have no random numbers or counters on the host, so that a step can be a CUDA graph.
        capturable=isinstance(hooks, Adapters),
        sampler=patch_sampler,
        epochs=epochs,
        purpose=purpose,
    )


def _cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """The mean over images, each weighted by its class; a weighted mean would undo the weights of a batch."""
    if weights is None:
        return F.cross_entropy(logits, labels)
    return (F.cross_entropy(logits, labels, reduction="none") * weights[labels]).mean()


@dataclass
class EarlyStopping:
    """Stops training after ``patience`` consecutive epochs without a new best accuracy.

    >>> accuracies = iter([0.5, 0.7, 0.7, 0.6, 0.9])
    >>> should_stop = EarlyStopping(2, lambda: next(accuracies))
    >>> [should_stop() for _ in range(4)]
    [False, False, False, True]
    """

    patience: int
    accuracy: Callable[[], float]
    best: float = -1.0
    epochs_without_improvement: int = 0

    def __call__(self) -> bool:
        """Measure the accuracy; returns whether to stop."""
        accuracy = self.accuracy()
        if accuracy > self.best:
            self.best, self.epochs_without_improvement = accuracy, 0
        else:
            self.epochs_without_improvement += 1
        return self.epochs_without_improvement >= self.patience


def local_accuracy(
    network: Network,
    adapters: Adapters,
    head: nn.Module,
    held_out: Task,
    inputs: Callable[[Tensor], Tensor],
    runtime: Runtime,
) -> float:
    """The accuracy of the local head on a task's held-out images; ``inputs`` loads the network inputs of rows."""
    correct = torch.zeros((), device=runtime.device)
    adapters.eval()
    with torch.no_grad(), runtime.autocast():
        for rows, labels in zip(
            held_out.rows.split(EVALUATION_BATCH), held_out.labels.split(EVALUATION_BATCH), strict=True
        ):
            predictions = head(network(inputs(rows), adapters)).argmax(1)
            correct += (predictions == (labels - held_out.classes.start).to(predictions.device)).sum()
    adapters.train()
    # Averaged over the processes of a run, which must all stop at the same epoch despite different rounding.
    return float(runtime.processes.sum(correct)) / (len(held_out) * runtime.processes.count)
