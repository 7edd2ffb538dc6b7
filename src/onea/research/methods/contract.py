# SPDX-License-Identifier: Apache-2.0
"""The interface of class-incremental methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onea import seeds
from onea.errors import OneaError
from onea.learner.local_head import local_head, new_adapters, train_with_local_head
from onea.learner.optimisation import Recipe
from onea.learner.tasks import StreamPlan, Task
from onea.runtime import Runtime
from onea.tensors import Tensors, add_prefix, select_prefix, to_float64
from onea.vit.adapter import Adapters
from onea.vit.batching import EVALUATION_BATCH, pad_rows
from onea.vit.frozen import FrozenViT
from onea.vit.heads import class_sums
from onea.vit.hooks import NO_HOOKS, BlockHooks


@dataclass(frozen=True)
class NoOptions:
    """Options of a method without hyper-parameters."""


class Method(ABC):
    """Base class of class-incremental methods.

    A method learns one task after another and scores images for all classes seen so far, without a task id.
    A subclass implements ``learn`` and ``scores``, and names in ``state`` everything that is kept between tasks, so
    that a run can stop and resume at any task boundary.

    >>> class Chance(Method):
    ...     title, paper, trains, stores, state = "Chance", "", "nothing", "a number", ("seen",)
    ...
    ...     def setup(self):
    ...         self.seen = torch.tensor(0)
    ...
    ...     def learn(self, task):
    ...         self.seen = torch.tensor(task.classes.stop)
    ...         return {}
    ...
    ...     def scores(self, images):
    ...         return torch.rand(len(images), int(self.seen))
    >>> Chance.forward_passes(Chance.Options(), tasks=10)
    1

    Attributes:
        title: name of the method in papers.
        paper: link to the paper of the method.
        related: the closest earlier work on the method's parts, each with a link.
        trains: what is trained, in a few words.
        stores: what is kept between tasks, in a few words.
        state: names of the attributes that are kept between tasks: tensors, modules, lists of modules, or None.
        in_paper: whether the One-A paper reports the method.
        inserts_modules: whether modules are inserted into the network; otherwise every network is supported.
        trains_on_all_classes: whether each task trains on images of all classes so far, for the epochs of one task with
            all of them.
        adapter_per_task: whether each task adds an adapter (or low-rank updates) that is used at inference.
        Options: dataclass of the hyper-parameters.
        base_learning_rate: learning rate of the preset ``auto``, for any dataset; None for the default of the options.
        auto_preset: further options of the preset ``auto``, where they differ from those of other methods.
        paper_presets: options that the authors published, by dataset: the presets ``paper/NAME``. The key ``""``
            applies to any other dataset.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    trains: ClassVar[str]
    stores: ClassVar[str]
    state: ClassVar[tuple[str, ...]]
    related: ClassVar[Mapping[str, str]] = {}
    in_paper: ClassVar[bool] = True
    inserts_modules: ClassVar[bool] = True
    trains_on_all_classes: ClassVar[bool] = False
    adapter_per_task: ClassVar[bool] = False
    Options: ClassVar[type] = NoOptions
    base_learning_rate: ClassVar[float | None] = None
    auto_preset: ClassVar[Mapping[str, Any]] = {}
    paper_presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(self, vit: FrozenViT, options: Any, runtime: Runtime, plan: StreamPlan | None = None):
        self.check_backbone(vit.name, vit.no_hooks_reason)
        self.vit, self.options, self.runtime, self.plan = vit, options, runtime, plan
        self.setup()

    def setup(self) -> None:  # noqa: B027 - a method may have nothing to create
        """Create modules and tensors on the device of the runtime; called once, by the constructor."""

    @classmethod
    def check_backbone(cls, backbone: str, no_hooks_reason: str) -> None:
        """Refuse a network into which no module can be inserted. ``no_hooks_reason`` is empty for other networks."""
        if no_hooks_reason and cls.inserts_modules:
            from onea.vit.backbones import nearest_with_hooks

            raise OneaError(
                f"{cls.title} trains {cls.trains}, which does not fit backbone '{backbone}': {no_hooks_reason}; choose "
                f"simplecil, slda or ranpac, or a backbone such as {nearest_with_hooks(backbone)}."
            )

    @abstractmethod
    def learn(self, task: Task) -> dict[str, Any]:
        """Learn a task and return a report for the record of the run, which ``json.dumps`` accepts."""

    def state_dict(self) -> Tensors:
        """Everything that is kept between tasks, by the names in ``state``."""
        state: Tensors = {}
        for name in self.state:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                state[name] = value
            elif value is not None:
                state |= add_prefix(f"{name}.", _module(value).state_dict())
        return {name: value.detach() for name, value in state.items()}

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a state that ``state_dict`` returned. A subclass first creates modules that depend on the state."""
        for name in self.state:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                setattr(self, name, state[name].to(self.runtime.device))
            elif value is not None:
                _module(value).load_state_dict(select_prefix(f"{name}.", state))

    def inference_state(self) -> Tensors:
        """The part of the state that predictions and later tasks need, without classifiers that are only compared."""
        return self.state_dict()

    def scores(self, images: Tensor) -> Tensor:
        """Scores ``[B, classes seen]`` of a batch of network inputs; the prediction is the class with the largest.

        By default they are computed from the features of the cacheable modules. A method without such modules overrides
        this.
        """
        return self.scores_from_features(
            {name: self.features(images, hooks) for name, hooks in self.cacheable_modules().items()}
        )

    def cacheable_modules(self) -> Mapping[str, BlockHooks]:
        """Frozen modules from whose features the scores are computed, by name.

        A run computes the features of each test image once for every name, so a name must always refer to the same
        weights. A method whose modules change from task to task returns none.
        """
        return {}

    def scores_from_features(self, features: Mapping[str, Tensor]) -> Tensor:
        """Scores from the features ``[B, width]`` of every cacheable module."""
        raise OneaError(
            f"{type(self).__name__} cannot predict; define scores, or cacheable_modules and scores_from_features."
        )

    def batch_sizes(self) -> set[int]:
        """The batch sizes of training, for which the network is compiled."""
        return {getattr(self.options, "batch_size", EVALUATION_BATCH)}

    @classmethod
    def forward_passes(cls, options: Any, tasks: int) -> float:
        """Forward passes through the network per image after this many tasks, at most."""
        return 1

    @classmethod
    def adapters_used(cls, options: Any, tasks: int) -> int:
        """Adapters (or sets of low-rank updates, or of prompts) used at inference after this many tasks, at most."""
        return tasks if cls.adapter_per_task else 1

    @classmethod
    def epochs_per_task(cls, options: Any, sizes: Sequence[int]) -> list[int]:
        """Epochs of training for each task of a stream; ``sizes`` are the numbers of classes of its tasks."""
        if not hasattr(options, "epochs_for"):  # options that do not derive from TrainingOptions
            return [getattr(options, "epochs", 0)] * len(sizes)
        plan = StreamPlan(sum(sizes), len(sizes))
        trained = accumulate(sizes) if cls.trains_on_all_classes else sizes
        return [options.epochs_for(classes, plan) for classes in trained]

    def epochs_for(self, task: Task) -> int:
        """Epochs of training for a task."""
        return int(self.options.epochs_for(len(task.classes), self.plan))

    def recipe(self, task: Task) -> Recipe:
        """Hyper-parameters of the training on a task."""
        recipe: Recipe = self.options.recipe(epochs=self.epochs_for(task))
        return recipe

    def new_adapters(self, seed: int = 0, index: int = 0) -> Adapters:
        """Adapters initialised as the identity; ``seed`` and the index of the task determine their random weights."""
        adapters = new_adapters(self.vit, self.options, seeds.generator(seed, index, "adapter"))
        return adapters.eval().to(self.runtime.device)

    def train_with_local_head(self, hooks: BlockHooks, task: Task, head_lr_scale: float = 1.0) -> dict[str, Any]:
        """Train modules with a local head, which is discarded; returns epochs and losses for the report."""
        head = local_head(self.vit.width, task, self.options.head, self.options.head_scale)
        recipe = self.recipe(task)
        losses = train_with_local_head(self.vit, hooks, head, task, recipe, self.runtime, head_lr_scale=head_lr_scale)
        return {"epochs": recipe.epochs, "losses": losses}

    def features(self, images: Tensor, hooks: BlockHooks = NO_HOOKS) -> Tensor:
        """Features ``[B, width]`` of network inputs, without gradients."""
        with torch.no_grad(), self.runtime.autocast():
            features: Tensor = self.vit(images, hooks)
            return features

    def whole_image_features(self, task: Task, hooks: BlockHooks = NO_HOOKS) -> Tensor:
        """Features ``[N, width]`` of all images of a task, without augmentation."""
        return torch.cat([self.features(images, hooks) for images, _ in task.whole_image_batches(EVALUATION_BATCH)])

    def compute_prototypes(self, task: Task, hooks: BlockHooks = NO_HOOKS) -> Tensor:
        """Mean feature of each class of a task, without augmentation: ``[classes of the task, width]``."""
        return self.compute_prototypes_per_module(task, [hooks])[0]

    def compute_prototypes_per_module(self, task: Task, modules: Sequence[BlockHooks]) -> Tensor:
        """Class means under several modules, ``[modules, classes of the task, width]``; each image is loaded once."""
        processes, device = self.runtime.processes, self.runtime.device
        sums = to_float64(torch.zeros(len(modules), len(task.classes), self.vit.width, device=device))
        for number, batch in enumerate(torch.arange(len(task)).split(EVALUATION_BATCH)):
            if number % processes.count == processes.rank:
                images, labels = task.images.test_views(pad_rows(task.rows[batch])), task.labels[batch]
                for total, hooks in zip(sums, modules, strict=True):
                    total += class_sums(self.features(images, hooks)[: len(batch)], labels, task.classes)
        counts = torch.bincount(task.labels - task.classes.start, minlength=len(task.classes)).to(sums.device)
        return (processes.sum(sums) / counts[:, None]).float().to(device)


def _module(value: Any) -> Any:
    """A module, or a list of modules as one."""
    return nn.ModuleList(value) if isinstance(value, list) else value
