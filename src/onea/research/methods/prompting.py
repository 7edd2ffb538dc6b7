# SPDX-License-Identifier: Apache-2.0
"""Base of L2P, DualPrompt and CODA-Prompt: a query, prompts chosen by it, and a head that grows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import schedules, seeds
from onea.learner.options import TrainingOptions
from onea.learner.tasks import StreamPlan, Task
from onea.learner.training import ParamGroup, Recipe, train
from onea.research.methods.contract import Method
from onea.runtime import Runtime
from onea.tensors import Tensors, select_prefix, to_float64
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.frozen import FrozenViT
from onea.vit.heads import GrowingHead, cosine_scores
from onea.vit.hooks import BlockHooks

_PROMPTS = "prompts."
Selection = Literal["instance", "batch"]


class InputPrompts(BlockHooks):
    """Extra input tokens ``[B or 1, length, width]`` between class token and patches; their outputs are the feature.

    They sit where the class token sits: they take its position vector, and the frozen patches keep their own.
    """

    compilable = True

    def __init__(self, vit: FrozenViT, prompts: Tensor):
        self._vit, self._prompts = vit.vit, prompts
        self._start = 0 if vit.vit.cls_token is None else 1
        self.extra_tokens = prompts.shape[1]

    def tokens(self, x: Tensor, vit: FrozenViT) -> Tensor:
        """Insert the prompts behind the class token."""
        prompts = self._prompts.to(x.dtype)
        if self._start and self._vit.pos_embed is not None and not self._vit.no_embed_class:
            prompts = prompts + self._vit.pos_embed[:, :1]
        prompts = prompts.expand(len(x), -1, -1)
        return torch.cat([x[:, : self._start], prompts, x[:, self._start :]], dim=1)

    def pool(self, x: Tensor) -> Tensor:
        """The mean of the prompts' outputs, in place of the class token."""
        stop = self._start + self._prompts.shape[1]
        # The second norm is of networks that pool by mean; in all others it is the identity.
        features: Tensor = self._vit.fc_norm(x[:, self._start : stop].mean(1))
        return features


