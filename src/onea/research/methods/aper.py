# SPDX-License-Identifier: Apache-2.0
"""APER: adapt the network to the first task, then classify by prototypes of pretrained and adapted features.

The five variants differ in how they adapt the network: fine-tuning, adapter, SSF, or shallow or deep VPT.
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
from onea.learner.local_head import new_adapters
from onea.learner.optimisation import Optimiser, Recipe
from onea.learner.options import AdapterOptions, LocalHeadOptions
from onea.learner.tasks import Task
from onea.research.methods.contract import Method
from onea.research.methods.presets import published
from onea.schema import Count, Positive
from onea.tensors import Tensors
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT
from onea.vit.heads import cosine_scores
from onea.vit.hooks import NO_HOOKS, BlockHooks

_ADAPTED = "adapted."
_Layer = nn.LayerNorm | nn.Linear | nn.Conv2d


class FineTuned(nn.Module, BlockHooks):
    """A trainable float32 copy of all weights of a network; the network itself remains unchanged.

    The frozen weights may be stored in a lower precision, in which small steps would be rounded away.
    """

    whole_sequence = False

    def __init__(self, vit: FrozenViT):
        super().__init__()
        self.copy: nn.Module = copy.deepcopy(vit.vit).float().requires_grad_(True)

    def weights(self, vit: FrozenViT) -> dict[str, Tensor]:
        """The copy, with the parameter names of the frozen network."""
        return {f"vit.{name}": value for name, value in self.copy.named_parameters()}


class SSF(nn.Module, BlockHooks):
    """Scaling and shifting of features (https://arxiv.org/abs/2210.08823, section 3).

    Each output ``y`` of a norm, a linear layer or the patch embedding becomes ``scale * y + shift``, per channel. All
    of these layers end in an affine map, so scale and shift are folded into weight and bias without additional
    operations: ``scale * weight`` and ``scale * bias + shift``. A layer without a bias gets one.

    Raises:
        OneaError: the network has a parametrised layer of another kind.
    """

    whole_sequence = False

    def __init__(self, vit: FrozenViT, generator: torch.Generator, deviation: float = 0.02):
        super().__init__()
        if unsupported := layer_without_ssf(vit):
            raise OneaError(
                f"Backbone '{vit.name}' has a {unsupported}, which SSF does not support; choose another method."
            )
        self.scale, self.shift = nn.ParameterDict(), nn.ParameterDict()
        for name, layer in _layers(vit):
            channels = len(layer.weight)
            # Initialised near the identity as in the official code: scales around one, shifts around zero.
            self.scale[_key(name)] = nn.Parameter(1 + deviation * torch.randn(channels, generator=generator))
            self.shift[_key(name)] = nn.Parameter(deviation * torch.randn(channels, generator=generator))

    def weights(self, vit: FrozenViT) -> dict[str, Tensor]:
        """Weights and biases of the network with scale and shift folded in, in float32."""
        folded = {}
        for name, layer in _layers(vit):
            scale, shift, weight = self.scale[_key(name)], self.shift[_key(name)], layer.weight.float()
            folded[f"{name}.weight"] = weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
            folded[f"{name}.bias"] = shift if layer.bias is None else layer.bias.float() * scale + shift
            folded.update(_separate_biases(vit, name, scale))
        return folded


def _layers(vit: FrozenViT) -> Iterator[tuple[str, _Layer]]:
    for name, module in vit.named_modules():
        if isinstance(module, nn.LayerNorm | nn.Linear | nn.Conv2d):
            yield name, module


def _separate_biases(vit: FrozenViT, name: str, scale: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Scaled biases of a joint qkv projection that are parameters of the attention rather than of the projection."""
    attention, _, layer = name.rpartition(".")
    if layer != "qkv":
        return
    for part, chunk in zip(("q_bias", "k_bias", "v_bias"), scale.chunk(3), strict=True):
        bias = getattr(vit.get_submodule(attention), part, None)
        if isinstance(bias, nn.Parameter):  # the bias of the keys is a constant zero
            yield f"{attention}.{part}", bias.float() * chunk


def layer_without_ssf(vit: FrozenViT) -> str:
    """The class name of the first layer that SSF does not support; empty if it supports all layers."""
    for name, module in vit.named_modules():
        is_affine = isinstance(module, nn.Linear | nn.LayerNorm) or name == "vit.patch_embed.proj"
        if isinstance(getattr(module, "weight", None), nn.Parameter) and not is_affine:
            return type(module).__name__
    return ""


def _key(name: str) -> str:
    """Module name without dots, which parameter names may not contain."""
    return name.removeprefix("vit.").replace(".", "_")


class VPT(nn.Module, BlockHooks):
    """Visual prompt tuning (https://arxiv.org/abs/2203.12119, section 3).

    Learned tokens are appended to the sequence and removed before pooling. Shallow: one set of tokens, appended before
    the first block and removed after the last. Deep: a set for each block, removed after that block. The tokens are
    initialised with zeros, which still receive attention.
    """

    compilable = True

    def __init__(self, depth: int, width: int, length: int, *, deep: bool):
        super().__init__()
        self.depth, self.length, self.deep = depth, length, deep
        self.prompts = nn.Parameter(torch.zeros(depth if deep else 1, length, width))

    def before_block(self, block: int, x: Tensor) -> Tensor:
        """Append the tokens of this block, if it has any."""
        if block >= len(self.prompts):
            return x
        return torch.cat([x, self.prompts[block].expand(len(x), -1, -1)], dim=1)

    def after_block(self, block: int, x: Tensor) -> Tensor:
        """Remove the tokens after their last block, so that they are not pooled."""
        return x[:, : -self.length] if self.deep or block == self.depth - 1 else x


@dataclass(frozen=True)
class AperOptions(LocalHeadOptions):
    """Options of all variants.

    Attributes:
        single_class: how to handle a first task of one class, whose loss is constant: ``skip`` (no adaptation, which
            makes the method SimpleCIL) or ``train`` (as published: only weight decay changes the weights).
    """

    single_class: Literal["skip", "train"] = "skip"


@dataclass(frozen=True)
class AperAdapterOptions(AperOptions, AdapterOptions):
    """Options of APER with an adapter."""


@dataclass(frozen=True)
class AperFinetuneOptions(AperOptions):
    """Options of APER with fine-tuning.

    Attributes:
        optimiser: ``sgd`` as published, or ``adamw``, whose steps do not depend on the scale of the gradients.
        head_rate: factor on the learning rate of the head. One rate is often too large for the first blocks and too
            small for a new head.
    """

    optimiser: Optimiser = "sgd"
    head_rate: Positive = 1.0


@dataclass(frozen=True)
class AperVPTOptions(AperOptions):
    """Options of APER with prompts.

    Attributes:
        prompt_length: number of prompt tokens appended to the sequence.
    """

    prompt_length: Count = 5


Module = Adapters | FineTuned | SSF | VPT


def _for_all_datasets(*recipe: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(("cifar100", "cub200", "imagenet-a", "imagenet-r", ""), published(*recipe))


class Aper(Method):
    """SimpleCIL on the concatenated features of the pretrained and the adapted network."""

    paper = "https://arxiv.org/abs/2303.07338"
    state = ("adapted", "prototypes")
    Options: ClassVar[type] = AperOptions
    options: AperOptions

    def setup(self) -> None:
        """Start without an adapted module, which the first task trains."""
        self.adapted: Module | None = None
        self.prototypes = torch.empty(0, device=self.runtime.device)

    @abstractmethod
    def new_module(self, generator: torch.Generator) -> Module:
        """The module that the first task trains, initialised."""

    @classmethod
    def forward_passes(cls, options: Any, tasks: int) -> float:
        """One through the pretrained and one through the adapted network."""
        return 2

    @classmethod
    def epochs_per_task(cls, options: AperOptions, sizes: Sequence[int]) -> list[int]:
        """Only the first task trains."""
        is_trained = sizes[0] > 1 or options.single_class == "train"
        return [super().epochs_per_task(options, sizes)[0] * is_trained] + [0] * (len(sizes) - 1)

    def learn(self, task: Task) -> dict[str, Any]:
        """Adapt to the first task; compute the prototypes of every task."""
        report = {"trained": False} if len(self.prototypes) else self._adapt(task)
        self.runtime.progress.start_phase("prototypes")
        # The mean of concatenated features is the concatenation of their means.
        new = torch.cat(list(self.compute_prototypes_per_module(task, list(self.cacheable_modules().values()))), dim=1)
        self.prototypes = torch.cat([self.prototypes, new])
        return report

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The pretrained network and the adapted one, if the first task was trained."""
        plain: dict[str, BlockHooks] = {"plain": NO_HOOKS}
        return plain if self.adapted is None else plain | {"adapted": self.adapted}

    def scores_from_features(self, features: Mapping[str, Tensor]) -> Tensor:
        """Cosine of the concatenated features to each prototype; they are normalised after the concatenation."""
        return cosine_scores(torch.cat([features[name] for name in self.cacheable_modules()], dim=1), self.prototypes)

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state, with or without an adapted module."""
        has_adapted = any(name.startswith("adapted.") for name in state)
        self.adapted = self._frozen(self.new_module(torch.Generator())) if has_adapted else None
        super().load_state_dict(state)

    def _adapt(self, task: Task) -> dict[str, Any]:
        if len(task.classes) == 1 and self.options.single_class == "skip":
            return {"trained": False}
        module = self.new_module(seeds.generator(task.seed, task.index, "adapter"))
        report = self.train_with_local_head(module, task)
        self.adapted = self._frozen(module)
        return {"trained": True, **report}

    def _frozen(self, module: Module) -> Module:
        return module.requires_grad_(False).eval().to(self.runtime.device)


class AperAdapter(Aper):
    """APER with a bottleneck adapter beside every MLP."""

    title = "APER-Adapter"
    trains = "an adapter on the first task"
    stores = "one adapter and a prototype per class"
    Options = AperAdapterOptions
    base_learning_rate = 0.051
    paper_presets: ClassVar = _for_all_datasets(20, 0.01, 48) | dict.fromkeys(
        ("imagenet-r", ""), published(20, 0.05, 24, 5e-3)
    )
    options: AperAdapterOptions

    def new_module(self, generator: torch.Generator) -> Adapters:
        """A new adapter, initialised as the identity."""
        return new_adapters(self.vit, self.options, generator)


class AperFinetune(Aper):
    """APER with full fine-tuning."""

    title = "APER-Finetune"
    trains = "a copy of all weights on the first task"
    stores = "a second network and a prototype per class"
    in_paper = False
    Options = AperFinetuneOptions
    base_learning_rate = 5.9e-06
    paper_presets: ClassVar = _for_all_datasets(5, 0.01, 128)
    auto_preset: ClassVar = {"optimiser": "adamw", "head_rate": 100.0}
    options: AperFinetuneOptions

    def new_module(self, generator: torch.Generator) -> FineTuned:
        """A copy of the network's weights."""
        return FineTuned(self.vit)

    def recipe(self, task: Task) -> Recipe:
        """Hyper-parameters with the chosen optimiser."""
        return self.options.recipe(self.options.optimiser, epochs=self.epochs_for(task))

    def train_with_local_head(self, hooks: BlockHooks, task: Task, head_lr_scale: float = 1.0) -> dict[str, Any]:
        """Train with another learning rate for the head."""
        return super().train_with_local_head(hooks, task, self.options.head_rate)


class AperSSF(Aper):
    """APER with scaling and shifting of features (SSF)."""

    title = "APER-SSF"
    trains = "scales and shifts on the first task"
    stores = "scales and shifts and a prototype per class"
    in_paper = False
    base_learning_rate = 0.0051
    paper_presets: ClassVar = _for_all_datasets(20, 0.01, 48)

    def new_module(self, generator: torch.Generator) -> SSF:
        """Random scales near one and shifts near zero."""
        return SSF(self.vit, generator)


class AperVPTShallow(Aper):
    """APER with shallow visual prompt tuning."""

    title = "APER-VPT-Shallow"
    trains = "prompts of the first block on the first task"
    stores = "prompts and a prototype per class"
    in_paper = False
    Options = AperVPTOptions
    base_learning_rate = 60.0
    paper_presets: ClassVar = _for_all_datasets(20, 0.01, 48)
    deep: ClassVar[bool] = False
    options: AperVPTOptions

    def new_module(self, generator: torch.Generator) -> VPT:
        """Prompts initialised with zeros."""
        return VPT(self.vit.depth, self.vit.width, self.options.prompt_length, deep=self.deep)


class AperVPTDeep(AperVPTShallow):
    """APER with deep visual prompt tuning."""

    title = "APER-VPT-Deep"
    trains = "prompts of every block on the first task"
    base_learning_rate = 0.00034
    paper_presets: ClassVar = _for_all_datasets(5, 0.05, 16)
    deep = True
