# SPDX-License-Identifier: Apache-2.0
"""Train one adapter on one task, longer for larger tasks: the step that every adapter-merging method shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from torch import nn

from onea import seeds
from onea.errors import OneaError
from onea.learner.early_stopping import Patience, share_right
from onea.learner.fixed_views import FixedViews
from onea.learner.local_head import Network, local_head, new_adapters, train_with_local_head
from onea.learner.losses import contrastive_share
from onea.learner.options import AdapterOptions
from onea.learner.tasks import StreamPlan, Task
from onea.learner.training import Batches, Draw
from onea.runtime import Runtime
from onea.schema import BelowOne, Range
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
        start: the weights that a task's adapter is trained from: ``fresh`` random ones, ``shared`` random ones (the
            same for every task), the ``merged`` adapter, or the ``first`` or ``previous`` task's trained adapter;
            ``auto`` is the start that the merge was made for.
        epochs: for a task of average size (E0).
        epoch_growth: exponent of the schedule (beta); 0 trains every task equally long.
        contrastive: add the contrastive term.
        contrastive_min: its weight for large tasks.
        contrastive_max: its weight for a single class.
        contrastive_decay: how fast the weight falls with the number of classes.
        margin: cosine below which different classes are far enough apart.
        adapter_blocks: the number of blocks, counted from the last, that have an adapter; 0 is all (the paper). Blocks
            below them are passed through without a way back.
        cached_views: where only the last blocks have an adapter, the number of views of each image that its training
            takes in turn: the image as it is, then random crops, drawn once for the task. What enters those blocks is
            computed once for each view and kept in half precision, up to 1 GB on the host and half of what is free.
            0 draws new crops in every epoch (the paper).
        patience: the training of a task ends when its head has answered no more of the images held out of it (those of
            the guard) right for so many epochs; 0 never ends early (the paper).
        patch_drop_rate: share of the patches of an image that a training step leaves out, drawn anew for each image;
            class token and registers stay. Statistics and answers see all patches. 0 leaves out none (the paper).
        freeze_at: where it is not 0, all blocks have an adapter; and after this share of a task's epochs only those of
            the last ``adapter_blocks`` go on learning, on ``cached_views`` (however many images there are) and with
            ``patch_drop_rate``. Before, all learn, on new crops with all patches, and ``patience`` is not asked.
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
    freeze_at: BelowOne = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_epochs()
        if self.freeze_at and not (self.adapter_blocks and self.cached_views):
            raise OneaError(
                f"freeze_at is {self.freeze_at}: adapter_blocks must say how many blocks go on learning, "
                "and cached_views on how many views of each image."
            )

    def check_epochs(self) -> None:
        """Refuse bounds that leave no number of epochs."""
        if not 1 <= self.min_epochs <= self.max_epochs:
            raise OneaError(f"min_epochs is {self.min_epochs}; it must lie between 1 and max_epochs {self.max_epochs}.")

    @staticmethod
    def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
        """Options under their present names; earlier versions had ``shared_init`` (true or false) for ``start``."""
        rest = {name: value for name, value in values.items() if name != "shared_init"}
        if "shared_init" in values:
            shared = str(values["shared_init"]).lower() in ("true", "yes", "on", "1")
            rest.setdefault("start", "shared" if shared else "auto")
        return rest

    def contrastive_share(self, classes: int) -> float:
        """Weight of the contrastive term for a task of this many classes."""
        if not self.contrastive:
            return 0.0
        return contrastive_share(classes, self.contrastive_min, self.contrastive_max, self.contrastive_decay)

    @property
    def fixed_views(self) -> int:
        """The number of views that training takes in turn; 0 where it draws new crops."""
        return self.cached_views if self.adapted_blocks else 0

    @property
    def adapted_blocks(self) -> int:
        """The number of blocks, counted from the last, that have an adapter; 0 is all."""
        return 0 if self.freeze_at else self.adapter_blocks

    def frozen_epoch(self, epochs: int) -> int:
        """The first of a task's epochs in which only the last blocks learn; 0 where that does not change."""
        return min(max(round(self.freeze_at * epochs), 1), epochs) if self.freeze_at else 0

    def first_block(self, vit: FrozenViT) -> int:
        """The first block of a network that has an adapter.

        Raises:
            OneaError: the network has fewer blocks than shall have one.
        """
        if self.adapter_blocks > vit.depth:
            raise OneaError(
                f"adapter_blocks is {self.adapter_blocks}, and '{vit.name}' has {vit.depth} blocks; "
                f"give {vit.depth} or less, or 0 for all."
            )
        return vit.depth - (self.adapted_blocks or vit.depth)

    def patches(self, vit: FrozenViT) -> Draw | None:
        """What draws the patches of a network that a step looks at; None where it looks at all.

        Raises:
            OneaError: the network cannot do without some.
        """
        if not self.patch_drop_rate:
            return None
        if vit.rotary:
            raise OneaError(
                f"patch_drop_rate is {self.patch_drop_rate}, and '{vit.name}' has rotary positions, "
                "so its blocks need every patch in its place; give 0."
            )
        patches = vit.tokens - vit.vit.num_prefix_tokens
        return partial(sample_patches, num_kept_patches(patches, self.patch_drop_rate), patches)


