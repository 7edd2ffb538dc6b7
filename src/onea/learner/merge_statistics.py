# SPDX-License-Identifier: Apache-2.0
"""Statistics of a task's images for Fisher merging and RegMean: one more pass with the trained adapter.

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

_GRADIENT_BATCH = 32  # gradients of single samples take memory: one matrix for each


def gram_matrices(vit: FrozenViT, adapters: Adapters, task: Task, runtime: Runtime) -> Tensors:
    """``gram.NAME``: the sum of ``x x^T`` over all inputs ``x`` of each linear layer with weight NAME, ``[in, in]``."""
    sums: Tensors = {}
    for images, _ in task.plain_batches(EVALUATION_BATCH):
        with torch.no_grad(), runtime.autocast(), _recorded(adapters) as seen:
            vit.forward_eager(images, adapters)  # compiled, it would call no hooks
        for name, (inputs, _) in seen.items():
            rows = inputs.float().flatten(0, -2)
            _add(sums, f"gram.{name}.weight", rows.T @ rows)
    return sums


def diagonal_fisher(vit: FrozenViT, adapters: Adapters, head: nn.Module, task: Task, runtime: Runtime) -> Tensors:
    """``fisher.NAME``: the squared gradient of every sample's log-likelihood under the local head, summed.

    Samples do not interact, so one backward pass of the summed loss holds every sample's own gradient: for a linear
    layer it is the product of what went in and the gradient of what came out, summed over the sample's tokens.
    A task of one class has the likelihood 1 whatever the weights: its Fisher information is zero.
    """
    sums: Tensors = {}
    for images, labels in task.plain_batches(_GRADIENT_BATCH):
        local = labels.to(runtime.device) - task.classes.start
        with torch.enable_grad(), runtime.autocast(), _recorded(adapters) as seen:
            loss = F.cross_entropy(head(vit.forward_eager(images, adapters)).float(), local, reduction="sum")
        gradients = torch.autograd.grad(loss, [outputs for _, outputs in seen.values()])
        for (name, (inputs, _)), gradient in zip(seen.items(), gradients, strict=True):
            own = torch.einsum("bno,bni->boi", gradient.float(), inputs.detach().float())
            _add(sums, f"fisher.{name}.weight", own.square().sum(0))
            _add(sums, f"fisher.{name}.bias", gradient.float().sum(1).square().sum(0))
    return sums


def _add(sums: Tensors, name: str, value: Tensor) -> None:
    value = to_float64(value.detach())
    sums[name] = sums[name] + value if name in sums else value


@contextmanager
def _recorded(adapters: Adapters) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Input and output of every linear layer of the adapters in the next pass, by the layer's name."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def recorder(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def record(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = (inputs[0], output)

        return record

    layers = [(name, layer) for name, layer in adapters.named_modules() if isinstance(layer, nn.Linear)]
    handles = [layer.register_forward_hook(recorder(name)) for name, layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
