# SPDX-License-Identifier: Apache-2.0
"""What a bench is told: the options of ``onea bench``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from onea.errors import OneaError
from onea.options import check_threads
from onea.research.runs.config import RunConfig
from onea.vit.embedded import full_name

if TYPE_CHECKING:  # `onea --help` needs no torch
    import torch

    from onea.runtime import Runtime

CLASSES = 8  # a power of two, so that usual batches come out even: a last batch of two images would cost as much
_HOUR = 3_600  # seconds
_BOUNDS = (("rank", 1, 65_536), ("batch", 1, 65_536), ("workers", 0, 256), ("tasks", 0, 10_000))


@dataclass(frozen=True)
class BenchConfig:
    """Configuration of a bench.

    Attributes:
        backbone: embedded name (or ``fast``), timm architecture (random weights), ``architecture.tag`` or
            ``.safetensors`` file.
        rank: width of the adapter's bottleneck.
        device: ``cpu``, ``cuda``, ... or ``auto``.
        batch: images per training step.
        precision: of the fast column: ``bf16``, ``fp32``, ``auto`` (bf16 where the chip has it) or ``fp8``.
        compile: whether the fast column is compiled; by default what a run does.
        tasks: tasks of the run that shows growth; 0 leaves it out.
        seconds: about how long one measurement takes; a tenth of the default with ``--quick``.
        threads: CPU threads; 0 is all.
        workers: processes that feed the plain loop; 0 is one per core, at most 8.
        quick: fewer batch sizes, shorter epochs.
        official: folder of a checkout of the published One-A code, whose network is then timed as well.
    """

    backbone: str = RunConfig.backbone
    rank: int = 128
    device: str = "auto"
    batch: int = 128
    precision: Literal["auto", "fp8", "bf16", "fp32"] = "auto"
    compile: bool | None = None
    tasks: int = 40
    seconds: float = 5.0
    threads: int = 0
    workers: int = 0
    quick: bool = False
    official: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "backbone", full_name(self.backbone))
        for name, fewest, most in _BOUNDS:
            if not fewest <= (value := getattr(self, name)) <= most:
                raise OneaError(f"{name} is {value}; it must be at least {fewest} and at most {most:,}.")
        check_threads(self.threads)
        if not 0 < self.seconds <= _HOUR:
            raise OneaError(f"seconds is {self.seconds:g}; it must be more than 0 and at most {_HOUR:,}.")
        if self.tasks and self.tasks < 5:
            raise OneaError(f"tasks is {self.tasks}; growth shows from 5 tasks on, and 0 leaves it out.")

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes of inference."""
        return (1, 32) if self.quick else (1, 32, 256)

    def images_per_class(self, device: torch.device) -> int:
        """Enough for many steps in an epoch, and no more than the device is done with in seconds."""
        steps = (8 if self.quick else 16) if device.type == "cuda" else (2 if self.quick else 4)
        return -(-steps * self.batch // CLASSES)

    def runtime(self, *, same_numerics: bool) -> Runtime:
        """The machine settings of a column: full precision, or the product's fastest."""
        from onea.runtime import make_runtime

        return make_runtime(self.device, "fp32" if same_numerics else self.precision, self.threads)

    def compiles(self, runtime: Runtime) -> bool:
        """Whether the fast column compiles the network."""
        from onea.vit.compiled import can_compile

        if self.compile is None:  # as a run with many images does
            return runtime.device.type == "cuda" and can_compile(runtime.device)
        if self.compile and not can_compile(runtime.device):
            raise OneaError(
                "Compilation needs Triton on a GPU or a C++ compiler, which was not found; use --no-compile."
            )
        return self.compile
