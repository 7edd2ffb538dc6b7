# SPDX-License-Identifier: Apache-2.0
"""Train something small with a head over the task's own classes, and throw the head away."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import seeds
from onea.learner.losses import contrastive
from onea.learner.options import AdapterOptions
from onea.learner.tasks import Task
from onea.learner.training import Batches, Draw, Recipe, Trained, train
from onea.runtime import Runtime
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT
from onea.vit.heads import CosineHead, LinearHead
from onea.vit.hooks import BlockHooks


def new_adapters(vit: FrozenViT, options: AdapterOptions, generator: torch.Generator, first_block: int = 0) -> Adapters:
    """A fresh adapter; it leaves the network's output exactly as it was."""
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
    """A fresh head over the classes of a task."""
    return new_head(width, len(task.classes), kind, scale, seeds.generator(task.seed, task.index, "head"))


def new_head(width: int, classes: int, kind: str, scale: float, generator: torch.Generator) -> nn.Module:
    """A fresh head over so many classes."""
    if kind == "cosine":
        return CosineHead(width, classes, generator, scale)
    return LinearHead(width, classes, generator)


Network = Callable[..., Tensor]  # FrozenViT, or its upper part: of input, hooks, and patches where these are not all


def train_with_local_head(
    network: Network,
    hooks: BlockHooks,
    head: nn.Module,
    task: Task,
    recipe: Recipe,
    runtime: Runtime,
    *,
    contrastive_share: float = 0.0,
    margin: float = 0.07,
    head_rate: float = 1.0,
    batches: Batches | None = None,
    ends: Callable[[], bool] | None = None,
    patches: Draw | None = None,
    epochs: range | None = None,
    purpose: str = "",
) -> list[float]:
    """Train hooks that are a module together with a local head; returns the mean loss of each epoch.

    The loss is cross-entropy over the task's own classes, of which ``contrastive_share`` goes to the contrastive term.
    The head learns at ``head_rate`` times the rate of the hooks. ``batches`` are what the network gets, if not random
    crops of the task's images, and ``ends`` is asked after each epoch whether to stop there. ``patches`` draws those
    that the network looks at, where these are not all. ``epochs`` and ``purpose`` are those of ``train``.
    """
    assert isinstance(hooks, nn.Module)
    share = contrastive_share

    def loss(images: Tensor, labels: Tensor, *drawn: Tensor) -> Tensor:
        features = runtime.processes.gather(network(images, hooks, *drawn), len(labels))
        total = (1 - share) * F.cross_entropy(head(features).float(), labels - task.classes.start)
        return total + share * contrastive(features, labels, margin) if share else total

    trained = [Trained(hooks.to(runtime.device)), Trained(head.to(runtime.device), rate=head_rate)]
    recordable = isinstance(hooks, Adapters)  # which draw nothing on the host, and keep no count of what they see
    return train(
        trained,
        loss,
        task,
        recipe,
        runtime,
        sharded=True,
        batches=batches,
        ends=ends,
        recordable=recordable,
        draw=patches,
        epochs=epochs,
        purpose=purpose,
    )
