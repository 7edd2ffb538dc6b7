# SPDX-License-Identifier: Apache-2.0
"""The training of an adapter on a task, longer for larger tasks, which all adapter-merging methods share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from torch import nn

from onea import seeds
from onea.errors import OneaError
from onea.learner.fixed_views import FixedViews
from onea.learner.local_head import (
    EarlyStopping,
    Network,
    class_weights,
    contrastive_weight,
    local_accuracy,
    local_head,
    new_adapters,
    train_with_local_head,
)
from onea.learner.optimisation import Batches, BatchSampler
from onea.learner.options import AdapterOptions
from onea.learner.tasks import StreamPlan, Task
from onea.runtime import Runtime
from onea.schema import BelowOne, Range, ZeroToOne
from onea.tensors import Tensors
from onea.vit.adapter import Adapters
from onea.vit.batching import num_kept_patches, sample_patches
from onea.vit.frozen import FrozenViT

Start = Literal["auto", "fresh", "shared", "merged", "first", "previous"]


@dataclass(frozen=True)
class AdapterTraining(AdapterOptions):
    """Options of the training of a task's adapter.

    Attributes:
        head: ``linear`` (the paper) or ``cosine`` (the official code) local head, discarded after the task.
        start: initial weights of a task's adapter: ``fresh`` random ones, ``shared`` random ones (the same for every
            task), the ``merged`` adapter, or the trained adapter of the ``first`` or ``previous`` task; ``auto`` is
            that of the operator's paper.
        epochs: number of epochs for a task of average size (E0).
        epoch_growth: exponent of the number of epochs (beta); 0 is the same number for all tasks.
        contrastive: add the contrastive loss.
        contrastive_min: weight of the contrastive loss for large tasks.
        contrastive_max: weight of the contrastive loss for a single class.
        contrastive_decay: rate at which this weight decreases with the number of classes.
        margin: cosine of different classes below which the contrastive loss is zero.
        adapter_blocks: number of blocks, counted from the last, that have an adapter; 0: all (the paper). Blocks
            below them need no backward pass.
        cached_views: if only the last blocks have an adapter, the number of views of each image that training uses in
            turn: the whole image, then random crops, fixed for the task. The input of these blocks is computed once
            for each view and cached in half precision, in up to half of the free memory and at most 1 GB on the host.
            0 samples new crops in every epoch (the paper).
        patience: stop after this number of epochs without improvement of the local head on the held-out images (see
            ``guard``); 0 never stops early (the paper).
        patch_drop_rate: share of the patches of each image that a training step drops at random; class token and
            registers are kept. Statistics and predictions use all patches. 0 drops none (the paper).
        balance: exponent of the weight of a class of ``n`` images in the loss, ``n^-balance``; 0 weights all images the
            same (the paper), 1 all classes.
        freeze_at: fraction of a task's epochs after which only the adapters of the last ``adapter_blocks`` blocks are
            trained, on ``cached_views`` and with ``patch_drop_rate``. Before that, those of all blocks are trained,
            on new crops with all patches and without early stopping. 0 is off.
    """

    batch_size: int = 128
    epochs: int = 25
    head: Literal["linear", "cosine"] = "linear"
    start: Start = "auto"
    min_epochs: int = 20
    max_epochs: int = 40
    epoch_growth: float = 0.5
    contrastive: bool = True
    contrastive_min: float = 0.01
    contrastive_max: float = 0.1
    contrastive_decay: float = 2.3979
    margin: float = 0.07
    adapter_blocks: Annotated[int, Range(ge=0)] = 0
    cached_views: Annotated[int, Range(ge=0, le=100)] = 4
    patience: Annotated[int, Range(ge=0)] = 0
    patch_drop_rate: BelowOne = 0.0
    balance: ZeroToOne = 0.0
    freeze_at: BelowOne = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_epochs()
        if self.freeze_at and not (self.adapter_blocks and self.cached_views):
            raise OneaError(
                f"freeze_at is {self.freeze_at}: also set adapter_blocks to the number of blocks to train until the "
                "end, and cached_views to the number of views of each image."
            )

    def check_epochs(self) -> None:
        """Refuse bounds that leave no number of epochs."""
        if not 1 <= self.min_epochs <= self.max_epochs:
            raise OneaError(f"min_epochs is {self.min_epochs}; it must lie between 1 and max_epochs {self.max_epochs}.")

    @property
    def training_views(self) -> int:
        """The number of fixed views that training uses in turn; 0 for new crops in every epoch."""
        return self.cached_views if self.adapted_blocks else 0

    @property
    def adapted_blocks(self) -> int:
        """The number of blocks, counted from the last, that have an adapter; 0 is all."""
        return 0 if self.freeze_at else self.adapter_blocks

    def freeze_epoch(self, epochs: int) -> int:
        """The first of a task's epochs in which only the last blocks are trained; 0 without ``freeze_at``."""
        return min(max(round(self.freeze_at * epochs), 1), epochs) if self.freeze_at else 0

    def first_block(self, vit: FrozenViT) -> int:
        """The first block of a network that has an adapter.

        Raises:
            OneaError: the network has fewer than ``adapter_blocks`` blocks.
        """
        if self.adapter_blocks > vit.depth:
            raise OneaError(
                f"adapter_blocks is {self.adapter_blocks}, but '{vit.name}' has {vit.depth} blocks; "
                f"give {vit.depth} or fewer, or 0 for all."
            )
        return vit.depth - (self.adapted_blocks or vit.depth)

    def patch_sampler(self, vit: FrozenViT) -> BatchSampler | None:
        """A sampler of the patches of each image of a batch; None if training uses all patches.

        Raises:
            OneaError: the network needs all patches.
        """
        if not self.patch_drop_rate:
            return None
        if vit.rotary:
            raise OneaError(
                f"patch_drop_rate is {self.patch_drop_rate}, but '{vit.name}' uses rotary position "
                "embeddings, which need all patches; set it to 0."
            )
        patches = vit.tokens - vit.vit.num_prefix_tokens
        return partial(sample_patches, num_kept_patches(patches, self.patch_drop_rate), patches)


