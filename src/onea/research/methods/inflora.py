# SPDX-License-Identifier: Apache-2.0
"""InfLoRA: interference-free low-rank adaptation, with DualGPM as the memory of input directions.

DualGPM describes the inputs of old tasks in each block by a subspace; the update of a new task acts only on the free
directions. It stores an orthonormal basis of the smaller of the two spaces: the used directions or, once these are
more than half of all, the free ones. All computations are in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from onea import schedules, seeds
from onea.learner.local_head import train_with_local_head
from onea.learner.optimisation import Recipe
from onea.learner.options import TrainingOptions
from onea.learner.tasks import Task
from onea.research.methods.contract import Method
from onea.research.methods.lora import FoldedUpdates, LowRank, LowRankUpdates, SecondMoments, SummedUpdates, check_rank
from onea.research.methods.presets import published
from onea.schema import Range
from onea.tensors import Tensors, eigh
from onea.vit.heads import GrowingHead

# Energy of a direction, with s the singular values of the second moment: s squared in the official code of InfLoRA, s
# in the paper on gradient projection memory.
Energy = Literal["published", "textbook"]
_PROJECTIONS = ("k", "v")  # InfLoRA does not update the queries
_BASIS = "basis."


@dataclass(frozen=True)
class Memory:
    """The used or the free input directions of one block.

    Attributes:
        basis: orthonormal columns, ``[width, directions]``.
        retain: whether they span the free space rather than the used one.
    """

    basis: Tensor
    retain: bool

    @property
    def used(self) -> int:
        """The number of directions used by old tasks."""
        return self.basis.shape[0] - self.basis.shape[1] if self.retain else self.basis.shape[1]

    def free(self) -> Tensor:
        """An orthonormal basis of the free directions, ``[width, free]``."""
        return self.basis if self.retain else _orthogonal_complement(self.basis)


def energy_threshold(epsilon: float, task: int, tasks: int | None) -> float:
    """Fraction of the energy that the memory must cover after a task (counted from 0): from ``epsilon`` towards 1.

    Without a known number of tasks it stays at ``epsilon``.

    >>> [round(energy_threshold(0.95, task, 10), 3) for task in (0, 5, 9)], energy_threshold(0.95, 5, None)
    ([0.95, 0.975, 0.995], 0.95)
    """
    if tasks is None:
        return epsilon
    return epsilon + (1 - epsilon) * min(task, tasks - 1) / tasks


def reduction_matrix(moment: Tensor, memory: Memory | None, rank: int) -> Tensor:
    """The frozen down-projection of a new task, ``[rank, width]``: the free directions with the most energy.

    The rows are the leading left singular vectors of the second moment in the free space, each with the norm
    ``1 / sqrt(3)`` of a Kaiming-uniform row. There are fewer than ``rank`` if fewer directions are free.
    """
    free = _free_basis(memory, moment)
    _, vectors = _eigh_descending(free.T @ moment @ moment @ free)
    return (free @ vectors[:, :rank]).T / math.sqrt(3)


def update_memory(memory: Memory | None, moment: Tensor, threshold: float, energy: Energy = "published") -> Memory:
    """The memory after a task with the second moment ``moment``; ``threshold`` is the :func:`energy_threshold`."""
    width = moment.shape[0]
    matrix = moment @ moment if energy == "published" else moment
    free = _free_basis(memory, moment)
    values, vectors = _eigh_descending(free.T @ matrix @ free)
    energies = values / matrix.trace()
    cumulative = energies.cumsum(0)
    directions = free @ vectors
    if memory is None:
        # As published: the first task stops before the direction that reaches the threshold, later tasks after it.
        count = max(1, int((cumulative < threshold).sum()))
        # The official code stores the used directions here but labels them as free.
        used, unused = directions[:, :count], directions[:, count:]
        return Memory(unused, retain=True) if 2 * count >= width else Memory(used, retain=False)
    residual = energies.sum() - (cumulative - energies)  # energy outside the memory before each direction is added
    if memory.retain:
        return Memory(directions[:, int((residual >= 1 - threshold).sum()) :], retain=True)
    used = torch.cat([memory.basis, directions[:, : int((1 - residual < threshold).sum())]], dim=1)
    return (
        Memory(_orthogonal_complement(used), retain=True) if 2 * used.shape[1] > width else Memory(used, retain=False)
    )


def _free_basis(memory: Memory | None, moment: Tensor) -> Tensor:
    return torch.eye(len(moment), dtype=moment.dtype) if memory is None else memory.free()


def _eigh_descending(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in descending order, clamped to zero, and eigenvectors as columns."""
    values, vectors = eigh((symmetric + symmetric.T) / 2)
    return values.flip(0).clamp_min(0), vectors.flip(1)


def _orthogonal_complement(basis: Tensor) -> Tensor:
    square: Tensor = torch.linalg.qr(basis, mode="complete")[0]
    return square[:, basis.shape[1] :]


