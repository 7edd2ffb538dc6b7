# SPDX-License-Identifier: Apache-2.0
"""Runs across several processes (``accelerate launch``, ``torchrun``) and Ray clusters; alone, nothing happens.

Each process uses the same stream, seeds and batches. A batch is sharded round-robin, position i to process i mod n, so
that the whole batch can be gathered in its order."""

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
    """This process's place among those that share the run."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and shows progress."""
        return self.rank == 0

    def shard(self, batch: Tensor) -> Tensor:
        """This process's shard of a batch, padded with the last image to the same length for every process."""
        if self.count == 1:
            return batch
        each = -(-len(batch) // self.count)
        own = batch[self.rank :: self.count]
        return own if len(own) == each else torch.cat([own, batch[-1:]])

    def gather(self, sharded: Tensor, total: int) -> Tensor:
        """The whole batch from the shards of all processes, in its order, with gradients to this process's own.

        Every process is to compute the same loss from it, and to ``average`` gradients afterwards.
        """
        if self.count == 1:
            return sharded
        parts: Tensor = _Gather.apply(sharded, self.rank, self.count)
        return parts.transpose(0, 1).flatten(0, 1)[:total]

    def average(self, modules: Iterable[nn.Module]) -> None:
        """Replace gradients by their mean over all processes."""
        if self.count == 1:
            return
        for module in modules:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= self.count

    def sum_of(self, values: Tensor) -> Tensor:
        """The sum of the values of all processes."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Wait for all processes."""
        if self.count > 1:
            dist.barrier()


class _Gather(torch.autograd.Function):
    """Everybody's tensor, stacked. All compute the same loss, so one's own gradient is known without asking."""

    @staticmethod
    def forward(context: Any, own: Tensor, rank: int, count: int) -> Tensor:
        context.rank, context.count = rank, count
        parts = [torch.empty_like(own) for _ in range(count)]
        dist.all_gather(parts, own.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Others contribute their own parts; their mean, not their sum, is taken later, hence the factor.
        return gradients[0][context.rank] * context.count, None, None


def is_main_process() -> bool:
    """Whether this process writes and speaks for all that a launcher started; true when alone."""
    return os.environ.get("RANK", "0") == "0"


def join_processes(device: str) -> tuple[Processes, torch.device | None]:
    """Join the processes that a launcher started, with the device it gives to this one; nothing when alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Processes(), None
    state = import_extra("accelerate", "research").PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
    atexit.register(_leave)
    own = torch.device("cpu") if state.device.type == "cpu" else state.device
    return Processes(state.process_index, state.num_processes), own


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def ray_cluster(address: str | None) -> Iterator[None]:
    """Join or start a cluster, and leave it; one that the caller has joined already is used and kept."""
    ray = import_ray()
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        quiet["include_dashboard"] = False
    try:
        ray.init(address=address or "local", **quiet)
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
        ray.shutdown()  # also ends the tasks that are left


def import_ray() -> Any:
    """Ray, or one sentence about how to get it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is to be sent anywhere
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray will do by itself, without its warning
    return import_extra("ray", "ray")
