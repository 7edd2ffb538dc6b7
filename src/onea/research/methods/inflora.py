# SPDX-License-Identifier: Apache-2.0
"""InfLoRA: every task trains a low-rank update that cannot disturb the inputs of old tasks, and folds it in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from onea import schedules, seeds
from onea.learner.local_head import train_with_local_head
from onea.learner.options import TrainingOptions
from onea.learner.tasks import StreamPlan, Task
from onea.research.methods.contract import Method
from onea.research.methods.lora import FoldedUpdates, LowRank, LowRankUpdates, SecondMoments, SummedUpdates, check_rank
from onea.runtime import Runtime
from onea.schema import Range
from onea.tensors import Tensors, eigh
from onea.vit.frozen import FrozenViT
from onea.vit.heads import GrowingHead

_PROJECTIONS = ("k", "v")  # InfLoRA leaves the queries alone
_BASIS = "basis."


@dataclass(frozen=True)
class InfLoRAOptions(TrainingOptions):
    """Options of InfLoRA.

    Attributes:
        rank: directions of the free input space that a task may use.
        epsilon: share of the input energy that the memory of old tasks holds after the first task; it grows towards 1
            over the planned tasks, and stays where no plan is known.
        energy: of an input direction: ``published`` (squared singular values of the second moment, as the official
            code) or ``textbook`` (the singular values themselves, which keeps more directions).
        schedule: of the learning rate: ``late-cosine`` as published, which ends a run of few epochs at a high rate, or
            the ordinary ``cosine``.
    """

    learning_rate: float = 5e-4
    weight_decay: float = 0.0
    batch_size: int = 128
    crop_scale: float = 0.08
    epochs: int = 20
    rank: int = 10
    epsilon: Annotated[float, Range(gt=0, lt=1)] = 0.95
    energy: Energy = "published"
    schedule: Literal["late-cosine", "cosine"] = "late-cosine"


def _recipe(epochs: int, epsilon: float) -> dict[str, Any]:
    return {
        "learning_rate": 5e-4,
        "weight_decay": 0.0,
        "batch_size": 128,
        "crop_scale": 0.08,
        "epochs": epochs,
        "rank": 10,
        "epsilon": epsilon,
    }


class InfLoRA(Method):
    """``W + sum of A_i B_i`` on keys and values; ``B_t`` avoids the input directions that old tasks used.

    Paper's names: ``B_t`` is the frozen down-projection (the dimensionality reduction matrix), ``A_t`` the trained
    up-projection. A task of one class has no gradient: its ``A_t`` stays zero and its head row random, as in the
    official code, while its inputs still join the memory. The report says so.
    """

    title = "InfLoRA"
    paper = "https://arxiv.org/abs/2404.00228"
    trains = "a low-rank update of keys and values per task, a linear head per task"
    stores = "folded updates, heads, the input directions of old tasks"
    Options = InfLoRAOptions
    base_learning_rate = 0.0013
    paper_presets: ClassVar = {
        "cifar100": _recipe(20, 0.95),
        "imagenet-r": _recipe(50, 0.98),
        # Not published: the settings of ImageNet-R.
        "cub200": _recipe(50, 0.98),
        "imagenet-a": _recipe(50, 0.98),
        "": _recipe(50, 0.98),
    }
    auto_preset: ClassVar = {"weight_decay": 0.0, "rank": 10, "schedule": "cosine"}
    options: InfLoRAOptions

    def __init__(self, vit: FrozenViT, options: InfLoRAOptions, runtime: Runtime, plan: StreamPlan | None = None):
        super().__init__(vit, options, runtime, plan)
        check_rank(options.rank, vit)
        self.folded = FoldedUpdates(vit.depth, vit.width, _PROJECTIONS).to(runtime.device)
        self.head = GrowingHead(vit.width, start="uniform").to(runtime.device)
        self.memories: list[Memory | None] = [None] * vit.depth

    def learn(self, task: Task) -> dict[str, Any]:
        """Choose where the task may act, train there, fold the result in, and remember the inputs it used."""
        updates = self.new_updates(task)
        head = GrowingHead(self.vit.width, start="uniform")
        head.grow(len(task.classes), seeds.generator(task.seed, task.index, "head"))
        recipe = self.options.recipe("adam", schedules.get_schedule(self.options.schedule), self.epochs_for(task))
        hooks = SummedUpdates(self.folded, updates)
        losses = train_with_local_head(self.vit, hooks, head, task, recipe, self.runtime)
        self.folded.fold(updates)
        # Heads of old tasks are out of the optimiser's reach, whatever the weight decay; they are only lined up.
        self.head.load_rows(
            torch.cat([self.head.weight.detach(), head.weight.detach()]),
            torch.cat([self.head.bias.detach(), head.bias.detach()]),
        )
        share = threshold(self.options.epsilon, task.index, self.plan.tasks if self.plan else None)
        moments = self._second_moments(task, "after")
        self.runtime.progress.note("input directions")
        self.memories = [
            remember(memory, moment, share, self.options.energy)
            for memory, moment in zip(self.memories, moments, strict=True)
        ]
        return {
            "epochs": recipe.epochs,
            "losses": losses,
            "without_gradient": len(task.classes) == 1,
            "threshold": share,
            "directions_used": [memory.used for memory in self.memories if memory],
        }

    def new_updates(self, task: Task) -> LowRankUpdates:
        """Zero updates of all blocks; what they read, ``B_t``, is common to keys and values and settled beforehand."""
        moments = self._second_moments(task, "before")
        self.runtime.progress.note("free directions")
        downs = [
            reduction(moment, memory, self.options.rank).float()
            for moment, memory in zip(moments, self.memories, strict=True)
        ]
        blocks = [{name: LowRank(down, trains_down=False) for name in _PROJECTIONS} for down in downs]
        return LowRankUpdates(blocks).to(self.runtime.device)

    def scores(self, images: Tensor) -> Tensor:
        """Logits of all heads, side by side."""
        with torch.no_grad():
            logits: Tensor = self.head(self.features(images, self.folded))
            return logits

    def state_dict(self) -> Tensors:
        """The folded updates, the heads, and the memory of each block."""
        known = [memory for memory in self.memories if memory]
        return {
            "folded": self.folded.weight,
            "head.weight": self.head.weight.detach(),
            "head.bias": self.head.bias.detach(),
            "retain": torch.tensor([memory.retain for memory in known], dtype=torch.int64),
            **{f"{_BASIS}{block}": memory.basis.contiguous() for block, memory in enumerate(known)},
        }

    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a saved state."""
        self.folded.weight = state["folded"].to(self.runtime.device)
        self.head.load_rows(state["head.weight"], state["head.bias"])
        retain = state["retain"].tolist()
        known = [Memory(state[f"{_BASIS}{block}"].cpu(), bool(kept)) for block, kept in enumerate(retain)]
        self.memories = [*known] if known else [None] * self.vit.depth

    def _second_moments(self, task: Task, purpose: str) -> Tensor:
        """Of the attention inputs of every block over training views of the task, ``[depth, width, width]``."""
        self.runtime.progress.note("second moments")
        watching = SecondMoments(self.vit.depth, self.vit.width, self.folded)
        order, crops = (seeds.generator(task.seed, task.index, f"{name} {purpose}") for name in ("order", "crops"))
        for images, _ in task.augmented_batches(self.options.batch_size, self.options.crop_scale, order, crops):
            self.features(images, watching)
        return watching.means()


