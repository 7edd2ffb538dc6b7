# SPDX-License-Identifier: Apache-2.0
"""Would several seeds at once pay? One network, stacked adapters, against one seed after the other.

    python benchmarks/batch_seeds.py [--device cuda] [--backbone vit_base_patch16_224] [--seeds 5]

The backbone is frozen, so runs that share it could share its matrix products: a batch of ``seeds x size`` images goes
through it once, and each seed's images meet their own adapter in a batched product. This measures a training step's
forward and backward pass that way and one seed at a time, both compiled and both in bf16 where the device has it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.runtime import Runtime, make_runtime
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT
from onea.vit.hooks import BlockHooks

RANK, SCALE = 128, 0.1


class StackedAdapters(BlockHooks):
    """Adapters of several seeds; images come seed by seed."""

    whole_sequence = False

    def __init__(self, weights: list[tuple[Tensor, ...]]):
        self._weights = weights

    def mlp_update(self, block: int, u: Tensor) -> Tensor:
        """Each seed's images through its own adapter."""
        down, down_bias, up, up_bias = self._weights[block]
        grouped = u.reshape(len(down), -1, u.shape[-1])
        hidden = F.relu(torch.baddbmm(down_bias[:, None].to(u.dtype), grouped, down.mT.to(u.dtype)))
        return torch.baddbmm(up_bias[:, None].to(hidden.dtype), hidden, up.mT.to(hidden.dtype)).reshape(u.shape) * SCALE


def make_vit(name: str, runtime: Runtime) -> FrozenViT:
    """A network with random weights: speed does not depend on them."""
    import timm

    vit = FrozenViT(timm.create_model(name, num_classes=0), name, "", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    return vit.keep_matrices_in(runtime.dtype).to(runtime.device)


def median_step(step: Any, runtime: Runtime, repeats: int = 20) -> float:
    """Seconds of a step after warm-up."""

    def now() -> float:
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(4):
        step()
    times = []
    for _ in range(repeats):
        started = now()
        step()
        times.append(now() - started)
    return statistics.median(times)


def main() -> None:
    """Print seconds and the gain for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backbone", default="vit_base_patch16_224")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 24, 48])
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    runtime = make_runtime(given.device)
    vit = make_vit(given.backbone, runtime)
    one = Adapters(vit.depth, vit.width, RANK, generator=torch.Generator(), dropout=0.0).to(runtime.device)
    alone = [tuple(adapter.weights()) for adapter in one.each()]
    single = [tuple(part[None].detach().requires_grad_() for part in each) for each in alone]
    stacked = [tuple(torch.stack([part] * given.seeds).detach().requires_grad_() for part in each) for each in alone]

    def run(images: Tensor, weights: list[tuple[Tensor, ...]]) -> Tensor:
        return vit.forward_eager(images, StackedAdapters(weights))

    compiled: Any = torch.compile(run, dynamic=False, mode="reduce-overhead")
    for size in given.sizes:
        images = torch.randn(given.seeds * size, 3, vit.size, vit.size, device=runtime.device)

        def step(images: Tensor, weights: list[tuple[Tensor, ...]]) -> None:
            with runtime.autocast():
                loss = compiled(images, weights).square().mean()
            torch.autograd.grad(loss, [part for each in weights for part in each])

        together = median_step(lambda i=images: step(i, stacked), runtime, given.repeats)
        apart = median_step(lambda i=images, n=size: step(i[:n].clone(), single), runtime, given.repeats)
        gain = apart * given.seeds / together
        print(f"batch {size}: {given.seeds} seeds one by one {1e3 * apart * given.seeds:.1f} ms, ", end="")
        print(f"at once {1e3 * together:.1f} ms, gain {gain:.2f}x", flush=True)


if __name__ == "__main__":
    main()
