# SPDX-License-Identifier: Apache-2.0
"""What SSIAT, MACIL and TUNA share: training by CosFace, and classifier alignment on Gaussians of the classes.

SSIAT and MACIL also share the shift of old class means, which follows the drift of the features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import schedules, seeds
from onea.learner.optimisation import ParamGroup, Schedule, train
from onea.learner.options import TrainingOptions
from onea.learner.tasks import StreamPlan, Task
from onea.research.methods.alignment import Gaussians, align_head
from onea.research.methods.contract import Method
from onea.schema import Count, Fraction, NotNegative, Positive
from onea.tensors import to_float64
from onea.vit.adapter import Adapters
from onea.vit.heads import GrowingCosineHead
from onea.vit.hooks import BlockHooks

Rho = Literal["by-task", "official", "none"]
_ALIGNMENT_DECAY = 5e-4  # weight decay of the alignment, the same in all three papers
_LEAST_WEIGHT = 1e-5  # added to the weight of every image in the mean shift


@dataclass(frozen=True)
class CosFaceOptions(TrainingOptions):
    """Options of training by CosFace and of classifier alignment.

    Attributes:
        later_share: number of epochs of every task but the first, relative to the number that the other options give.
        single_class: how to handle a task of one class, whose loss is constant: ``skip`` the training, or ``train`` as
            in the official code, where only weight decay has an effect. The alignment learns the class in both cases.
        logit_scale: factor on the cosines of the head, in training and in the alignment.
        margin: margin of CosFace, by which the cosine of the correct class is reduced in training.
        alignment_epochs: epochs of classifier alignment, which retrains the head on sampled features after every task
            but the first; 0 turns it off.
        alignment_learning_rate: learning rate of the classifier alignment.
        alignment_samples: features sampled per class and epoch of the alignment, and per step.
        rho: factor on the class means in the alignment: ``by-task`` (0.9 + 0.1 t / T for classes of task t of T),
            ``official`` (the same, with t computed from the size of the newest task, as in the official code, which
            expects tasks of equal size) or ``none``.
    """

    later_share: Fraction = 1.0
    single_class: Literal["skip", "train"] = "skip"
    logit_scale: Positive = 20.0
    margin: NotNegative = 0.0
    alignment_epochs: int = 5
    alignment_learning_rate: NotNegative = 0.01
    alignment_samples: Count = 256
    rho: Rho = "by-task"

    def epochs_of_task(self, task: int, classes: int, plan: StreamPlan | None) -> int:
        """The number of epochs of a task (counted from 0) with this number of classes; 0 if it is not trained."""
        if classes == 1 and self.single_class == "skip":
            return 0
        share = self.later_share if task else 1.0
        return max(1, round(share * self.epochs_for(classes, plan)))


class CosFaceMethod(Method):
    """A cosine head over all classes, whose rows are trained by CosFace with their task and aligned after every task.

    Subclasses define the modules that a task trains (``adapt``), and with which its classes are described by Gaussians
    (``hooks``).

    Attributes:
        jitter: added to the variances of the Gaussians.
        official_rho_sign: sign of the task size in the official computation of rho.
    """

    state: ClassVar[tuple[str, ...]] = ("head", "gaussians", "sizes")
    in_paper = False
    jitter: ClassVar[float] = 1e-3
    official_rho_sign: ClassVar[int] = 1
    options: CosFaceOptions

    def setup(self) -> None:
        """Create a head and Gaussians without classes."""
        width, device = self.vit.width, self.runtime.device
        self.head = self._new_rows()
        self.gaussians = Gaussians(width, jitter=self.jitter, borrows=True, device=device)
        self.sizes = torch.empty(0, dtype=torch.int64, device=device)  # classes of each task

    def initialise(self, task: Task) -> None:
        """Initialise what all tasks share; called once, with the first task."""

    @abstractmethod
    def hooks(self) -> BlockHooks:
        """The modules of the newest task."""

    @abstractmethod
    def adapt(self, task: Task, rows: GrowingCosineHead) -> dict[str, Any]:
        """Train the modules and the rows of the head for a task; returns losses and more for the report."""

    @classmethod
    def epochs_per_task(cls, options: CosFaceOptions, sizes: Sequence[int]) -> list[int]:
        """The epochs of each task; none for tasks of one class that are skipped."""
        plan = StreamPlan(sum(sizes), len(sizes))
        return [options.epochs_of_task(task, classes, plan) for task, classes in enumerate(sizes)]

    def epochs_for(self, task: Task) -> int:
        """Epochs of training for a task."""
        return self.options.epochs_of_task(task.index, len(task.classes), self.plan)

    def learn(self, task: Task) -> dict[str, Any]:
        """Train on a task, fit Gaussians of its classes, and align the head to the Gaussians of all classes."""
        if not len(self.sizes):
            self.initialise(task)
        rows = self._new_rows()
        rows.grow(len(task.classes), seeds.generator(task.seed, task.index, "head"))
        epochs = self.epochs_for(task)
        report: dict[str, Any] = {"trained": epochs > 0}
        if epochs:
            report |= {"epochs": epochs, **self.adapt(task, rows)}
        # Rows of old tasks are not optimised in training; weight decay would not change their cosines.
        self.head.append(rows)
        self.sizes = torch.cat([self.sizes, self.sizes.new_tensor([len(task.classes)])])
        self.runtime.progress.start_phase("prototypes")
        self.gaussians.add(self.whole_image_features(task, self.hooks()), task.labels, task.classes)
        if len(self.sizes) > 1 and self.options.alignment_epochs:
            report["alignment_losses"] = self._align(task)
        return report

    def train_by_cosface(
        self,
        hooks: BlockHooks,
        rows: GrowingCosineHead,
        task: Task,
        *,
        others: Sequence[nn.Module] = (),
        regulariser: Callable[[], Tensor] | None = None,
    ) -> list[float]:
        """Train hooks, which are a module, with new rows of the head; returns the mean loss of each epoch.

        Args:
            hooks: to be trained.
            rows: to be trained, over the classes of the task.
            task: the training images.
            others: further modules to train.
            regulariser: computes a loss that is added to that of every batch.
        """
        assert isinstance(hooks, nn.Module)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            features = self.runtime.processes.gather(self.vit(images, hooks), len(labels))
            value = self.classification_loss(features, labels, rows, task)
            return value if regulariser is None else value + regulariser()

        return train(
            [ParamGroup(module) for module in (hooks, rows, *others)],
            loss,
            task,
            self.recipe(task),
            self.runtime,
            sharded=True,
            capturable=isinstance(hooks, Adapters),  # as in train_with_local_head
        )

    def classification_loss(self, features: Tensor, labels: Tensor, rows: GrowingCosineHead, task: Task) -> Tensor:
        """CosFace over the classes of a task."""
        return cosface_loss(rows(features), labels - task.classes.start, self.options.logit_scale * self.options.margin)

    def alignment_head(self) -> nn.Module:
        """The head as it is retrained by classifier alignment."""
        return self.head

    def alignment_schedule(self) -> Schedule:
        """The learning rate schedule of the classifier alignment."""
        return schedules.cosine

    def _new_rows(self) -> GrowingCosineHead:
        return GrowingCosineHead(self.vit.width, self.options.logit_scale).to(self.runtime.device)

    def _align(self, task: Task) -> list[float]:
        """Retrain the head on features sampled from the Gaussians of all classes."""
        options = self.options
        self.runtime.progress.start_phase("classifier alignment")
        scales = mean_scales(self.sizes, options.rho, self.official_rho_sign * len(task.classes))
        return align_head(
            self.alignment_head(),
            self.gaussians.scale_means(scales),
            epochs=options.alignment_epochs,
            learning_rate=options.alignment_learning_rate,
            weight_decay=_ALIGNMENT_DECAY,
            batch_size=options.alignment_samples,
            generator=seeds.generator(task.seed, task.index, "alignment"),
            schedule=self.alignment_schedule(),
        )


@dataclass(frozen=True)
class MeanShiftOptions(CosFaceOptions):
    """Options of the shift of old class means.

    Attributes:
        sigma: width of the kernel that weights new images by their distance to an old class mean, in units of the
            features. Far beyond it, all images have the same weight.
        paired_rows: estimate the drift from the same whole images before and after training. Off is the official code,
            which subtracts the features of two shuffled, augmented passes, so of different images.
    """

    sigma: Positive = 1.0
    paired_rows: bool = True


class MeanShiftMethod(CosFaceMethod):
    """One network that drifts: the means of old classes follow the features of new images close to them.

    The covariances of old classes do not change.
    """

    options: MeanShiftOptions

    @abstractmethod
    def fine_tune(self, task: Task, rows: GrowingCosineHead) -> list[float]:
        """Train the modules and the rows of the head for a task; returns the mean loss of each epoch."""

    def adapt(self, task: Task, rows: GrowingCosineHead) -> dict[str, Any]:
        """Train on a task, and shift the means of old classes."""
        if not len(self.gaussians):
            return {"losses": self.fine_tune(task, rows)}
        before = self._drifting_features(task, "before")
        losses = self.fine_tune(task, rows)
        shifts = mean_shifts(self.gaussians.means, before, self._drifting_features(task, "after"), self.options.sigma)
        self.gaussians.means = self.gaussians.means + shifts
        return {"losses": losses, "shift": float(shifts.norm(dim=1).mean())}

    def scores(self, images: Tensor) -> Tensor:
        """Scaled cosines to the rows of all classes seen so far."""
        with torch.no_grad():
            logits: Tensor = self.head(self.features(images, self.hooks()))
            return logits

    def _drifting_features(self, task: Task, purpose: str) -> Tensor:
        """Features of the images of a task with the present modules."""
        self.runtime.progress.start_phase("drift of old classes")
        if self.options.paired_rows:
            return self.whole_image_features(task, self.hooks())
        order, crops = (seeds.generator(task.seed, task.index, f"{name} {purpose}") for name in ("order", "crops"))
        batches = task.train_batches(self.options.batch_size, self.options.crop_scale, order, crops)
        return torch.cat([self.features(images, self.hooks()) for images, _ in batches])


def cosface_loss(logits: Tensor, labels: Tensor, penalty: float = 0.0) -> Tensor:
    """CosFace: cross-entropy, with the logit of the correct class reduced by ``penalty``, the scale times the margin.

    >>> logits = torch.tensor([[2.0, 1.0]])
    >>> cosface_loss(logits, torch.tensor([0]), 1.0) == F.cross_entropy(torch.ones(1, 2), torch.tensor([0]))
    tensor(True)
    """
    is_correct = labels[:, None] == torch.arange(logits.shape[1], device=labels.device)
    return F.cross_entropy(logits.float() - penalty * is_correct, labels)


def mean_scales(sizes: Tensor, rho: Rho, official_size: int) -> Tensor:
    """Factor on the mean of each class in the alignment, ``[classes]``, given the classes of each task.

    >>> mean_scales(torch.tensor([2, 1, 1]), "by-task", 1)
    tensor([0.9333, 0.9333, 0.9667, 1.0000])

    The official code divides the label by the size of the newest task:

    >>> mean_scales(torch.tensor([2, 1, 1]), "official", 1)
    tensor([0.9333, 0.9667, 1.0000, 1.0333])
    """
    numbers = torch.arange(1, len(sizes) + 1, device=sizes.device).repeat_interleave(sizes)
    if rho == "official":
        numbers = torch.arange(len(numbers), device=sizes.device) // official_size + 1
    scales = 0.9 + 0.1 * numbers / len(sizes)
    return torch.ones_like(scales) if rho == "none" else scales


def mean_shifts(means: Tensor, before: Tensor, after: Tensor, sigma: float) -> Tensor:
    """The shift of each class mean: a weighted mean of the changes of features ``[N, width]``.

    The weights fall with the distance between the mean and the feature before the change, by a Gaussian kernel of
    width ``sigma``. A small constant is added to them, so that a mean far from all features moves by their mean change.

    >>> before = torch.tensor([[0.0], [9.0]])
    >>> mean_shifts(torch.tensor([[0.0], [99.0]]), before, before + torch.tensor([[1.0], [3.0]]), 1.0)
    tensor([[1.0000],
            [2.0000]])
    """
    exact, means64 = to_float64(before), to_float64(means)
    weights = torch.exp(-torch.cdist(means64, exact).square() / (2 * sigma**2)) + _LEAST_WEIGHT
    shifts = (weights / weights.sum(1, keepdim=True)) @ (to_float64(after) - exact)
    return shifts.to(means)