# What counts as the energy of a direction, with s the singular values of the second moment: InfLoRA's code takes s
# squared, so the fourth power of the inputs' singular values; gradient projection memory as first described takes s.
Energy = Literal["published", "textbook"]


@dataclass(frozen=True)
class Memory:
    """The used or the free input directions of one block.

    Attributes:
        basis: orthonormal columns, ``[width, directions]``.
        retain: whether they span the free space; else they span the used one.
    """

    basis: Tensor
    retain: bool

    @property
    def used(self) -> int:
        """The number of directions that old tasks occupy."""
        return self.basis.shape[0] - self.basis.shape[1] if self.retain else self.basis.shape[1]

    def free(self) -> Tensor:
        """An orthonormal basis of the free directions, ``[width, free]``."""
        return self.basis if self.retain else _complement(self.basis)


def threshold(epsilon: float, task: int, tasks: int | None) -> float:
    """Fraction of the energy that the memory must hold after a task (counted from 0): grows from ``epsilon`` towards 1.

    Without a known number of tasks it stays at ``epsilon``.

    >>> [round(threshold(0.95, task, 10), 3) for task in (0, 5, 9)], threshold(0.95, 5, None)
    ([0.95, 0.975, 0.995], 0.95)
    """
    if tasks is None:
        return epsilon
    return epsilon + (1 - epsilon) * min(task, tasks - 1) / tasks


def reduction(moment: Tensor, memory: Memory | None, rank: int) -> Tensor:
    """The frozen down-projection of a new task, ``[rank, width]``: what it uses most among the free directions.

    The rows are the leading left singular vectors of the second moment's free part, each with the norm ``1 / sqrt(3)``
    of a Kaiming-uniform row. Fewer than ``rank`` come back when fewer directions are free.
    """
    free = _free(memory, moment)
    _, vectors = _leading(free.T @ moment @ moment @ free)
    return (free @ vectors[:, :rank]).T / math.sqrt(3)


def remember(memory: Memory | None, moment: Tensor, share: float, energy: Energy = "published") -> Memory:
    """The memory after a task whose inputs have the second moment ``moment``; ``share`` is its :func:`threshold`."""
    width = moment.shape[0]
    matrix = moment @ moment if energy == "published" else moment
    free = _free(memory, moment)
    values, vectors = _leading(free.T @ matrix @ free)
    energies = values / matrix.trace()
    gathered = energies.cumsum(0)
    directions = free @ vectors
    if memory is None:
        # As published the first task stops before the direction that would reach the share, later ones after it.
        count = max(1, int((gathered < share).sum()))
        # The official code keeps the used directions here, yet calls them free.
        used, rest = directions[:, :count], directions[:, count:]
        return Memory(rest, retain=True) if 2 * count >= width else Memory(used, retain=False)
    left = energies.sum() - (gathered - energies)  # energy still outside the memory before each direction joins it
    if memory.retain:
        return Memory(directions[:, int((left >= 1 - share).sum()) :], retain=True)
    used = torch.cat([memory.basis, directions[:, : int((1 - left < share).sum())]], dim=1)
    return Memory(_complement(used), retain=True) if 2 * used.shape[1] > width else Memory(used, retain=False)


def _free(memory: Memory | None, moment: Tensor) -> Tensor:
    return torch.eye(len(moment), dtype=moment.dtype) if memory is None else memory.free()


def _leading(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, largest first and never negative, with their vectors as columns."""
    values, vectors = eigh((symmetric + symmetric.T) / 2)
    return values.flip(0).clamp_min(0), vectors.flip(1)


def _complement(basis: Tensor) -> Tensor:
    square: Tensor = torch.linalg.qr(basis, mode="complete")[0]
    return square[:, basis.shape[1] :]
