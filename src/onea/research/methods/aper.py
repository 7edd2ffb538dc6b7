# SPDX-License-Identifier: Apache-2.0
"""APER: adapt the network to the first task only, and classify by prototypes of plain and adapted features.

The five variants differ only in what they adapt.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from onea import seeds
from onea.learner.local_head import local_head, new_adapters, train_with_local_head
from onea.learner.options import AdapterOptions, TrainingOptions
from onea.learner.tasks import Task
from onea.learner.training import Optimiser
from onea.options import Count, Positive
from onea.research.hooks.finetune import FineTuned
from onea.research.hooks.ssf import SSF
from onea.research.hooks.vpt import VPT
from onea.research.methods.contract import Method
from onea.tensors import Tensors, part_of
from onea.vit.adapter import Adapters
from onea.vit.heads import cosine_scores
from onea.vit.hooks import NO_HOOKS, BlockHooks

_ADAPTED = "adapted."


@dataclass(frozen=True)
class AperOptions(TrainingOptions):
    """Options of every variant.

    Attributes:
        head: ``linear`` or ``cosine`` local head, discarded after the first task.
        head_scale: initial scale of a cosine head.
        single_class: what a first task of one class does: ``skip`` (its loss is constant and teaches nothing, so
            nothing is adapted and the method is SimpleCIL) or ``train`` (as published: adapt by weight decay alone).
    """

    head: Literal["linear", "cosine"] = "cosine"
    head_scale: float = 1.0
    single_class: Literal["skip", "train"] = "skip"


@dataclass(frozen=True)
class AperAdapterOptions(AperOptions, AdapterOptions):
    """Options of APER with an adapter."""


@dataclass(frozen=True)
class AperFinetuneOptions(AperOptions):
    """Options of APER with fine-tuning.

    Attributes:
        optimiser: ``sgd`` as published, or ``adamw``, whose steps are of one size whatever the size of a gradient.
        head_rate: factor on the learning rate for the head; one rate is often too large for the first blocks and too
            small for a fresh head.
    """

    optimiser: Optimiser = "sgd"
    head_rate: Positive = 1.0


@dataclass(frozen=True)
class AperVPTOptions(AperOptions):
    """Options of APER with prompts.

    Attributes:
        prompt_length: tokens appended to the sequence.
    """

    prompt_length: Count = 5


def _recipe(epochs: int, rate: float, batch: int, decay: float = 5e-4) -> dict[str, Any]:
    return {"epochs": epochs, "learning_rate": rate, "batch_size": batch, "weight_decay": decay}


def _everywhere(recipe: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(("cifar100", "cub200", "imagenet-a", "imagenet-r", ""), recipe)


class Aper(Method):
    """SimpleCIL on the concatenation of the plain and the adapted network's features."""

    paper: ClassVar[str] = "https://arxiv.org/abs/2303.07338"
    Options: ClassVar[type] = AperOptions
    options: AperOptions

    adapted: Adapters | FineTuned | SSF | VPT | None = None
    prototypes: Tensor | None = None

    @abstractmethod
    def fresh(self, generator: torch.Generator) -> Adapters | FineTuned | SSF | VPT:
        """The module that the first task trains, before training."""

    @classmethod
    def passes(cls, options: Any, tasks: int) -> float:
        """The plain network and the adapted one."""
        return 2

    @classmethod
    def epochs(cls, options: AperOptions, sizes: Sequence[int]) -> list[int]:
        """Only the first task is trained on, where it can teach anything."""
        trained = sizes[0] > 1 or options.single_class == "train"
        return [super().epochs(options, sizes)[0] * trained] + [0] * (len(sizes) - 1)

    def learn(self, task: Task) -> dict[str, Any]:
        """Adapt to the first task; of every task keep the class means."""
        report = self._adapt(task) if self.prototypes is None else {"trained": False}
        self.runtime.progress.note("prototypes")
        # The mean of concatenated features is the concatenation of their means.
        new = torch.cat(list(self.prototypes_under(task, list(self.cacheable_modules().values()))), dim=1)
        self.prototypes = new if self.prototypes is None else torch.cat([self.prototypes, new])
        return report

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The plain network and, if the first task could teach it anything, the adapted one."""
        plain: dict[str, BlockHooks] = {"plain": NO_HOOKS}
        return plain if self.adapted is None else plain | {"adapted": self.adapted}

    def scores_from_features(self, features: Mapping[str, Tensor]) -> Tensor:
        """Cosine of the concatenated features to every prototype, normalised jointly: the longer part counts more."""
        assert self.prototypes is not None, "learn a task first"
        return cosine_scores(torch.cat([features[name] for name in self.cacheable_modules()], dim=1), self.prototypes)

    def state_dict(self) -> Tensors:
        """The adapted module and the prototypes."""
        adapted = {} if self.adapted is None else self.adapted.state_dict(prefix=_ADAPTED)
        return adapted if self.prototypes is None else {**adapted, "prototypes": self.prototypes}

    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a saved state."""
        saved = part_of(_ADAPTED, state)
        self.adapted = None
        if saved:
            self.adapted = self.fresh(torch.Generator())
            self.adapted.load_state_dict(saved)
            self._freeze()
        self.prototypes = state["prototypes"].to(self.runtime.device) if "prototypes" in state else None

    def _adapt(self, task: Task) -> dict[str, Any]:
        options = self.options
        if len(task.classes) == 1 and options.single_class == "skip":
            return {"trained": False}
        self.adapted = self.fresh(seeds.generator(task.seed, task.index, "adapter"))
        head = local_head(self.vit.width, task, options.head, options.head_scale)
        losses = self._train(head, task)
        self._freeze()
        return {"trained": True, "epochs": self.epochs_for(task), "losses": losses}

    def _train(self, head: nn.Module, task: Task) -> list[float]:
        assert self.adapted is not None
        recipe = self.options.recipe(epochs=self.epochs_for(task))
        return train_with_local_head(self.vit, self.adapted, head, task, recipe, self.runtime)

    def _freeze(self) -> None:
        assert self.adapted is not None
        self.adapted.requires_grad_(False).eval().to(self.runtime.device)