class PrefixPrompts(BlockHooks):
    """Keys and values put in front of those of some blocks: by block, both ``[B or 1, length, width]``.

    They come after the projections, so that neither the sequence nor its queries change. A block that has none
    runs as it is: a prefix of zeros would not be none, for it takes its share of the attention.
    """

    whole_sequence = False
    compilable = True

    def __init__(self, heads: int, by_block: Mapping[int, tuple[Tensor, Tensor]]):
        self._heads, self._by_block = heads, by_block

    def prefix(self, block: int) -> tuple[Tensor, Tensor] | None:
        """The block's keys and values, split into heads."""
        if block not in self._by_block:
            return None
        keys, values = self._by_block[block]
        return self._split(keys), self._split(values)

    def _split(self, prompts: Tensor) -> Tensor:
        batch, length, width = prompts.shape
        return prompts.reshape(batch, length, self._heads, width // self._heads).transpose(1, 2)


class Growing(nn.Module):
    """Rows of one shape to which every task adds its own; only the newest can be trained.

    The older rows are no parameters, so no gradient, weight decay or momentum of a later task reaches them.
    """

    old: Tensor

    def __init__(self, *shape: int):
        super().__init__()
        self.register_buffer("old", torch.empty(0, *shape))
        self.new = nn.Parameter(torch.empty(0, *shape))

    def __len__(self) -> int:
        return len(self.old) + len(self.new)

    def grow(self, rows: Tensor) -> None:
        """Settle the rows so far and add new ones."""
        self.old = torch.cat([self.old, self.new.detach()])
        self.new = nn.Parameter(rows.to(self.old.device, copy=True))

    def load_rows(self, rows: Tensor) -> None:
        """Take saved rows back, however many they are."""
        self.old = rows.to(self.old.device, copy=True)
        self.new = nn.Parameter(self.old[:0].clone())

    def forward(self) -> Tensor:
        """All rows; gradients flow to the newest alone."""
        return torch.cat([self.old, self.new])


@dataclass(frozen=True)
class Match:
    """The keys chosen for each query of a batch, and how well they fit.

    Attributes:
        chosen: their numbers, ``int64 [B, count]``.
        cosines: of each query to its chosen keys, ``[B, count]``.
    """

    chosen: Tensor
    cosines: Tensor

    def pull(self) -> Tensor:
        """How close queries and their keys are: the sum over the chosen keys, the mean over the batch."""
        return self.cosines.sum(1).mean()


def match_keys(queries: Tensor, keys: Tensor, count: int, selection: Selection = "instance") -> Match:
    """Choose the ``count`` keys of largest cosine for each query.

    With ``batch`` the whole batch shares the keys that most of its queries chose (of equally many, the first ones); the
    answer for one image then depends on its neighbours.

    >>> keys = torch.eye(3)
    >>> queries = torch.tensor([[3.0, 1.0, 0.0], [2.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    >>> match_keys(queries, keys, 1).chosen.T
    tensor([[0, 0, 2]])
    >>> match_keys(queries, keys, 1, "batch").chosen.T
    tensor([[0, 0, 0]])
    """
    cosines = cosine_scores(queries, keys)
    chosen = cosines.topk(count, dim=1).indices
    if selection == "batch":
        votes = torch.bincount(chosen.flatten(), minlength=len(keys))
        chosen = votes.argsort(descending=True, stable=True)[:count].expand(len(queries), -1)
    return Match(chosen, cosines.gather(1, chosen))


@dataclass(frozen=True)
class PromptOptions(TrainingOptions):
    """Options of the methods that prompt.

    Attributes:
        single_class_policy: what a task of one class does, which cross-entropy cannot teach: ``official`` (train as
            ever: its row of the head stays random), ``skip`` (add the random row and no prompts) or ``prototype-row``
            (train, then make the row the class's mean feature, as long as the trained rows are on average).
    """

    learning_rate: float = 0.001
    weight_decay: float = 0.0
    batch_size: int = 24
    epochs: int = 10
    single_class_policy: Literal["official", "skip", "prototype-row"] = "official"


def by_dataset(
    cifar100: dict[str, Any], others: dict[str, Any], fallback: dict[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """A table by dataset: the authors configure two of ours; the rest take the second, changed by ``fallback``."""
    rest = others | (fallback or {})
    return {"cifar100": cifar100, "imagenet-r": others, "cub200": rest, "imagenet-a": rest, "": rest}


class PromptMethod(Method):
    """Two passes: the plain network turns an image into a query, the query into prompts, and the prompts into scores.

    A method says what it draws at the very start (``start``), what a task adds (``begin``), and which prompts a batch
    of queries gets while training and later.
    """

    options: PromptOptions
    prompts: nn.Module
    new_rows: ClassVar[Literal["truncated", "uniform"]] = "truncated"

    def __init__(self, vit: FrozenViT, options: PromptOptions, runtime: Runtime, plan: StreamPlan | None = None):
        super().__init__(vit, options, runtime, plan)
        self.head = GrowingHead(vit.width, self.new_rows).to(runtime.device)
        self.learned = torch.empty(0, dtype=torch.bool)  # by row of the head: did cross-entropy train it?

    def start(self, task: Task) -> None:
        """Draw what all tasks share; called once, with the first task."""

    def begin(self, task: Task) -> dict[str, Any]:
        """Add what belongs to a task before it is trained, and return what to record of it."""
        return {}

    @abstractmethod
    def prompts_for_training(self, queries: Tensor) -> tuple[BlockHooks, Tensor | float]:
        """Prompts for a training batch, and what they add to the loss."""

    @abstractmethod
    def prompts_for(self, queries: Tensor) -> BlockHooks:
        """Prompts for a batch of unknown task."""

    @abstractmethod
    def prompt_state(self) -> Tensors:
        """The prompts that survive between tasks."""

    @abstractmethod
    def load_prompt_state(self, state: Tensors) -> None:
        """Take saved prompts back, however many they are."""

    def recipe(self, task: Task) -> Recipe:
        """How a task is optimised: a new Adam for every task."""
        return self.options.recipe("adam", schedules.constant, self.epochs_for(task))

    @classmethod
    def forward_passes(cls, options: Any, tasks: int) -> float:
        """One for the query and one for the answer."""
        return 2

    def learn(self, task: Task) -> dict[str, Any]:
        """Train the task's prompts and its rows of the head by cross-entropy over its own classes."""
        if not len(self.learned):
            self.start(task)
        single, policy = len(task.classes) == 1, self.options.single_class_policy
        rows = GrowingHead(self.vit.width, self.new_rows)
        rows.grow(len(task.classes), seeds.generator(task.seed, task.index, "head"))
        rows.to(self.runtime.device)
        report: dict[str, Any] = {"trained": not (single and policy == "skip")}
        if report["trained"]:
            report |= self.begin(task)
            report |= {"epochs": self.epochs_for(task), "losses": self._train(task, rows)}
        weight, bias = torch.cat([self.head.weight, rows.weight]), torch.cat([self.head.bias, rows.bias])
        self.head.load_rows(weight.detach(), bias.detach())
        self.learned = torch.cat([self.learned, torch.full((len(task.classes),), not single)])
        if policy == "prototype-row":
            self._set_prototype_rows(task)
        return report

    def _train(self, task: Task, rows: GrowingHead) -> list[float]:
        """Masking all other classes leaves the task's own rows, so only they are made and optimised."""

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            hooks, extra = self.prompts_for_training(self.features(images))
            logits = rows(self.vit(images, hooks)).float()
            return F.cross_entropy(logits, labels - task.classes.start) + extra

        return train([ParamGroup(self.prompts), ParamGroup(rows)], loss, task, self.recipe(task), self.runtime)

    def _set_prototype_rows(self, task: Task) -> None:
        """Untrained rows point to their class's mean feature and are as long as the trained rows on average.

        The trained rows may come later, so the length is set again after every task; without any it is one.
        """
        weight, learned = self.head.weight.detach(), self.learned.to(self.runtime.device)
        if len(task.classes) == 1:
            self.runtime.progress.note("prototypes")
            features = [self.prompted(images) for images, _ in task.plain_batches(EVALUATION_BATCH)]
            weight[-1] = to_float64(torch.cat(features)).mean(0)
            self.head.bias.detach()[-1] = 0
        length = weight[learned].norm(dim=1).mean() if learned.any() else 1.0
        weight[~learned] = F.normalize(weight[~learned], dim=1) * length

    def prompted(self, images: Tensor) -> Tensor:
        """Features of network inputs with their prompts, for inference."""
        with torch.no_grad():
            return self.features(images, self.prompts_for(self.features(images)))

    def scores(self, images: Tensor) -> Tensor:
        """Logits of all classes seen."""
        with torch.no_grad():
            logits: Tensor = self.head(self.prompted(images))
            return logits

    def state_dict(self) -> Tensors:
        """The prompts, the head, and which of its rows were trained."""
        return {
            **{_PROMPTS + name: value.detach() for name, value in self.prompt_state().items()},
            "head.weight": self.head.weight.detach(),
            "head.bias": self.head.bias.detach(),
            "learned": self.learned.long(),
        }

    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a saved state."""
        self.load_prompt_state(select_prefix(_PROMPTS, state))
        self.head.load_rows(state["head.weight"], state["head.bias"])
        self.learned = state["learned"].bool().cpu()
