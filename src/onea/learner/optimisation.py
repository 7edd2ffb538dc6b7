# SPDX-License-Identifier: Apache-2.0
"""The training loop that all methods share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onea import schedules, seeds
from onea.data.image_storage import PackedImages, Shard, all_rows
from onea.errors import OneaError
from onea.learner.step_graph import StepGraph
from onea.learner.tasks import Task
from onea.runtime import Runtime

Loss = Callable[..., Tensor]  # (images, labels[, samples]) to a scalar
BatchSampler = Callable[[int, torch.Generator], Tensor]  # (number of images, generator) to one row per image
Batches = Callable[[int, torch.Generator, Shard], Iterator[tuple[Tensor, Tensor]]]
Schedule = Callable[[int, int], float]
Optimiser = Literal["sgd", "adam", "adamw"]


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of an optimisation.

    Attributes:
        schedule: factor on the learning rate, given the epoch and the number of epochs.
    """

    learning_rate: float
    weight_decay: float
    batch_size: int
    epochs: int
    crop_scale: float
    optimiser: Optimiser = "sgd"
    schedule: Schedule = schedules.cosine


@dataclass(frozen=True)
class ParamGroup:
    """A module to train, with a factor on its learning rate."""

    module: nn.Module
    lr_scale: float = 1.0


def train(
    groups: Sequence[ParamGroup],
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
    should_stop: Callable[[], bool] | None = None,
    capturable: bool = False,
    sampler: BatchSampler | None = None,
    epochs: range | None = None,
) -> list[float]:
    """Optimise all parameters that require a gradient on a task; returns the mean loss of each epoch.

    Args:
        groups: the modules; they are in evaluation mode afterwards.
        losses: each maps a batch of augmented images and their labels to a scalar. With several losses, every batch
            takes one step per loss, in order, each with a new forward pass.
        task: the training images.
        recipe: hyper-parameters.
        runtime: device and precision.
        before_step: called before each optimiser step with the number of its loss; may change gradients.
        after_step: called after each optimiser step; may change weights.
        purpose: part of the seed, if a task is trained several times.
        sharded: in distributed runs, call each loss with this process's images and the labels of the whole batch; the
            loss gathers the features with ``runtime.processes``. Otherwise every process computes everything.
        batches: inputs of the losses, if not random crops of the task's images: the batches of an epoch, given its
            number, the generator of their order, and the shard.
        should_stop: called after each epoch; True ends the training.
        capturable: whether the loss only computes with tensors, in the same way at every step, so that a step can be
            captured as a CUDA graph.
        sampler: samples another input of the losses for every batch, on the device; passed after the labels.
        epochs: the epochs of the recipe that are trained here; by default all.

    Raises:
        OneaError: a loss is not finite.
    """
    losses = [losses] if callable(losses) else list(losses)
    capture = capturable and len(losses) == 1 and not (before_step or after_step) and _can_capture(recipe, runtime)
    optimiser = _make_optimiser(groups, recipe, runtime.device if capture else None)
    order, crops = (seeds.generator(task.seed, task.index, name + purpose) for name in ("order", "crops"))
    # On the device, which would otherwise wait for an upload from the host in every step.
    sample_generator = torch.Generator(runtime.device)
    sample_generator.manual_seed(seeds.derive(task.seed, task.index, "patches" + purpose))
    shard = runtime.processes.shard if sharded else all_rows
    # A captured step includes the crops if the images are on the device.
    crop_in_step = (
        capture and batches is None and isinstance(task.images, PackedImages) and task.images.tier == "device"
    )

    def epoch_batches(epoch: int) -> Iterable[tuple[Tensor, ...]]:
        inputs: Iterable[tuple[Tensor, ...]]
        if crop_in_step:
            inputs = task.row_batches(recipe.batch_size, recipe.crop_scale, order, crops)
        elif batches:
            inputs = batches(epoch, order, shard)
        else:
            inputs = task.train_batches(recipe.batch_size, recipe.crop_scale, order, crops, shard)
        return add_samples(inputs, sampler) if sampler else inputs

    def add_samples(batches: Iterable[tuple[Tensor, ...]], sampler: BatchSampler) -> Iterator[tuple[Tensor, ...]]:
        for *inputs, labels in batches:
            yield *inputs, shard(sampler(len(labels), sample_generator)), labels

    def step(*batch: Tensor, number: int = 0) -> Tensor:
        *inputs, labels = batch
        sampled = [inputs.pop()] if sampler else []
        images = task.images.train_views(inputs[0], inputs[1], recipe.crop_scale) if crop_in_step else inputs[0]
        # Before the forward pass, because a captured graph writes all gradients to the same memory.
        optimiser.zero_grad(set_to_none=True)
        with runtime.autocast():
            loss = losses[number](images, labels, *sampled)
        loss.backward()
        runtime.processes.average(group.module for group in groups)
        if before_step:
            before_step(number)
        optimiser.step()
        if after_step:
            after_step()
        return loss.detach()  # on the device: reading it here would stall the pipeline

    epochs = range(recipe.epochs) if epochs is None else epochs
    graph = StepGraph(step, runtime.device) if capture else None
    devices = [runtime.device] if runtime.device.type == "cuda" else []
    mean_losses = []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seeds.derive(task.seed, task.index, "dropout" + purpose))
        for group in groups:
            group.module.train()
        upcoming = epoch_batches(epochs.start)
        for epoch in epochs:
            runtime.progress.start_epoch(epoch, recipe.epochs, len(task))
            _set_learning_rates(optimiser, recipe.schedule(epoch, recipe.epochs))
            step_losses = []
            with graph.stream() if graph else contextlib.nullcontext():
                for batch in upcoming:
                    step_losses += [graph(*batch)] if graph else [step(*batch, number=n) for n in range(len(losses))]
                    runtime.progress.step(len(batch[-1]))
                if epoch + 1 < epochs.stop:  # sample crops before the host waits for the device
                    upcoming = epoch_batches(epoch + 1)
                mean_losses.append(_checked_mean(torch.stack(step_losses), len(losses), task, epoch))
            runtime.progress.end_epoch(epoch, mean_losses[-1])
            if should_stop and should_stop():
                break
        optimiser.zero_grad(set_to_none=True)  # gradients would keep the memory of a captured graph
        for group in groups:
            group.module.eval()
    return mean_losses