@dataclass(frozen=True)
class InfLoRAOptions(TrainingOptions):
    """Options of InfLoRA.

    Attributes:
        rank: rank of the update of each task.
        epsilon: fraction of the input energy that the memory covers after the first task. It grows towards 1 over the
            tasks if their number is known.
        energy: energy of an input direction: ``published`` (squared singular values of the second moment, as in the
            official code) or ``textbook`` (the singular values, which stores more directions).
        schedule: learning rate schedule: ``late-cosine`` as published, whose last epoch still has a high rate if there
            are few, or ``cosine``.
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


def _published(epochs: int, epsilon: float) -> dict[str, Any]:
    return published(epochs, 5e-4, 128, 0.0, crop_scale=0.08, rank=10, epsilon=epsilon)


class InfLoRA(Method):
    """Keys and values use ``W + sum of A_t B_t``, where ``B_t`` avoids the input directions of old tasks.

    In the paper's notation ``B_t`` is the frozen down-projection (the dimensionality reduction matrix) and ``A_t`` the
    trained up-projection. A task of one class has no gradient: its ``A_t`` remains zero and its row of the head random,
    as in the official code, and its inputs are added to the memory.
    """

    title = "InfLoRA"
    paper = "https://arxiv.org/abs/2404.00228"
    trains = "a low-rank update of keys and values per task, a linear head per task"
    stores = "folded updates, heads and the input directions of old tasks"
    state = ("head",)
    Options = InfLoRAOptions
    base_learning_rate = 0.00083
    paper_presets: ClassVar = {
        "cifar100": _published(20, 0.95),
        "imagenet-r": _published(50, 0.98),
        # Not published: the settings of ImageNet-R.
        "cub200": _published(50, 0.98),
        "imagenet-a": _published(50, 0.98),
        "": _published(50, 0.98),
    }
    auto_preset: ClassVar = {"weight_decay": 0.0, "rank": 10, "schedule": "cosine"}
    options: InfLoRAOptions

    def setup(self) -> None:
        """Create updates of zero, a head without classes, and empty memories."""
        vit, device = self.vit, self.runtime.device
        check_rank(self.options.rank, vit)
        self.folded = FoldedUpdates(vit.depth, vit.width, _PROJECTIONS).to(device)
        self.head = GrowingHead(vit.width, "uniform").to(device)
        self.memories: list[Memory | None] = [None] * vit.depth

    def recipe(self, task: Task) -> Recipe:
        """Adam with the chosen learning rate schedule."""
        return self.options.recipe("adam", schedules.get_schedule(self.options.schedule), self.epochs_for(task))

    def learn(self, task: Task) -> dict[str, Any]:
        """Compute ``B_t``, train ``A_t``, fold the update into the weights, and add the inputs to the memory."""
        updates = self.new_updates(task)
        head = GrowingHead(self.vit.width, "uniform")
        head.grow(len(task.classes), seeds.generator(task.seed, task.index, "head"))
        recipe = self.recipe(task)
        hooks = SummedUpdates(self.folded, updates)
        losses = train_with_local_head(self.vit, hooks, head, task, recipe, self.runtime)
        self.folded.fold(updates)
        # Rows of old tasks are not optimised, so weight decay does not change them.
        self.head.append(head)
        threshold = energy_threshold(self.options.epsilon, task.index, self.plan.tasks if self.plan else None)
        moments = self._second_moments(task, "after")
        self.runtime.progress.start_phase("input directions")
        self.memories = [
            update_memory(memory, moment, threshold, self.options.energy)
            for memory, moment in zip(self.memories, moments, strict=True)
        ]
        return {
            "epochs": recipe.epochs,
            "losses": losses,
            "without_gradient": len(task.classes) == 1,
            "threshold": threshold,
            "directions_used": [memory.used for memory in self.memories if memory],
        }

    def new_updates(self, task: Task) -> LowRankUpdates:
        """Updates of all blocks, initialised as zero; ``B_t`` is frozen and shared by keys and values."""
        moments = self._second_moments(task, "before")
        self.runtime.progress.start_phase("free directions")
        downs = [
            reduction_matrix(moment, memory, self.options.rank).float()
            for moment, memory in zip(moments, self.memories, strict=True)
        ]
        blocks = [{name: LowRank(down, trains_down=False) for name in _PROJECTIONS} for down in downs]
        return LowRankUpdates(blocks).to(self.runtime.device)

    def scores(self, images: Tensor) -> Tensor:
        """Logits of the heads of all tasks."""
        with torch.no_grad():
            logits: Tensor = self.head(self.features(images, self.folded))
            return logits

    def state_dict(self) -> Tensors:
        """The folded updates, the heads, and the memory of each block."""
        memories = [memory for memory in self.memories if memory]
        return {
            **super().state_dict(),
            "folded": self.folded.weight,
            "retain": torch.tensor([memory.retain for memory in memories], dtype=torch.int64),
            **{f"{_BASIS}{block}": memory.basis.contiguous() for block, memory in enumerate(memories)},
        }

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state."""
        super().load_state_dict(state)
        self.folded.weight = state["folded"].to(self.runtime.device)
        retain = state["retain"].tolist()
        memories = [Memory(state[f"{_BASIS}{block}"].cpu(), bool(free)) for block, free in enumerate(retain)]
        self.memories = [*memories] if memories else [None] * self.vit.depth

    def _second_moments(self, task: Task, purpose: str) -> Tensor:
        """Second moments of the attention inputs of each block over augmented images, ``[depth, width, width]``."""
        self.runtime.progress.start_phase("second moments")
        recorder = SecondMoments(self.vit.depth, self.vit.width, self.folded)
        order, crops = (seeds.generator(task.seed, task.index, f"{name} {purpose}") for name in ("order", "crops"))
        for images, _ in task.train_batches(self.options.batch_size, self.options.crop_scale, order, crops):
            self.features(images, recorder)
        return recorder.means()