@dataclass(frozen=True)
class TrainedAdapter:
    """A task's adapter after training.

    Attributes:
        tensors: the adapter.
        report: a JSON object about the training.
        head: the head that it was trained with, where it was trained here.
    """

    tensors: Tensors
    report: dict[str, Any]
    head: nn.Module | None = None


def blank_adapters(vit: FrozenViT, options: AdapterTraining, seed: int, task: int = 0) -> Adapters:
    """A random adapter, which leaves the network's output as it is."""
    options.patches(vit)  # refuses a network that cannot do without some now, not at the first step
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
) -> TrainedAdapter:
    """Train an adapter with a local head on a task, from the weights that it has.

    Args:
        vit: the frozen network.
        adapters: to train.
        task: whose images are trained on.
        options: how.
        runtime: where to compute.
        plan: of the stream, if there is one.
        views: fixed ones of all its images, held out or not, where somebody has them already.
        held_out: the same task with the images that are held out, which may end the training.
    """
    classes = len(task.classes)
    recipe = options.recipe(epochs=options.epochs_for(classes, plan))
    share = options.contrastive_share(classes)
    head = local_head(vit.width, task, options.head, options.head_scale)
    network: Network = vit
    batches: Batches | None = None
    inputs = task.images.plain
    count = options.fixed_views
    if count:
        views = views or FixedViews.drawn(vit, runtime, task, count, options.crop_scale, adapters)
        network, batches, inputs = vit.forward_from_block, views.batches(task, recipe.batch_size, count), views.plain
    ends = None
    if options.patience and held_out is not None and len(held_out):
        ends = Patience(options.patience, partial(share_right, network, adapters, head, held_out, inputs, runtime))
    fit = partial(
        train_with_local_head,
        head=head,
        task=task,
        recipe=recipe,
        runtime=runtime,
        contrastive_share=share,
        margin=options.margin,
    )
    whole, frozen = range(recipe.epochs), options.frozen_epoch(recipe.epochs)
    losses = fit(vit, adapters, epochs=whole[:frozen]) if frozen else []
    learning = adapters
    if frozen and whole[frozen:]:
        block, count = vit.depth - options.adapter_blocks, options.cached_views
        below = adapters.frozen_copy().to(runtime.device)
        views = FixedViews.drawn(vit, runtime, task, count, options.crop_scale, below, block)
        network, batches = vit.forward_from_block, views.batches(task, recipe.batch_size, count)
        learning = adapters.from_block(block)
    if whole[frozen:]:
        losses += fit(
            network,
            learning,
            batches=batches,
            ends=ends,
            patches=options.patches(vit),
            epochs=whole[frozen:],
            purpose="last blocks" if frozen else "",
        )
    tensors = {name: value.detach().clone() for name, value in adapters.state_dict().items()}
    return TrainedAdapter(tensors, {"epochs": len(losses), "contrastive_share": share, "losses": losses}, head)
