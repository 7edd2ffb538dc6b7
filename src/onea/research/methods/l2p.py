# SPDX-License-Identifier: Apache-2.0
"""L2P: a pool of prompts shared by all tasks; for each image, the prompts with the nearest keys are selected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from onea import seeds
from onea.errors import OneaError
from onea.learner.tasks import Task
from onea.research.methods.presets import published
from onea.research.methods.prompting import (
    InputPrompts,
    PromptMethod,
    PromptOptions,
    Selection,
    by_dataset,
    match_keys,
    uniform,
)
from onea.schema import Count, NotNegative


@dataclass(frozen=True)
class L2POptions(PromptOptions):
    """Options of L2P.

    Attributes:
        pool: number of prompts in the pool.
        prompt_length: number of tokens of each prompt.
        top_k: number of prompts selected per image.
        pull: weight of the loss that pulls the selected keys to the query.
        prompt_selection: select prompts per ``instance`` or per ``batch``. With ``batch``, as in the official code, all
            images of a batch use the prompts selected most often in that batch, also at inference.
    """

    learning_rate: float = 0.001875
    batch_size: int = 32
    pool: Count = 10
    prompt_length: Count = 5
    top_k: Count = 5
    pull: NotNegative = 0.1
    prompt_selection: Selection = "instance"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.pool:
            raise OneaError(f"top_k is {self.top_k}; it must not exceed pool {self.pool}.")


class PromptPool(nn.Module):
    """Prompts ``[pool, length, width]`` and their keys ``[pool, width]``."""

    def __init__(self, pool: int, length: int, width: int):
        super().__init__()
        self.prompts = nn.Parameter(torch.zeros(pool, length, width))
        self.keys = nn.Parameter(torch.zeros(pool, width))


class L2P(PromptMethod):
    """Learning to prompt: input prompts selected from a pool, whose mean output is the feature.

    The pool does not separate tasks: the same prompts may be selected in all of them.
    """

    title = "L2P"
    paper = "https://arxiv.org/abs/2112.08654"
    trains = "a pool of input prompts with keys, a linear head"
    stores = "the pool and the head"
    Options = L2POptions
    base_learning_rate = 0.011
    options: L2POptions
    prompts: PromptPool
    paper_presets: ClassVar = by_dataset(
        cifar100=published(5, 0.001875, 16, 0.0), others=published(10, 0.001875, 32, 0.0)
    )
    auto_preset: ClassVar = {"weight_decay": 0.0}

    def new_prompts(self) -> PromptPool:
        """The pool."""
        return PromptPool(self.options.pool, self.options.prompt_length, self.vit.width)

    def initialise(self, task: Task) -> None:
        """Initialise the pool."""
        generator = seeds.generator(task.seed, task.index, "prompts")
        for parameter in self.prompts.parameters():
            parameter.data.copy_(uniform(parameter.shape, generator))

    def prompts_for_training(self, queries: Tensor) -> tuple[InputPrompts, Tensor]:
        """The selected prompts, and minus the weighted cosines of the selected keys, which only this loss trains."""
        indices, cosines = self._match(queries)
        return self._hooks(indices), -self.options.pull * cosines.sum(1).mean()

    def prompts_for(self, queries: Tensor) -> InputPrompts:
        """The selected prompts, as in training."""
        return self._hooks(self._match(queries)[0])

    def _match(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        return match_keys(queries, self.prompts.keys, self.options.top_k, self.options.prompt_selection)

    def _hooks(self, indices: Tensor) -> InputPrompts:
        return InputPrompts(self.vit, self.prompts.prompts[indices].flatten(1, 2))
