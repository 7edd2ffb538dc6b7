"""The one training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onea import seeds
from onea.errors import OneaError
from onea.runtime import Runtime
from onea.schedules import cosine
from onea.tasks import Task

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SGD:
    """How to optimise: SGD with momentum, the learning rate following a cosine over the epochs."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    epochs: int
    crop_scale: float
    momentum: float = 0.9


def train(modules: Sequence[nn.Module], loss: Loss, task: Task, recipe: SGD, runtime: Runtime) -> list[float]:
    """Optimise every parameter of ``modules`` on a task and return the mean loss of each epoch.

    ``loss`` maps a batch of augmented images and labels to a scalar. The modules are left in evaluation mode.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimiser = torch.optim.SGD(
        parameters, recipe.learning_rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    order, crops = (seeds.generator(task.seed, task.index, purpose) for purpose in ("order", "crops"))
    devices = [runtime.device] if runtime.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seeds.derive(task.seed, task.index, "dropout"))
        _set_training(modules, True)
        means = []
        for epoch in range(recipe.epochs):
            runtime.progress.start_epoch(epoch, recipe.epochs, len(task))
            for group in optimiser.param_groups:
                group["lr"] = recipe.learning_rate * cosine(epoch, recipe.epochs)
            losses = []
            for images, labels in task.augmented_batches(recipe.batch_size, recipe.crop_scale, order, crops):
                with runtime.autocast():
                    value = loss(images, labels.to(runtime.device, non_blocking=True))
                optimiser.zero_grad(set_to_none=True)
                value.backward()
                optimiser.step()
                losses.append(value.detach())  # stays on the device: reading it here would stall the pipeline
                runtime.progress.step(len(labels))
            means.append(_checked_mean(torch.stack(losses), task, epoch))
        _set_training(modules, False)
    return means


def _set_training(modules: Sequence[nn.Module], mode: bool) -> None:
    for module in modules:
        module.train(mode)


def _checked_mean(losses: Tensor, task: Task, epoch: int) -> float:
    broken = ~torch.isfinite(losses)
    if broken.any():
        step = int(broken.int().argmax())
        raise OneaError(
            f"The loss became {losses[step].item()} in task {task.index + 1}, epoch {epoch + 1}, step {step + 1}; "
            "lower the learning rate (--learning-rate)."
        )
    return float(losses.double().mean())
