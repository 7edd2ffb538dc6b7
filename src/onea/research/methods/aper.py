# SPDX-License-Identifier: Apache-2.0
"""APER: adapt the network to the first task only, and classify by prototypes of plain and adapted features.

The five variants differ only in what they adapt.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from onea import seeds
from onea.errors import OneaError
from onea.learner.local_head import local_head, new_adapters, train_with_local_head
from onea.learner.options import AdapterOptions, TrainingOptions
from onea.learner.tasks import Task
from onea.learner.training import Optimiser
from onea.research.methods.contract import Method
from onea.schema import Count, Positive
from onea.tensors import Tensors, select_prefix
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT
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

    paper = "https://arxiv.org/abs/2303.07338"
    Options: ClassVar[type] = AperOptions
    options: AperOptions

    adapted: Adapters | FineTuned | SSF | VPT | None = None
    prototypes: Tensor | None = None

    @abstractmethod
    def fresh(self, generator: torch.Generator) -> Adapters | FineTuned | SSF | VPT:
        """The module that the first task trains, before training."""

    @classmethod
    def forward_passes(cls, options: Any, tasks: int) -> float:
        """The plain network and the adapted one."""
        return 2

    @classmethod
    def epochs_per_task(cls, options: AperOptions, sizes: Sequence[int]) -> list[int]:
        """Only the first task is trained on, where it can teach anything."""
        trained = sizes[0] > 1 or options.single_class == "train"
        return [super().epochs_per_task(options, sizes)[0] * trained] + [0] * (len(sizes) - 1)

    def learn(self, task: Task) -> dict[str, Any]:
        """Adapt to the first task; of every task keep the class means."""
        report = self._adapt(task) if self.prototypes is None else {"trained": False}
        self.runtime.progress.note("prototypes")
        # The mean of concatenated features is the concatenation of their means.
        new = torch.cat(list(self.compute_prototypes_per_module(task, list(self.cacheable_modules().values()))), dim=1)
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
        saved = select_prefix(_ADAPTED, state)
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

    title = "APER-Adapter"
    trains = "an adapter on the first task"
    stores = "one adapter, a prototype per class"
    Options = AperAdapterOptions
    base_learning_rate = 0.26
    paper_presets: ClassVar = _everywhere(_recipe(20, 0.01, 48)) | dict.fromkeys(
        ("imagenet-r", ""), _recipe(20, 0.05, 24, 5e-3)
    )
    options: AperAdapterOptions

    def fresh(self, generator: torch.Generator) -> Adapters:
        """A fresh adapter; the identity."""
        return new_adapters(self.vit, self.options, generator)


class AperFinetune(Aper):
    """With all weights of the network, in a copy."""

    title = "APER-Finetune"
    trains = "a copy of all weights on the first task"
    stores = "a second network, a prototype per class"
    in_paper = False
    Options = AperFinetuneOptions
    base_learning_rate = 8.1e-06
    paper_presets: ClassVar = _everywhere(_recipe(5, 0.01, 128))
    auto_preset: ClassVar = {"optimiser": "adamw", "head_rate": 100.0}
    options: AperFinetuneOptions

    def fresh(self, generator: torch.Generator) -> FineTuned:
        """A copy of the network's weights; the identity."""
        return FineTuned(self.vit)

    def _train(self, head: nn.Module, task: Task) -> list[float]:
        assert self.adapted is not None
        options = self.options
        recipe = options.recipe(options.optimiser, epochs=self.epochs_for(task))
        return train_with_local_head(
            self.vit, self.adapted, head, task, recipe, self.runtime, head_lr_scale=options.head_rate
        )


class AperSSF(Aper):
    """With a scale and a shift after every operation."""

    title = "APER-SSF"
    trains = "scales and shifts on the first task"
    stores = "scales and shifts, a prototype per class"
    in_paper = False
    base_learning_rate = 0.0098
    paper_presets: ClassVar = _everywhere(_recipe(20, 0.01, 48))

    def fresh(self, generator: torch.Generator) -> SSF:
        """Scales near one and shifts near zero."""
        return SSF(self.vit, generator)


class AperVPTShallow(Aper):
    """With tokens appended once, before the first block."""

    title = "APER-VPT-Shallow"
    trains = "prompts of the first block on the first task"
    stores = "prompts, a prototype per class"
    in_paper = False
    Options = AperVPTOptions
    base_learning_rate = 36.0
    paper_presets: ClassVar = _everywhere(_recipe(20, 0.01, 48))
    options: AperVPTOptions

    def fresh(self, generator: torch.Generator) -> VPT:
        """One set of zero tokens."""
        return VPT(self.vit.depth, self.vit.width, self.options.prompt_length, deep=False)


class AperVPTDeep(Aper):
    """With tokens of its own appended to every block."""

    title = "APER-VPT-Deep"
    trains = "prompts of every block on the first task"
    stores = "prompts, a prototype per class"
    in_paper = False
    Options = AperVPTOptions
    base_learning_rate = 0.0025
    paper_presets: ClassVar = _everywhere(_recipe(5, 0.05, 16))
    options: AperVPTOptions

    def fresh(self, generator: torch.Generator) -> VPT:
        """A set of zero tokens for every block."""
        return VPT(self.vit.depth, self.vit.width, self.options.prompt_length, deep=True)


