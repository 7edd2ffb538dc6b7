# SPDX-License-Identifier: Apache-2.0
"""Base of L2P, DualPrompt and CODA-Prompt: query features, prompts selected by them, and a growing linear head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import schedules, seeds
from onea.learner.optimisation import ParamGroup, Recipe, train
from onea.learner.options import TrainingOptions
from onea.learner.tasks import Task
from onea.research.methods.contract import Method
from onea.tensors import Tensors, add_prefix, select_prefix, to_float64
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.frozen import FrozenViT
from onea.vit.heads import GrowingHead, cosine_scores
from onea.vit.hooks import BlockHooks

_PROMPTS = "prompts."
Selection = Literal["instance", "batch"]


class InputPrompts(BlockHooks):
    """Input tokens ``[B or 1, length, width]`` between class token and patches, whose mean output is the feature.

    They have the position embedding of the class token.
    """

    compilable = True

    def __init__(self, vit: FrozenViT, prompts: Tensor):
        self._vit, self._prompts = vit.vit, prompts
        self._start = 0 if vit.vit.cls_token is None else 1
        self.extra_tokens = prompts.shape[1]

    def tokens(self, x: Tensor, vit: FrozenViT) -> Tensor:
        """Insert the prompts after the class token."""
        prompts = self._prompts.to(x.dtype)
        if self._start and self._vit.pos_embed is not None and not self._vit.no_embed_class:
            prompts = prompts + self._vit.pos_embed[:, :1]
        prompts = prompts.expand(len(x), -1, -1)
        return torch.cat([x[:, : self._start], prompts, x[:, self._start :]], dim=1)

    def pool(self, x: Tensor) -> Tensor:
        """The mean output of the prompts, instead of the class token."""
        stop = self._start + self._prompts.shape[1]
        # fc_norm is the identity unless the network uses average pooling.
        features: Tensor = self._vit.fc_norm(x[:, self._start : stop].mean(1))
        return features


class PrefixPrompts(BlockHooks):
    """Prefix tuning: keys and values ``[B or 1, length, width]`` prepended to those of some blocks.

    They are prepended after the projections, so the sequence and its queries do not change. Blocks without a prefix
    are not changed; a prefix of zeros would receive attention.
    """

    whole_sequence = False
    compilable = True

    def __init__(self, heads: int, by_block: Mapping[int, tuple[Tensor, Tensor]]):
        self._heads, self._by_block = heads, by_block

    def prefix(self, block: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values of a block, split into heads."""
        if block not in self._by_block:
            return None
        keys, values = self._by_block[block]
        return self._split(keys), self._split(values)

    def _split(self, prompts: Tensor) -> Tensor:
        batch, length, width = prompts.shape
        return prompts.reshape(batch, length, self._heads, width // self._heads).transpose(1, 2)


class GrowingParameter(nn.Module):
    """Rows of one shape to which each task adds its own; only the newest rows are trained.

    Older rows are a buffer, so that gradients, weight decay and momentum of later tasks do not change them.
    """

    old: Tensor

    def __init__(self, *shape: int):
        super().__init__()
        self.register_buffer("old", torch.empty(0, *shape))
        self.new = nn.Parameter(torch.empty(0, *shape))

    def __len__(self) -> int:
        return len(self.old) + len(self.new)

    def grow(self, rows: Tensor) -> None:
        """Freeze the current rows and add new ones."""
        self.old = torch.cat([self.old, self.new.detach()])
        self.new = nn.Parameter(rows.to(self.old.device, copy=True))

    def load_rows(self, rows: Tensor) -> None:
        """Restore any number of saved rows."""
        self.old = rows.to(self.old.device, copy=True)
        self.new = nn.Parameter(self.old[:0].clone())

    def forward(self) -> Tensor:
        """All rows; only the newest receive gradients."""
        return torch.cat([self.old, self.new])


def match_keys(queries: Tensor, keys: Tensor, count: int, selection: Selection = "instance") -> tuple[Tensor, Tensor]:
    """The indices ``[B, count]`` of the keys of largest cosine for each query, and these cosines.

    With ``batch`` the whole batch uses the keys selected by most of its queries (in a tie, the first ones). The
    prediction for an image then depends on the other images of the batch.

    >>> keys = torch.eye(3)
    >>> queries = torch.tensor([[3.0, 1.0, 0.0], [2.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    >>> match_keys(queries, keys, 1)[0].T, match_keys(queries, keys, 1, "batch")[0].T
    (tensor([[0, 0, 2]]), tensor([[0, 0, 0]]))
    """
    cosines = cosine_scores(queries, keys)
    indices = cosines.topk(count, dim=1).indices
    if selection == "batch":
        votes = torch.bincount(indices.flatten(), minlength=len(keys))
        indices = votes.argsort(descending=True, stable=True)[:count].expand(len(queries), -1)
    return indices, cosines.gather(1, indices)


@dataclass(frozen=True)
class PromptOptions(TrainingOptions):
    """Options of the prompt methods.

    Attributes:
        single_class_policy: how to handle a task of one class, whose cross-entropy is constant: ``official`` (train as
            usual; its row of the head remains random), ``skip`` (add the random row and no prompts) or
            ``prototype-row`` (train, then set the row to the mean feature of the class, with the mean norm of the
            trained rows).
    """

    learning_rate: float = 0.001
    weight_decay: float = 0.0
    batch_size: int = 24
    epochs: int = 10
    single_class_policy: Literal["official", "skip", "prototype-row"] = "official"


def by_dataset(
    cifar100: dict[str, Any], others: dict[str, Any], fallback: dict[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Presets by dataset. The authors published two; other datasets use the second, updated by ``fallback``."""
    unpublished = others | (fallback or {})
    return {
        "cifar100": cifar100,
        "imagenet-r": others,
        "cub200": unpublished,
        "imagenet-a": unpublished,
        "": unpublished,
    }


def uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Uniform random numbers between -1 and 1, the initial values of prompts and keys."""
    return torch.empty(*shape).uniform_(-1, 1, generator=generator)


class PromptMethod(Method):
    """Base class of methods with two forward passes: one for the query, and one with the prompts that it selects.

    Subclasses define the prompts (``new_prompts``), their values before the first task (``initialise``) and before each
    task (``begin_task``), and the prompts for a batch of queries in training and at inference.
    """

    options: PromptOptions
    prompts: nn.Module
    state = ("head", "learned")
    new_rows: ClassVar[Literal["truncated", "uniform"]] = "truncated"

    def setup(self) -> None:
        """Create the prompts, and a head without classes."""
        device = self.runtime.device
        self.prompts = self.new_prompts().eval().to(device)
        self.head = GrowingHead(self.vit.width, self.new_rows).to(device)
        # Whether cross-entropy has trained each row of the head.
        self.learned = torch.empty(0, dtype=torch.int64, device=device)

    @abstractmethod
    def new_prompts(self) -> nn.Module:
        """All prompts, not yet initialised; its children are growing parameters."""

    def initialise(self, task: Task) -> None:
        """Initialise what all tasks share; called once, with the first task."""

    def begin_task(self, task: Task) -> dict[str, Any]:
        """Add the prompts of a task before training, and return entries of the report."""
        return {}

    @abstractmethod
    def prompts_for_training(self, queries: Tensor) -> tuple[BlockHooks, Tensor | float]:
        """Prompts for a training batch, and an additional loss."""

    @abstractmethod
    def prompts_for(self, queries: Tensor) -> BlockHooks:
        """Prompts for a batch at inference."""

    def recipe(self, task: Task) -> Recipe:
        """The recipe of the training: a new Adam optimiser for each task."""
        return self.options.recipe("adam", schedules.constant, self.epochs_for(task))

    @classmethod
    def forward_passes(cls, options: Any, tasks: int) -> float:
        """One for the query and one with the prompts."""
        return 2

    def learn(self, task: Task) -> dict[str, Any]:
        """Train the prompts and the new rows of the head by cross-entropy over the classes of the task."""
        if not len(self.learned):
            self.initialise(task)
        single_class, policy = len(task.classes) == 1, self.options.single_class_policy
        rows = GrowingHead(self.vit.width, self.new_rows)
        rows.grow(len(task.classes), seeds.generator(task.seed, task.index, "head"))
        rows.to(self.runtime.device)
        report: dict[str, Any] = {"trained": not (single_class and policy == "skip")}
        if report["trained"]:
            report |= self.begin_task(task)
            report |= {"epochs": self.epochs_for(task), "losses": self._train(task, rows)}
        self.head.append(rows)
        self.learned = torch.cat([self.learned, self.learned.new_full((len(task.classes),), not single_class)])
        if policy == "prototype-row":
            self._set_prototype_rows(task)
        return report

    def _train(self, task: Task, rows: GrowingHead) -> list[float]:
        """Logits of other classes are masked, so only the rows of the task are computed and optimised."""

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            hooks, extra = self.prompts_for_training(self.features(images))
            logits = rows(self.vit(images, hooks)).float()
            return F.cross_entropy(logits, labels - task.classes.start) + extra

        return train([ParamGroup(self.prompts), ParamGroup(rows)], loss, task, self.recipe(task), self.runtime)

    def _set_prototype_rows(self, task: Task) -> None:
        """Set untrained rows to the mean feature of their class, with the mean norm of the trained rows.

        The norm is updated after every task; it is 1 until a row is trained.
        """
        weight, learned = self.head.weight.detach(), self.learned.bool()
        if len(task.classes) == 1:
            self.runtime.progress.start_phase("prototypes")
            features = [self.prompted(images) for images, _ in task.whole_image_batches(EVALUATION_BATCH)]
            weight[-1] = to_float64(torch.cat(features)).mean(0)
            self.head.bias.detach()[-1] = 0
        norm = weight[learned].norm(dim=1).mean() if learned.any() else 1.0
        weight[~learned] = F.normalize(weight[~learned], dim=1) * norm

    def prompted(self, images: Tensor) -> Tensor:
        """Features of network inputs with their prompts, without gradients."""
        with torch.no_grad():
            return self.features(images, self.prompts_for(self.features(images)))

    def scores(self, images: Tensor) -> Tensor:
        """Logits of all classes seen so far."""
        with torch.no_grad():
            logits: Tensor = self.head(self.prompted(images))
            return logits

    def state_dict(self) -> Tensors:
        """The prompts, the head, and which rows of the head are trained."""
        growing = {name: rows().detach() for name, rows in self.prompts.named_children()}
        fixed = {name: value.detach() for name, value in self.prompts.named_parameters(recurse=False)}
        return {**super().state_dict(), **add_prefix(_PROMPTS, growing | fixed)}

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state of any number of tasks."""
        super().load_state_dict(state)
        prompts = select_prefix(_PROMPTS, state)
        for name, rows in self.prompts.named_children():
            assert isinstance(rows, GrowingParameter)
            rows.load_rows(prompts[name])
        for name, value in self.prompts.named_parameters(recurse=False):
            value.data.copy_(prompts[name])
