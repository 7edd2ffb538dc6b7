# SPDX-License-Identifier: Apache-2.0
"""Runs across several processes (``accelerate launch``, ``torchrun``) and Ray clusters.

Each process uses the same stream, seeds and batches. A batch is sharded round-robin, image i to process i mod n, so
that the whole batch can be gathered in its order. A single process skips all communication."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onea.errors import OneaError, import_extra


@dataclass(frozen=True)
class Processes:
    """The rank of this process and the number of processes in the run."""

    rank: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and shows progress."""
        return self.rank == 0

    def shard(self, batch: Tensor) -> Tensor:
        """The shard of a batch for this process, padded with the last image to the same length everywhere."""
        if self.count == 1:
            return batch
        length = -(-len(batch) // self.count)
        shard = batch[self.rank :: self.count]
        return shard if len(shard) == length else torch.cat([shard, batch[-1:]])

    def gather(self, sharded: Tensor, total: int) -> Tensor:
        """The whole batch in its original order from the shards of all processes; gradients flow to the local shard.

        Every process must compute the same loss from it, and ``average`` the gradients afterwards.
        """
        if self.count == 1:
            return sharded
        parts: Tensor = _Gather.apply(sharded, self.rank, self.count)
        return parts.transpose(0, 1).flatten(0, 1)[:total]

    def average(self, modules: Iterable[nn.Module]) -> None:
        """Average gradients over all processes."""
        if self.count == 1:
            return
        for module in modules:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= self.count

    def sum(self, values: Tensor) -> Tensor:
        """Sum values over all processes."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Wait for all processes."""
        if self.count > 1:
            dist.barrier()


class _Gather(torch.autograd.Function):
    """All-gather and stack. All processes compute the same loss, so the backward pass needs no communication."""

    @staticmethod
    def forward(context: Any, shard: Tensor, rank: int, count: int) -> Tensor:
        context.rank, context.count = rank, count
        parts = [torch.empty_like(shard) for _ in range(count)]
        dist.all_gather(parts, shard.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Gradients are averaged, not summed, over processes later, hence the factor.
        return gradients[0][context.rank] * context.count, None, None


def is_main_process() -> bool:
    """Whether this process writes files and prints output: the first one of a launcher, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def join_processes(device: str) -> tuple[Processes, torch.device | None]:
    """Join the other processes of a launcher; also returns the device of this process, None without a launcher."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Processes(), None
    state = import_extra("accelerate", "research").PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
    atexit.register(_leave)
    local = torch.device("cpu") if state.device.type == "cpu" else state.device
    return Processes(state.process_index, state.num_processes), local


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def ray_cluster(address: str | None) -> Iterator[None]:
    """Connect to a Ray cluster, or start a local one, and disconnect afterwards; an existing connection is reused."""
    ray = import_ray()
    if ray.is_initialized():
        yield
        return
    settings: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        settings["include_dashboard"] = False
    try:
        ray.init(address=address or "local", **settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise OneaError(
            f"No Ray cluster answers at '{address}' ({reason}); start one with 'ray start --head'."
        ) from error
    except OSError as error:
        reason = " ".join(str(error).split())
        raise OneaError(f"Ray cannot start ({reason}); set RAY_TMPDIR to a short path that can be written.") from error
    try:
        yield
    finally:
        ray.shutdown()  # also cancels the remaining tasks


def import_ray() -> Any:
    """Import Ray without telemetry.

    Raises:
        OneaError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the future default, without the warning
    return import_extra("ray", "ray")
