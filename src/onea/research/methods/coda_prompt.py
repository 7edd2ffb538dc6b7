# SPDX-License-Identifier: Apache-2.0
"""CODA-Prompt: a prompt per image, a weighted sum of components; each task adds components and freezes the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea import schedules, seeds
from onea.errors import OneaError
from onea.learner.optimisation import Recipe
from onea.learner.tasks import Task
from onea.research.methods.presets import published
from onea.research.methods.prompting import GrowingParameter, PrefixPrompts, PromptMethod, PromptOptions, by_dataset
from onea.schema import Count, NotNegative
from onea.tensors import to_float64


@dataclass(frozen=True)
class CODAOptions(PromptOptions):
    """Options of CODA-Prompt.

    Attributes:
        components: number of prompt components M per block, for all tasks together.
        length: length of a component; the first half are keys, the second half values.
        blocks: number of blocks with prompts, counted from the first.
        orthogonality: weight of the orthogonality loss.
        allocation: number of components of a task: ``equal`` (M / T, as published) or ``proportional`` to its classes;
            at least one.
        schedule: learning rate schedule: ``late-cosine`` as published, whose last epoch still has a high rate if there
            are few, or ``cosine``.
    """

    batch_size: int = 128
    epochs: int = 50
    components: Count = 100
    length: int = 8
    blocks: Count = 5
    orthogonality: NotNegative = 0.0
    allocation: Literal["equal", "proportional"] = "equal"
    schedule: Literal["late-cosine", "cosine"] = "late-cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 2 or self.length % 2:
            raise OneaError(f"length is {self.length}; it must be even and at least 2 (half keys, half values).")


class Components(nn.Module):
    """A prompt ``[length, width]``, a key and an attention vector ``[width]`` per component and block."""

    def __init__(self, blocks: int, length: int, width: int):
        super().__init__()
        self.prompts = GrowingParameter(blocks, length, width)
        self.keys = GrowingParameter(blocks, width)
        self.attention = GrowingParameter(blocks, width)

    def __len__(self) -> int:
        return len(self.keys)

    def parts(self) -> list[GrowingParameter]:
        """Prompts, keys and attention vectors."""
        return [self.prompts, self.keys, self.attention]

    def grow(self, count: int, generator: torch.Generator) -> None:
        """Add components that are orthonormal, and orthogonal to all earlier ones, in each block."""
        for part in self.parts():
            old = part().detach().cpu()
            fresh = torch.randn(count, *old.shape[1:], generator=generator)
            blocks = [
                orthonormalise_rows(old[:, block].flatten(1), fresh[:, block].flatten(1))
                for block in range(old.shape[1])
            ]
            part.grow(torch.stack(blocks, dim=1).reshape(fresh.shape))

    def forward(self, queries: Tensor) -> Tensor:
        """The prompts ``[blocks, B, length, width]`` of each query: weighted sums over the components."""
        prompts, keys, attention = (part() for part in self.parts())
        with torch.autocast(queries.device.type, enabled=False):
            weighted = [
                torch.einsum("bk,kld->bld", component_weights(queries, attention[:, i], keys[:, i]), prompts[:, i])
                for i in range(keys.shape[1])
            ]
        return torch.stack(weighted)

    def penalty(self) -> Tensor:
        """Orthogonality loss of keys, attention vectors and prompts, summed over the blocks."""
        parts = [part() for part in self.parts()]
        with torch.autocast(parts[0].device.type, enabled=False):
            rows = [part[:, block].flatten(1) for part in parts for block in range(part.shape[1])]
            identity = torch.eye(len(self), device=rows[0].device)
            return torch.stack([(r @ r.T - identity).square().mean() for r in rows]).sum()


class CODAPrompt(PromptMethod):
    """Prefix prompts as weighted sums of components; requires the number of tasks in advance."""

    title = "CODA-Prompt"
    paper = "https://arxiv.org/abs/2211.13218"
    trains = "prompt components with keys and attention, a linear head"
    stores = "all components and the head"
    Options = CODAOptions
    base_learning_rate = 0.0083
    options: CODAOptions
    prompts: Components
    new_rows: ClassVar[Literal["truncated", "uniform"]] = "uniform"
    paper_presets: ClassVar = by_dataset(
        cifar100=published(20, 0.001, 128, 0.0, crop_scale=0.08),
        others=published(50, 0.001, 128, 0.0, crop_scale=0.08),
        fallback={"crop_scale": 0.05},
    )
    auto_preset: ClassVar = {"weight_decay": 0.0, "schedule": "cosine"}

    def new_prompts(self) -> Components:
        """An empty set of components; refuses a number that does not fit the network or the stream."""
        options, vit, plan = self.options, self.vit, self.plan
        if plan is not None and options.allocation == "equal" and plan.tasks > options.components:
            raise OneaError(
                f"components is {options.components}, too few for {plan.tasks} tasks; "
                f"give at least --components {plan.tasks}."
            )
        if options.components > vit.width:
            raise OneaError(
                f"components is {options.components}; it must not exceed the width {vit.width} of the backbone."
            )
        self.blocks = range(min(options.blocks, vit.depth))
        return Components(len(self.blocks), options.length, vit.width)

    def recipe(self, task: Task) -> Recipe:
        """Adam with the chosen learning rate schedule."""
        return self.options.recipe("adam", schedules.get_schedule(self.options.schedule), self.epochs_for(task))

    def begin_task(self, task: Task) -> dict[str, Any]:
        """Add the components of the task."""
        start, count = len(self.prompts), self._num_components(len(task.classes))
        if start + count > self.vit.width:
            raise OneaError(
                f"Task {task.index + 1} would need components {start + 1} to {start + count}, but only "
                f"{self.vit.width} can be orthogonal; lower --components."
            )
        self.prompts.grow(count, seeds.generator(task.seed, task.index, "components"))
        return {"components": [start, start + count]}

    def _num_components(self, classes: int) -> int:
        """Number of components for a task of this many classes."""
        if self.plan is None:
            raise OneaError(
                "CODA-Prompt divides its components among the tasks in advance, so it needs the number of tasks and "
                "classes; choose another method for a stream of unknown length."
            )
        if self.options.allocation == "proportional":
            return max(1, round(self.options.components * classes / self.plan.classes))
        return max(1, self.options.components // self.plan.tasks)

    def prompts_for_training(self, queries: Tensor) -> tuple[PrefixPrompts, Tensor | float]:
        """The prompt of each image, from all components; only those of the task receive gradients."""
        weight = self.options.orthogonality
        return self.prompts_for(queries), weight * self.prompts.penalty() if weight else 0.0

    def prompts_for(self, queries: Tensor) -> PrefixPrompts:
        """The prompt of each image, half keys and half values."""
        if not len(self.prompts):  # all tasks so far were skipped
            return PrefixPrompts(self.vit.heads, {})
        half = self.options.length // 2
        prompts = self.prompts(queries)
        by_block = {block: (p[:, :half], p[:, half:]) for block, p in zip(self.blocks, prompts, strict=True)}
        return PrefixPrompts(self.vit.heads, by_block)


def component_weights(queries: Tensor, attention: Tensor, keys: Tensor) -> Tensor:
    """Weight of each component, ``[B, components]``: the cosine of the attended query ``q * A_k`` to the key ``K_k``.

    Computed by two matrix products, without a tensor of shape ``[B, components, width]``.

    >>> component_weights(torch.tensor([[3.0, 4.0]]), torch.ones(2, 2), torch.tensor([[2.0, 0.0], [0.0, -1.0]]))
    tensor([[ 0.6000, -0.8000]])
    """
    dots = queries @ (attention * F.normalize(keys, dim=1)).T
    norms = (queries.square() @ attention.square().T).clamp_min(1e-24).sqrt()
    return dots / norms


def orthonormalise_rows(old: Tensor, fresh: Tensor) -> Tensor:
    """Rows of ``fresh`` made orthonormal and orthogonal to the span of ``old``, in float64.

    Trained rows are not orthogonal to each other, so QR is used instead of subtracting the projection on each row.

    >>> old, fresh = torch.tensor([[2.0, 0.0, 0.0], [1.0, 1.0, 0.0]]), torch.tensor([[5.0, 6.0, 7.0]])
    >>> orthonormalise_rows(old, fresh).abs().round()
    tensor([[0., 0., 1.]])
    """
    basis, upper = torch.linalg.qr(to_float64(torch.cat([old, fresh])).T)
    signs = upper.diagonal()[len(old) :].sign()  # the signs of Gram-Schmidt
    rows: Tensor = (basis[:, len(old) :] * signs).T
    return rows.to(fresh)
