# SPDX-License-Identifier: Apache-2.0
"""Device, precision and CPU threads of a run, and callbacks for its progress."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from onea import cpu
from onea.cpu import available_cores, oversubscribe_threads
from onea.distributed import Processes, join_processes
from onea.errors import OneaError
from onea.options import check_threads


class Progress:
    """Callbacks of a run, which do nothing by default; displays override those that they need."""

    def begin(self, record: Any) -> None:
        """A run starts or resumes; its record is updated in place after every task."""

    def start_task(self, task: int, tasks: int, name: str) -> None:
        """A task starts (counted from 0)."""

    def start_epoch(self, epoch: int, epochs: int, images: int) -> None:
        """An epoch over this many images starts."""

    def start_images(self, text: str, images: int) -> None:
        """Another phase over this many images starts, such as computing features."""

    def step(self, images: int) -> None:
        """This many more images of the epoch or phase are done."""

    def end_epoch(self, epoch: int, loss: float) -> None:
        """An epoch (counted from 0) ends; its mean loss."""

    def start_phase(self, text: str) -> None:
        """Another phase, without a known number of images, starts."""

    def remark(self, text: str) -> None:
        """A message about a run that was already finished."""

    def end_task(self, task: int, accuracy: float) -> None:
        """A task was learned and evaluated, with this accuracy in percent over all classes seen."""


NO_PROGRESS = Progress()


class CombinedProgress(Progress):
    """Forwards each call to several callbacks."""

    def __init__(self, *listeners: Progress) -> None:
        for name in (name for name in vars(Progress) if not name.startswith("_")):
            setattr(self, name, _call_each([getattr(listener, name) for listener in listeners]))


def _call_each(functions: list[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        for function in functions:
            function(*args, **kwargs)

    return call


@dataclass(frozen=True)
class Runtime:
    """Device, precision and threads of a run, without ``auto``.

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
        """The dtype of matrix products; fp8 affects only those with frozen weights."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    @property
    def fp8(self) -> bool:
        """Whether products with frozen weights are in FP8; everything else is as in bf16."""
        return self.precision == "fp8"

    @property
    def pixel_dtype(self) -> torch.dtype:
        """The dtype for resampling images: on a GPU float16, which rounds less than bf16."""
        return torch.float16 if self.device.type == "cuda" and self.precision != "fp32" else torch.float32

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Autocast matrix products to the chosen precision; losses, prototypes and merges stay in float32."""
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.precision != "fp32"):
            yield


def make_runtime(
    device: str = "auto", precision: str = "auto", threads: int = 0, progress: Progress | None = None
) -> Runtime:
    """Resolve ``auto`` settings for this machine and set the number of CPU threads (0: all available cores)."""
    processes, assigned = join_processes(device)
    check_threads(threads)
    resolved, precision = resolve_device(device, precision, assigned)
    count = threads or _omp_threads() or max(1, available_cores() // processes.count)
    if count > 1:
        oversubscribe_threads()
    torch.set_num_threads(count)
    return Runtime(resolved, precision, count, progress if progress and processes.is_main else Progress(), processes)


def resolve_device(device: str, precision: str, assigned: torch.device | None = None) -> tuple[torch.device, str]:
    """Resolve ``auto`` to a device and a precision; ``assigned`` is the device from a launcher.

    Raises:
        OneaError: the device is not available, or does not support the precision.
    """
    chosen = assigned or _find_device(device)
    if precision == "auto":
        precision = "bf16" if _has_bf16(chosen) else "fp32"
    if precision not in ("fp8", "bf16", "fp32"):
        raise OneaError(f"precision is '{precision}'; choose auto, fp8, bf16 or fp32.")
    if precision == "fp8" and not _has_fp8(chosen):
        raise OneaError("precision fp8 needs an NVIDIA GPU of compute capability 8.9 or later; use auto or bf16.")
    if precision == "bf16" and chosen.type == "cpu" and cpu.is_amx_broken():
        raise OneaError(
            "bf16 does not work on this machine: it reports AMX instructions that it does not have; use fp32, or set "
            f"{cpu.ISA_VARIABLE}=AVX512_CORE_BF16."
        )
    return chosen, precision


def _omp_threads() -> int:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() else 0


def _find_device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise OneaError(f"Device '{name}' is not available; try device=\"auto\".") from error
    return device


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and cpu.has_bf16()