class FineTuned(nn.Module, BlockHooks):
    """All weights of a network, to be trained in full precision while the network itself stays as it was.

    The frozen matrices may be stored in a lower precision; small steps would vanish there, hence the copy is float32.
    """

    whole_sequence = False

    def __init__(self, vit: FrozenViT):
        super().__init__()
        self.copy: nn.Module = copy.deepcopy(vit.vit).float().requires_grad_(True)

    def weights(self, vit: FrozenViT) -> dict[str, Tensor]:
        """The copy, under the names of the frozen network."""
        return {f"vit.{name}": value for name, value in self.copy.named_parameters()}


_Layer = nn.LayerNorm | nn.Linear | nn.Conv2d


class SSF(nn.Module, BlockHooks):
    """``scale * y + shift`` per channel of every output ``y`` of a norm, a linear layer or the patch embedding.

    All of these end in an affine map, so the network runs at its own speed with ``scale * weight`` and
    ``scale * bias + shift`` in place of weight and bias; a layer without a bias gains one. See
    https://arxiv.org/abs/2210.08823, section 3.

    Raises:
        OneaError: an operation of the network is of a kind that has no place for a shift.
    """

    whole_sequence = False

    def __init__(self, vit: FrozenViT, generator: torch.Generator, deviation: float = 0.02):
        super().__init__()
        if kind := why_not_affine(vit):
            raise OneaError(
                f"Backbone '{vit.name}' has a {kind}, which cannot be shifted as SSF does; choose another method."
            )
        self.scale, self.shift = nn.ParameterDict(), nn.ParameterDict()
        for name, layer in _layers(vit):
            channels = len(layer.weight)
            # Near the identity, not at it: the authors draw scales around one and shifts around zero.
            self.scale[_key(name)] = nn.Parameter(1 + deviation * torch.randn(channels, generator=generator))
            self.shift[_key(name)] = nn.Parameter(deviation * torch.randn(channels, generator=generator))

    def weights(self, vit: FrozenViT) -> dict[str, Tensor]:
        """The network's affine maps with scale and shift folded in, in full precision."""
        folded = {}
        for name, layer in _layers(vit):
            scale, shift, weight = self.scale[_key(name)], self.shift[_key(name)], layer.weight.float()
            folded[f"{name}.weight"] = weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
            folded[f"{name}.bias"] = shift if layer.bias is None else layer.bias.float() * scale + shift
            for bias, own in _separate_biases(vit, name, scale):
                folded[bias] = own
        return folded


def _layers(vit: FrozenViT) -> Iterator[tuple[str, _Layer]]:
    for name, module in vit.named_modules():
        if isinstance(module, nn.LayerNorm | nn.Linear | nn.Conv2d):
            yield name, module


def _separate_biases(vit: FrozenViT, name: str, scale: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Biases of a joint projection that its attention keeps apart from it, times their scales."""
    attention, _, layer = name.rpartition(".")
    if layer != "qkv":
        return
    for part, own in zip(("q_bias", "k_bias", "v_bias"), scale.chunk(3), strict=True):
        bias = getattr(vit.get_submodule(attention), part, None)
        if isinstance(bias, nn.Parameter):  # that of the keys is always zero, and no parameter
            yield f"{attention}.{part}", bias.float() * own


def why_not_affine(vit: FrozenViT) -> str:
    """The operation of a network that cannot be shifted, by its kind; empty where all can."""
    for name, module in vit.named_modules():
        known = isinstance(module, nn.Linear | nn.LayerNorm) or name == "vit.patch_embed.proj"
        if isinstance(getattr(module, "weight", None), nn.Parameter) and not known:
            return type(module).__name__
    return ""


def _key(name: str) -> str:
    """A module's name without the dots that parameter names may not have."""
    return name.removeprefix("vit.").replace(".", "_")


class VPT(nn.Module, BlockHooks):
    """Tokens that every other token attends to, and that are gone before the network pools its output.

    Shallow: one set joins before the first block and leaves after the last. Deep: every block has its own set, which
    leaves after that block. They start at zero, which is not the same as no tokens: they still draw attention. See
    https://arxiv.org/abs/2203.12119, section 3.
    """

    compilable = True

    def __init__(self, depth: int, width: int, length: int, *, deep: bool):
        super().__init__()
        self.depth, self.length, self.deep = depth, length, deep
        self.prompts = nn.Parameter(torch.zeros(depth if deep else 1, length, width))

    def before_block(self, block: int, x: Tensor) -> Tensor:
        """Append the tokens that this block begins with, if any."""
        if block >= len(self.prompts):
            return x
        return torch.cat([x, self.prompts[block].expand(len(x), -1, -1)], dim=1)

    def after_block(self, block: int, x: Tensor) -> Tensor:
        """Remove the tokens after their last block, so that pooling over tokens never sees them."""
        return x[:, : -self.length] if self.deep or block == self.depth - 1 else x