class AperAdapter(Aper):
    """With a bottleneck adapter beside every MLP."""

    title: ClassVar[str] = "APER-Adapter"
    trains: ClassVar[str] = "an adapter on the first task"
    stores: ClassVar[str] = "one adapter, a prototype per class"
    Options: ClassVar[type] = AperAdapterOptions
    base_learning_rate: ClassVar[float | None] = 0.26
    paper_presets: ClassVar[Mapping[str, Mapping[str, Any]]] = _everywhere(_recipe(20, 0.01, 48)) | dict.fromkeys(
        ("imagenet-r", ""), _recipe(20, 0.05, 24, 5e-3)
    )
    options: AperAdapterOptions

    def fresh(self, generator: torch.Generator) -> Adapters:
        """A fresh adapter; the identity."""
        return new_adapters(self.vit, self.options, generator)


class AperFinetune(Aper):
    """With all weights of the network, in a copy."""

    title: ClassVar[str] = "APER-Finetune"
    trains: ClassVar[str] = "a copy of all weights on the first task"
    stores: ClassVar[str] = "a second network, a prototype per class"
    in_paper: ClassVar[bool] = False
    Options: ClassVar[type] = AperFinetuneOptions
    base_learning_rate: ClassVar[float | None] = 8.1e-06
    paper_presets: ClassVar[Mapping[str, Mapping[str, Any]]] = _everywhere(_recipe(5, 0.01, 128))
    auto_preset: ClassVar[Mapping[str, Any]] = {"optimiser": "adamw", "head_rate": 100.0}
    options: AperFinetuneOptions

    def fresh(self, generator: torch.Generator) -> FineTuned:
        """A copy of the network's weights; the identity."""
        return FineTuned(self.vit)

    def _train(self, head: nn.Module, task: Task) -> list[float]:
        assert self.adapted is not None
        options = self.options
        recipe = options.recipe(options.optimiser, epochs=self.epochs_for(task))
        return train_with_local_head(
            self.vit, self.adapted, head, task, recipe, self.runtime, head_rate=options.head_rate
        )


class AperSSF(Aper):
    """With a scale and a shift after every operation."""

    title: ClassVar[str] = "APER-SSF"
    trains: ClassVar[str] = "scales and shifts on the first task"
    stores: ClassVar[str] = "scales and shifts, a prototype per class"
    in_paper: ClassVar[bool] = False
    base_learning_rate: ClassVar[float | None] = 0.0098
    paper_presets: ClassVar[Mapping[str, Mapping[str, Any]]] = _everywhere(_recipe(20, 0.01, 48))

    def fresh(self, generator: torch.Generator) -> SSF:
        """Scales near one and shifts near zero."""
        return SSF(self.vit, generator)


class AperVPTShallow(Aper):
    """With tokens appended once, before the first block."""

    title: ClassVar[str] = "APER-VPT-Shallow"
    trains: ClassVar[str] = "prompts of the first block on the first task"
    stores: ClassVar[str] = "prompts, a prototype per class"
    in_paper: ClassVar[bool] = False
    Options: ClassVar[type] = AperVPTOptions
    base_learning_rate: ClassVar[float | None] = 36.0
    paper_presets: ClassVar[Mapping[str, Mapping[str, Any]]] = _everywhere(_recipe(20, 0.01, 48))
    options: AperVPTOptions

    def fresh(self, generator: torch.Generator) -> VPT:
        """One set of zero tokens."""
        return VPT(self.vit.depth, self.vit.width, self.options.prompt_length, deep=False)


class AperVPTDeep(Aper):
    """With tokens of its own appended to every block."""

    title: ClassVar[str] = "APER-VPT-Deep"
    trains: ClassVar[str] = "prompts of every block on the first task"
    stores: ClassVar[str] = "prompts, a prototype per class"
    in_paper: ClassVar[bool] = False
    Options: ClassVar[type] = AperVPTOptions
    base_learning_rate: ClassVar[float | None] = 0.0025
    paper_presets: ClassVar[Mapping[str, Mapping[str, Any]]] = _everywhere(_recipe(5, 0.05, 16))
    options: AperVPTOptions

    def fresh(self, generator: torch.Generator) -> VPT:
        """A set of zero tokens for every block."""
        return VPT(self.vit.depth, self.vit.width, self.options.prompt_length, deep=True)