def _can_capture(recipe: Recipe, runtime: Runtime) -> bool:
    """Whether steps can be CUDA graphs; optimisers other than SGD count their steps on the host."""
    return runtime.device.type == "cuda" and runtime.processes.count == 1 and recipe.optimiser == "sgd"


def _set_learning_rates(optimiser: torch.optim.Optimizer, factor: float) -> None:
    for group in optimiser.param_groups:
        rate = group["initial_lr"] * factor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _make_optimiser(
    groups: Sequence[ParamGroup], recipe: Recipe, rates_on: torch.device | None = None
) -> torch.optim.Optimizer:
    """The optimiser; its learning rates are numbers, or tensors on a device for captured steps."""
    options: list[dict[str, Any]] = []
    for group in groups:
        parameters = [parameter for parameter in group.module.parameters() if parameter.requires_grad]
        rate = recipe.learning_rate * group.lr_scale
        lr = rate if rates_on is None else torch.tensor(rate, device=rates_on)
        options.append({"params": parameters, "lr": lr, "initial_lr": rate})
    fused = all(item.device.type in ("cpu", "cuda") for group in options for item in group["params"])
    if recipe.optimiser != "sgd":
        adam = torch.optim.AdamW if recipe.optimiser == "adamw" else torch.optim.Adam
        return adam(options, weight_decay=recipe.weight_decay, fused=fused)
    return torch.optim.SGD(options, momentum=0.9, weight_decay=recipe.weight_decay, fused=fused)


def _checked_mean(values: Tensor, losses: int, task: Task, epoch: int) -> float:
    """The mean loss of an epoch, whose steps have several losses each; refuses losses that are not finite."""
    if not values.isfinite().all():
        first = int((~values.isfinite()).int().argmax())
        raise OneaError(
            f"The loss became {values[first].item()} in task {task.index + 1}, epoch {epoch + 1}, "
            f"step {first // losses + 1}; lower the learning rate (--learning-rate)."
        )
    return float(values.double().mean())
