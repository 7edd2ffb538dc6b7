# SPDX-License-Identifier: Apache-2.0
"""DualPrompt: general prompts shared by all tasks, and an expert prompt per task that is selected by its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from onea import seeds
from onea.learner.tasks import Task
from onea.research.methods.presets import published
from onea.research.methods.prompting import (
    GrowingParameter,
    PrefixPrompts,
    PromptMethod,
    PromptOptions,
    Selection,
    by_dataset,
    match_keys,
    uniform,
)
from onea.schema import Count, NotNegative, Range
from onea.vit.heads import cosine_scores


@dataclass(frozen=True)
class DualPromptOptions(PromptOptions):
    """Options of DualPrompt.

    Attributes:
        g_length: length of the keys and values of the general prompt.
        e_length: length of the keys and values of an expert prompt.
        g_blocks: number of blocks with the general prompt, counted from the first.
        e_blocks: number of blocks with an expert prompt, after those; at least one, at most the remaining blocks.
        pull: weight of the loss that pulls the key of the task to its queries.
        prompt_selection: select the expert prompt at inference per ``instance`` (nearest key) or per ``batch``, as in
            the official code (the prompt that most images of the batch select).
        eprompt_layout: ``correct``, or ``official`` to reproduce a bug of the PyTorch code: keys and values of expert
            prompts are mixed up along the batch, so that half of it gets only keys and the other half only values.
    """

    g_length: Count = 5
    e_length: Count = 5
    g_blocks: Annotated[int, Range(ge=0)] = 2
    e_blocks: Count = 3
    pull: NotNegative = 0.1
    prompt_selection: Selection = "instance"
    eprompt_layout: Literal["correct", "official"] = "correct"


class DualPrompts(nn.Module):
    """Prompts ``[blocks, key or value, length, width]``: a general one, and an expert prompt with a key per task."""

    def __init__(self, general: tuple[int, ...], expert: tuple[int, ...], width: int):
        super().__init__()
        self.general = nn.Parameter(torch.zeros(general))
        self.experts = GrowingParameter(*expert)
        self.keys = GrowingParameter(width)

    def add_expert(self, generator: torch.Generator) -> None:
        """Add an expert prompt, initialised as a copy of the last one (the first: uniform in (-1, 1)), and a key."""
        last = self.experts()[-1:].detach()
        random = uniform((1, *self.experts.old.shape[1:]), generator)
        self.experts.grow(last if len(last) else random)
        self.keys.grow(uniform((1, *self.keys.old.shape[1:]), generator))


class DualPrompt(PromptMethod):
    """Prefix prompts: a general prompt in the first blocks, an expert prompt of the task in the next blocks.

    Each task adds an expert prompt, so that only trained prompts are selected.
    """

    title = "DualPrompt"
    paper = "https://arxiv.org/abs/2204.04799"
    trains = "a general prompt, an expert prompt with a key per task, a linear head"
    stores = "the general prompt, an expert prompt and a key per task, and the head"
    Options = DualPromptOptions
    base_learning_rate = 0.0059
    options: DualPromptOptions
    prompts: DualPrompts
    paper_presets: ClassVar = by_dataset(cifar100=published(5, 0.001, 24, 0.0), others=published(10, 0.001, 24, 0.0))
    auto_preset: ClassVar = {"weight_decay": 0.0}

    def new_prompts(self) -> DualPrompts:
        """The general prompt, and no expert prompts."""
        options, depth, width = self.options, self.vit.depth, self.vit.width
        first = min(options.g_blocks, depth - 1)  # leaves at least the last block for experts
        self.g_blocks = range(first)
        self.e_blocks = range(first, min(first + options.e_blocks, depth))
        general = (len(self.g_blocks), 2, options.g_length, width)
        expert = (len(self.e_blocks), 2, options.e_length, width)
        return DualPrompts(general, expert, width)

    def initialise(self, task: Task) -> None:
        """Initialise the general prompt."""
        general, generator = self.prompts.general, seeds.generator(task.seed, task.index, "general prompt")
        general.data.copy_(uniform(general.shape, generator))

    def begin_task(self, task: Task) -> dict[str, Any]:
        """Add the expert prompt of the task."""
        self.prompts.add_expert(seeds.generator(task.seed, task.index, "expert prompt"))
        return {"slots": len(self.prompts.keys)}

    def prompts_for_training(self, queries: Tensor) -> tuple[PrefixPrompts, Tensor]:
        """The expert prompt of the task for every image, and minus the cosine of its key to the queries."""
        experts = self.prompts.experts.new.expand(len(queries), -1, -1, -1, -1)
        return self._hooks(experts), -self.options.pull * cosine_scores(queries, self.prompts.keys.new).mean()

    def prompts_for(self, queries: Tensor) -> PrefixPrompts:
        """The expert prompt with the nearest key."""
        if not len(self.prompts.keys):  # all tasks so far were skipped
            return self._hooks(None)
        indices, _ = match_keys(queries, self.prompts.keys(), 1, self.options.prompt_selection)
        return self._hooks(self.prompts.experts()[indices[:, 0]])

    def _hooks(self, experts: Tensor | None) -> PrefixPrompts:
        """Prefixes of a batch, given its expert prompts ``[B, blocks, key or value, length, width]``."""
        by_block = {
            block: (k[None], v[None]) for block, (k, v) in zip(self.g_blocks, self.prompts.general, strict=True)
        }
        if experts is not None:
            by_block |= {
                block: _keys_and_values(experts[:, i], self.options.eprompt_layout)
                for i, block in enumerate(self.e_blocks)
            }
        return PrefixPrompts(self.vit.heads, by_block)


def _keys_and_values(expert: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, length, width]`` of one block's prompts ``[B, key or value, length, width]``."""
    if layout == "official":  # gathered as [key or value, B, ...], then reshaped instead of transposed
        expert = expert.transpose(0, 1).reshape(expert.shape)
    return expert[:, 0], expert[:, 1]