@dataclass(frozen=True)
class TrainedAdapter:
    """A task's adapter after training.

    Attributes:
        tensors: weights of the adapter.
        report: report on the training, for JSON.
        head: local head; None for a cached adapter.
    """

    tensors: Tensors
    report: dict[str, Any]
    head: nn.Module | None = None


def initial_adapters(vit: FrozenViT, options: AdapterTraining, seed: int, task: int = 0) -> Adapters:
    """A randomly initialised adapter, which does not change the output of the network."""
    options.patch_sampler(vit)  # refuse unsuitable networks now, not at the first step
    return new_adapters(vit, options, seeds.generator(seed, task, "adapter"), options.first_block(vit))


def train_adapter(
    vit: FrozenViT,
    adapters: Adapters,
    task: Task,
    options: AdapterTraining,
    runtime: Runtime,
    plan: StreamPlan | None,
    views: FixedViews | None = None,
    held_out: Task | None = None,
    head: nn.Module | None = None,
) -> TrainedAdapter:
    """Train an adapter with a local head on a task, starting from its current weights.

    ``views`` are fixed views of all its images, including those held out, if computed already. ``held_out`` is the task
    with its held-out images, for early stopping. ``head`` is the initial local head, if it is not that of the options.
    """
    classes = len(task.classes)
    recipe = options.recipe(epochs=options.epochs_for(classes, plan))
    decay = options.contrastive_min, options.contrastive_max, options.contrastive_decay
    weight = contrastive_weight(classes, *decay) if options.contrastive else 0.0
    head = head or local_head(vit.width, task, options.head, options.head_scale)
    fit = partial(
        train_with_local_head,
        head=head,
        task=task,
        recipe=recipe,
        runtime=runtime,
        contrastive_weight=weight,
        margin=options.margin,
        class_weights=class_weights(task, options.balance) if options.balance else None,
    )
    network: Network = vit
    batches: Batches | None = None
    inputs, trained = task.images.test_views, adapters
    if count := options.training_views:
        views = views or FixedViews.sample(vit, runtime, task, count, options.crop_scale, adapters)
        network, inputs = vit.forward_from_block, views.test_views
        batches = views.batches(task, recipe.batch_size, count)
    should_stop = None
    if options.patience and held_out is not None and len(held_out):
        accuracy = partial(local_accuracy, network, adapters, head, held_out, inputs, runtime)
        should_stop = EarlyStopping(options.patience, accuracy)
    epochs, freeze_epoch = range(recipe.epochs), options.freeze_epoch(recipe.epochs)
    losses = fit(vit, adapters, epochs=epochs[:freeze_epoch]) if freeze_epoch else []
    if freeze_epoch and epochs[freeze_epoch:]:
        block, count = vit.depth - options.adapter_blocks, options.cached_views
        frozen = adapters.frozen_copy().to(runtime.device)
        views = FixedViews.sample(vit, runtime, task, count, options.crop_scale, frozen, block)
        network, batches = vit.forward_from_block, views.batches(task, recipe.batch_size, count)
        trained = adapters.from_block(block)
    if epochs[freeze_epoch:]:
        losses += fit(
            network,
            trained,
            batches=batches,
            should_stop=should_stop,
            patch_sampler=options.patch_sampler(vit),
            epochs=epochs[freeze_epoch:],
            purpose="last blocks" if freeze_epoch else "",
        )
    tensors = {name: value.detach().clone() for name, value in adapters.state_dict().items()}
    return TrainedAdapter(tensors, {"epochs": len(losses), "contrastive_share": weight, "losses": losses}, head)
