# SPDX-License-Identifier: Apache-2.0
"""Gram matrices for RegMean and the diagonal Fisher information for Fisher merging: one more pass over a task's images.

Both are sums over samples, not means, so that a larger task weighs more in the merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.learner.tasks import Task
from onea.runtime import Runtime
from onea.tensors import Tensors, to_float64
from onea.vit.adapter import Adapters
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.frozen import FrozenViT

_GRADIENT_BATCH = 32  # per-sample gradients take memory: a matrix for each sample


def gram_matrices(vit: FrozenViT, adapters: Adapters, task: Task, runtime: Runtime) -> Tensors:
    """``gram.NAME``: ``sum x x^T`` over all inputs ``x`` of the linear layer with weight NAME, ``[in, in]``."""
    sums: Tensors = {}
    for images, _ in task.plain_batches(EVALUATION_BATCH):
        with torch.no_grad(), runtime.autocast(), _recorded(adapters) as layers:
            vit.forward_eager(images, adapters)  # the compiled network calls no hooks
        for name, (inputs, _) in layers.items():
            rows = inputs.float().flatten(0, -2)
            _add(sums, f"gram.{name}.weight", rows.T @ rows)
    return sums


def diagonal_fisher(vit: FrozenViT, adapters: Adapters, head: nn.Module, task: Task, runtime: Runtime) -> Tensors:
    """``fisher.NAME``: the squared gradient of each sample's log-likelihood under the local head, summed.

    Samples are independent, so one backward pass of the summed loss has every sample's gradient: for a linear layer,
    the product of its input and the gradient of its output, summed over the sample's tokens. A task of one class has
    the likelihood 1 for all weights, and Fisher information zero.
    """
    sums: Tensors = {}
    for images, labels in task.plain_batches(_GRADIENT_BATCH):
        local = labels.to(runtime.device) - task.classes.start
        with torch.enable_grad(), runtime.autocast(), _recorded(adapters) as layers:
            loss = F.cross_entropy(head(vit.forward_eager(images, adapters)).float(), local, reduction="sum")
        gradients = torch.autograd.grad(loss, [outputs for _, outputs in layers.values()])
        for (name, (inputs, _)), gradient in zip(layers.items(), gradients, strict=True):
            per_sample = torch.einsum("bno,bni->boi", gradient.float(), inputs.detach().float())
            _add(sums, f"fisher.{name}.weight", per_sample.square().sum(0))
            _add(sums, f"fisher.{name}.bias", gradient.float().sum(1).square().sum(0))
    return sums


def _add(sums: Tensors, name: str, value: Tensor) -> None:
    value = to_float64(value.detach())
    sums[name] = sums[name] + value if name in sums else value


@contextmanager
def _recorded(adapters: Adapters) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Input and output of each linear layer of the adapters in the next forward pass, by the layer's name."""
    layers: dict[str, tuple[Tensor, Tensor]] = {}

    def recorder(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def record(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            layers[name] = (inputs[0], output)

        return record

    linear = [(name, layer) for name, layer in adapters.named_modules() if isinstance(layer, nn.Linear)]
    handles = [layer.register_forward_hook(recorder(name)) for name, layer in linear]
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()
