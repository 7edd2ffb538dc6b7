"""Train one fresh adapter on one task: the step that every adapter-merging method shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from onea import seeds
from onea.errors import OneaError
from onea.losses import contrastive, contrastive_share
from onea.merging.operator import Tensors
from onea.runtime import Runtime
from onea.schedules import task_epochs
from onea.tasks import Plan, Task
from onea.training import SGD, train
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT
from onea.vit.heads import CosineHead, LinearHead

_UNPLANNED_CLASSES = 10.0  # classes of a middling task when the stream's length is not known


@dataclass(frozen=True)
class AdapterTraining:
    """How a task's adapter is trained.

    Attributes:
        rank: width of the adapter's bottleneck.
        scale: factor on the adapter's output.
        dropout: inside the adapter, while training.
        head: ``linear`` (the paper) or ``cosine`` (the official code) local head, discarded after the task.
        head_scale: initial scale of a cosine head.
        shared_init: start every task's adapter from the same random weights instead of fresh ones.
        learning_rate: of SGD with momentum 0.9, cosine to zero.
        weight_decay: of SGD.
        batch_size: images per step.
        crop_scale: smallest share of an image's area that a random training crop covers.
        epochs: for a task of average size (E0).
        min_epochs: lower bound of the schedule.
        max_epochs: upper bound of the schedule.
        epoch_growth: exponent of the schedule (beta); 0 trains every task equally long.
        contrastive: add the contrastive term.
        contrastive_min: its weight for large tasks.
        contrastive_max: its weight for a single class.
        contrastive_decay: how fast the weight falls with the number of classes.
        margin: cosine below which different classes are far enough apart.
    """

    rank: int = 64
    scale: float = 0.1
    dropout: float = 0.1
    head: Literal["linear", "cosine"] = "linear"
    head_scale: float = 1.0
    shared_init: bool = False
    learning_rate: float = 0.01
    weight_decay: float = 5e-4
    batch_size: int = 128
    crop_scale: float = 0.05
    epochs: int = 25
    min_epochs: int = 20
    max_epochs: int = 40
    epoch_growth: float = 0.5
    contrastive: bool = True
    contrastive_min: float = 0.01
    contrastive_max: float = 0.1
    contrastive_decay: float = 2.3979
    margin: float = 0.07

    def __post_init__(self) -> None:
        for name in ("rank", "batch_size", "epochs", "min_epochs", "max_epochs"):
            if getattr(self, name) < 1:
                raise OneaError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.min_epochs > self.max_epochs:
            raise OneaError(f"min_epochs ({self.min_epochs}) exceeds max_epochs ({self.max_epochs}); swap them.")
        if not 0 < self.crop_scale <= 1:
            raise OneaError(f"crop_scale is {self.crop_scale}; it must lie in (0, 1].")
        if not 0 <= self.dropout < 1:
            raise OneaError(f"dropout is {self.dropout}; it must lie in [0, 1).")

    def epochs_for(self, classes: int, plan: Plan | None) -> int:
        """Epochs for a task of this many classes."""
        average = plan.classes / plan.tasks if plan else _UNPLANNED_CLASSES
        return task_epochs(classes, self.epochs, average, self.min_epochs, self.max_epochs, self.epoch_growth)

    def contrastive_share(self, classes: int) -> float:
        """Weight of the contrastive term for a task of this many classes."""
        if not self.contrastive:
            return 0.0
        return contrastive_share(classes, self.contrastive_min, self.contrastive_max, self.contrastive_decay)


@dataclass(frozen=True)
class TrainedAdapter:
    """A task's adapter after training, and what to record of it."""

    tensors: Tensors
    report: dict[str, Any]


def blank_adapters(vit: FrozenViT, options: AdapterTraining, seed: int, task: int) -> Adapters:
    """A fresh adapter; it leaves the network's output exactly as it was."""
    return Adapters(
        vit.depth,
        vit.width,
        options.rank,
        generator=seeds.generator(seed, 0 if options.shared_init else task, "adapter"),
        scale=options.scale,
        dropout=options.dropout,
    )


def train_adapter(
    vit: FrozenViT, task: Task, options: AdapterTraining, runtime: Runtime, plan: Plan | None
) -> TrainedAdapter:
    """Train a fresh adapter with a local head on a task; the head is thrown away."""
    adapters = blank_adapters(vit, options, task.seed, task.index).to(runtime.device)
    head = _head(vit.width, task, options).to(runtime.device)
    share = options.contrastive_share(len(task.classes))

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        features = vit(images, adapters)
        total = (1 - share) * F.cross_entropy(head(features).float(), labels - task.classes.start)
        return total + share * contrastive(features, labels, options.margin) if share else total

    epochs = options.epochs_for(len(task.classes), plan)
    recipe = SGD(options.learning_rate, options.weight_decay, options.batch_size, epochs, options.crop_scale)
    losses = train([adapters, head], loss, task, recipe, runtime)
    tensors = {name: value.detach().clone() for name, value in adapters.state_dict().items()}
    return TrainedAdapter(tensors, {"epochs": epochs, "contrastive_share": share, "losses": losses})


def _head(width: int, task: Task, options: AdapterTraining) -> nn.Module:
    generator = seeds.generator(task.seed, task.index, "head")
    if options.head == "cosine":
        return CosineHead(width, len(task.classes), generator, options.head_scale)
    return LinearHead(width, len(task.classes), generator)
