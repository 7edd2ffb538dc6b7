# SPDX-License-Identifier: Apache-2.0
"""Device, precision and threads of a run, and listeners to its progress."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from onea import cpu
from onea.cpu import oversubscribe_threads
from onea.distributed import Processes, join_processes
from onea.errors import OneaError
from onea.options import check_threads


class Progress:
    """Listens to a run. This one ignores everything; a display overrides what it shows."""

    def begin(self, record: Any) -> None:
        """A run begins or is taken up again. The record stays up to date: what it holds grows with every task."""

    def start_task(self, task: int, tasks: int, name: str) -> None:
        """A task begins (counted from 0)."""

    def start_epoch(self, epoch: int, epochs: int, images: int) -> None:
        """An epoch over so many images begins."""

    def start_images(self, text: str, images: int) -> None:
        """Something else is done with so many images."""

    def step(self, images: int) -> None:
        """So many images were trained on, or done with."""

    def end_epoch(self, epoch: int, loss: float) -> None:
        """An epoch (counted from 0) is over; its mean loss."""

    def note(self, text: str) -> None:
        """Something other than training began."""

    def remark(self, text: str) -> None:
        """Something to know about a run that was finished before."""

    def end_task(self, task: int, accuracy: float) -> None:
        """A task was learned and evaluated; accuracy over all classes seen, in percent."""


NO_PROGRESS = Progress()
"""Where no one listens."""


class CombinedProgress(Progress):
    """Several listeners as one."""

    def __init__(self, *listeners: Progress) -> None:
        self._listeners = listeners

    def begin(self, record: Any) -> None:
        """Tell everyone."""
        for listener in self._listeners:
            listener.begin(record)

    def start_task(self, task: int, tasks: int, name: str) -> None:
        """Tell everyone."""
        for listener in self._listeners:
            listener.start_task(task, tasks, name)

    def start_epoch(self, epoch: int, epochs: int, images: int) -> None:
        """Tell everyone."""
        for listener in self._listeners:
            listener.start_epoch(epoch, epochs, images)

    def start_images(self, text: str, images: int) -> None:
        """Tell everyone."""
        for listener in self._listeners:
            listener.start_images(text, images)

    def step(self, images: int) -> None:
        """Tell everyone."""
        for listener in self._listeners:
            listener.step(images)

    def end_epoch(self, epoch: int, loss: float) -> None:
        """Tell everyone."""
        for listener in self._listeners:
            listener.end_epoch(epoch, loss)

    def note(self, text: str) -> None:
        """Tell everyone."""
        for listener in self._listeners:
            listener.note(text)

    def remark(self, text: str) -> None:
        """Tell everyone."""
        for listener in self._listeners:
            listener.remark(text)

    def end_task(self, task: int, accuracy: float) -> None:
        """Tell everyone."""
        for listener in self._listeners:
            listener.end_task(task, accuracy)


@dataclass(frozen=True)
class Runtime:
    """The resolved machine settings of a run.

    >>> Runtime(torch.device("cpu"), "bf16", threads=2).dtype
    torch.bfloat16
    """

    device: torch.device
    precision: str
    threads: int
    progress: Progress = field(default_factory=Progress)
    processes: Processes = field(default_factory=Processes)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of the big matrix products, but for those with frozen weights in fp8."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    @property
    def fp8(self) -> bool:
        """Whether products with frozen weights are in eight bits; all else is as in bf16."""
        return self.precision == "fp8"

    @property
    def pixel_dtype(self) -> torch.dtype:
        """The type in which images are resampled: float16 on a GPU in bf16, whose rounding is coarser."""
        return torch.float16 if self.device.type == "cuda" and self.precision != "fp32" else torch.float32

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Run matrix products in the chosen precision; losses, prototypes and merges stay in full precision."""
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.precision != "fp32"):
            yield


def make_runtime(
    device: str = "auto", precision: str = "auto", threads: int = 0, progress: Progress | None = None
) -> Runtime:
    """Resolve ``auto`` settings for this machine and apply the thread count (0: all cores we may use)."""
    processes, given = join_processes(device)
    check_threads(threads)
    chosen, precision = resolve_device(device, precision, given)
    count = threads or _asked_threads() or max(1, _cores() // processes.count)
    if count > 1:
        oversubscribe_threads()
    torch.set_num_threads(count)
    shown = progress if progress and processes.first else Progress()
    return Runtime(chosen, precision, count, shown, processes)


def resolve_device(device: str, precision: str, given: torch.device | None = None) -> tuple[torch.device, str]:
    """The device and precision that ``auto`` means here; ``given`` is what a launcher has chosen.

    Raises:
        OneaError: the device is not here, or there is no such precision.
    """
    chosen = given or _device(device)
    if precision == "auto":
        precision = "bf16" if _has_bf16(chosen) else "fp32"
    if precision not in ("fp8", "bf16", "fp32"):
        raise OneaError(f"precision is '{precision}'; choose auto, fp8, bf16 or fp32.")
    if precision == "fp8" and not _has_fp8(chosen):
        raise OneaError("precision fp8 needs an NVIDIA GPU of compute capability 8.9 or later; use auto or bf16.")
    if precision == "bf16" and chosen.type == "cpu" and cpu.is_amx_broken():
        raise OneaError(
            "bf16 does not work here: this machine announces AMX instructions that it does not have; use fp32, or set "
            f"{cpu.ISA_VARIABLE}=AVX512_CORE_BF16."
        )
    return chosen, precision


def _asked_threads() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")  # torch obeys it, so that nobody is surprised we do too
    return int(asked) if asked.isdigit() else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise OneaError(f"Device '{name}' cannot be used here; try device=\"auto\".") from error
    return device


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and cpu.has_bf16()
