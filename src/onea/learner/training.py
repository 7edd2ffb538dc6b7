# SPDX-License-Identifier: Apache-2.0
"""The training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onea import schedules, seeds
from onea.data.image_storage import PackedImages, Shard, whole
from onea.errors import OneaError
from onea.learner.step_graph import StepGraph
from onea.learner.tasks import Task
from onea.runtime import Runtime

Loss = Callable[..., Tensor]  # of images, their labels, and what else is drawn for them
Draw = Callable[[int, torch.Generator], Tensor]
Batches = Callable[[int, torch.Generator, Shard], Iterator[tuple[Tensor, Tensor]]]
Schedule = Callable[[int, int], float]
Optimiser = Literal["sgd", "adam", "adamw"]


@dataclass(frozen=True)
class Recipe:
    """The recipe of an optimisation: optimiser, rate, epochs and crops.

    Attributes:
        schedule: share of the learning rate in an epoch, given the epoch and their number.
    """

    learning_rate: float
    weight_decay: float
    batch_size: int
    epochs: int
    crop_scale: float
    optimiser: Optimiser = "sgd"
    schedule: Schedule = schedules.cosine


@dataclass(frozen=True)
class Trained:
    """A module to train, and the factor on its learning rate."""

    module: nn.Module
    rate: float = 1.0


def train(
    trained: Sequence[Trained],
    losses: Loss | Sequence[Loss],
    task: Task,
    recipe: Recipe,
    runtime: Runtime,
    *,
    before_step: Callable[[int], None] | None = None,
    after_step: Callable[[], None] | None = None,
    purpose: str = "",
    sharded: bool = False,
    batches: Batches | None = None,
    ends: Callable[[], bool] | None = None,
    recordable: bool = False,
    draw: Draw | None = None,
    epochs: range | None = None,
) -> list[float]:
    """Optimise every parameter that wants a gradient on a task, and return the mean loss of each epoch.

    Args:
        trained: the modules; they are left in evaluation mode.
        losses: each maps a batch of augmented images and their labels to a scalar. With several, every batch takes one
            step for each, in order, on a fresh forward pass.
        task: whose images are trained on.
        recipe: how to optimise.
        runtime: where to compute.
        before_step: called before each optimiser step with the number of its loss; may change gradients.
        after_step: called after each optimiser step; may change weights.
        purpose: tells apart several trainings of one task, so that their draws differ.
        sharded: where several processes share the run, give each loss this process's images and the labels of the whole
            batch; it gathers the features with ``runtime.processes``. Otherwise every process does everything.
        batches: what the losses get instead of random crops of the task's images: the batches of an epoch, given its
            number, what draws their order, and the shard.
        ends: asked after each epoch whether to stop there.
        recordable: the loss does the same to tensors at every step and nothing else, so that a GPU may record a step
            and repeat it by itself.
        draw: what else is drawn for every batch, on the device: given the number of its images and what draws, a row
            for each. The losses get it after the labels.
        epochs: those of the recipe that are trained here; by default all.

    Raises:
        OneaError: a loss is not finite.
    """
    losses = [losses] if callable(losses) else list(losses)
    records = recordable and len(losses) == 1 and not (before_step or after_step) and _can_record(recipe, runtime)
    optimiser = _optimiser(trained, recipe, runtime.device if records else None)
    order, crops = (seeds.generator(task.seed, task.index, name + purpose) for name in ("order", "crops"))
    # On the device: an upload at every step would make it wait for the host.
    more = torch.Generator(runtime.device).manual_seed(seeds.derive(task.seed, task.index, "patches" + purpose))
    shard = runtime.processes.shard if sharded else whole
    # Crops can be part of a recorded step where the images are on the device; elsewhere it gets them ready.
    in_step = records and batches is None and isinstance(task.images, PackedImages) and task.images.tier == "device"

    def with_draws(found: Iterable[tuple[Tensor, ...]], draw: Draw) -> Iterator[tuple[Tensor, ...]]:
        for *given, labels in found:
            yield *given, shard(draw(len(labels), more)), labels

    def batches_of(epoch: int) -> Iterable[tuple[Tensor, ...]]:
        found = images_of(epoch)
        return with_draws(found, draw) if draw else found

    def images_of(epoch: int) -> Iterable[tuple[Tensor, ...]]:
        if in_step:
            return task.drawn_batches(recipe.batch_size, recipe.crop_scale, order, crops)
        if batches:
            return batches(epoch, order, shard)
        return task.augmented_batches(recipe.batch_size, recipe.crop_scale, order, crops, shard)

    def step(*inputs: Tensor, number: int = 0) -> Tensor:
        *given, labels = inputs
        drawn = [given.pop()] if draw else []
        images = task.images.cropped(given[0], given[1], recipe.crop_scale) if in_step else given[0]
        # Before the pass: a recorded graph writes the next gradients where the last ones are.
        optimiser.zero_grad(set_to_none=True)
        with runtime.autocast():
            value = losses[number](images, labels, *drawn)
        value.backward()
        runtime.processes.average(item.module for item in trained)
        if before_step:
            before_step(number)
        optimiser.step()
        if after_step:
            after_step()
        return value.detach()  # stays on the device: reading it here would stall the pipeline

    epochs = range(recipe.epochs) if epochs is None else epochs
    graph = StepGraph(step, runtime.device) if records else None
    devices = [runtime.device] if runtime.device.type == "cuda" else []
    means = []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seeds.derive(task.seed, task.index, "dropout" + purpose))
        _set_training(trained, True)
        upcoming = batches_of(epochs.start)
        for epoch in epochs:
            runtime.progress.start_epoch(epoch, recipe.epochs, len(task))
            _set_rates(optimiser, recipe.schedule(epoch, recipe.epochs))
            values = []
            with graph.stream() if graph else contextlib.nullcontext():
                for inputs in upcoming:
                    values += [graph(*inputs)] if graph else [step(*inputs, number=n) for n in range(len(losses))]
                    runtime.progress.step(len(inputs[-1]))
                if epoch + 1 < epochs.stop:  # crops are drawn while the device is busy, before the host waits for it
                    upcoming = batches_of(epoch + 1)
                means.append(_checked_mean(torch.stack(values), len(losses), task, epoch))
            runtime.progress.end_epoch(epoch, means[-1])
            if ends and ends():
                break
        optimiser.zero_grad(set_to_none=True)  # a recording's gradients are in its memory, and would keep all of it
        _set_training(trained, False)
    return means


def _can_record(recipe: Recipe, runtime: Runtime) -> bool:
    """Whether steps of this kind can be recorded here; the other optimisers count theirs on the host."""
    return runtime.device.type == "cuda" and runtime.processes.count == 1 and recipe.optimiser == "sgd"


def _set_rates(optimiser: torch.optim.Optimizer, share: float) -> None:
    for group in optimiser.param_groups:
        rate = group["initial_lr"] * share
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _optimiser(
    trained: Sequence[Trained], recipe: Recipe, rates_on: torch.device | None = None
) -> torch.optim.Optimizer:
    """What takes the steps; its rates are numbers, or tensors on a device where steps are recorded there."""
    groups: list[dict[str, Any]] = []
    for item in trained:
        wanted = [parameter for parameter in item.module.parameters() if parameter.requires_grad]
        rate = recipe.learning_rate * item.rate
        now = rate if rates_on is None else torch.tensor(rate, device=rates_on)
        groups.append({"params": wanted, "lr": now, "initial_lr": rate})
    fused = all(item.device.type in ("cpu", "cuda") for group in groups for item in group["params"])
    if recipe.optimiser != "sgd":
        adam = torch.optim.AdamW if recipe.optimiser == "adamw" else torch.optim.Adam
        return adam(groups, weight_decay=recipe.weight_decay, fused=fused)
    return torch.optim.SGD(groups, momentum=0.9, weight_decay=recipe.weight_decay, fused=fused)


def _set_training(trained: Sequence[Trained], mode: bool) -> None:
    for item in trained:
        item.module.train(mode)


def _checked_mean(values: Tensor, losses: int, task: Task, epoch: int) -> float:
    broken = ~torch.isfinite(values)
    if broken.any():
        first = int(broken.int().argmax())
        raise OneaError(
            f"The loss became {values[first].item()} in task {task.index + 1}, epoch {epoch + 1}, "
            f"step {first // losses + 1}; lower the learning rate (--learning-rate)."
        )
    return float(values.double().mean())
