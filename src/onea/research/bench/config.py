# SPDX-License-Identifier: Apache-2.0
"""The options of ``onea bench``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from onea.errors import OneaError
from onea.options import Validated, check_threads
from onea.research.runs.config import RunConfig
from onea.schema import Range

if TYPE_CHECKING:  # `onea --help` needs no torch
    import torch

    from onea.runtime import Runtime

CLASSES = 8  # a power of two, so that usual batch sizes divide the number of images


@dataclass(frozen=True)
class BenchConfig(Validated):
    """Configuration of a benchmark.

    Attributes:
        backbone: the bundled network, timm architecture (random weights), ``architecture.tag`` or
            ``.safetensors`` file.
        rank: bottleneck width of the adapter.
        device: ``cpu``, ``cuda``, ... or ``auto`` (a GPU if there is one).
        batch: batch size in training.
        precision: precision in the column ``fast``: ``bf16``, ``fp32``, ``fp8`` or ``auto`` (bf16 if supported).
        compile: compile the network in the column ``fast``; by default on a GPU.
        tasks: number of tasks over which the growth of time and memory is measured; 0 skips it.
        seconds: approximate time of one measurement; with ``--quick``, a tenth of the default.
        threads: number of CPU threads; 0 uses all.
        workers: DataLoader workers of the plain PyTorch loop; 0 uses one per core, at most 8.
        quick: measure fewer batch sizes and shorter epochs.
        official: folder with a checkout of the published One-A code, to time its network as well.
    """

    backbone: str = RunConfig.backbone
    rank: Annotated[int, Range(ge=1, le=65_536)] = 128
    device: str = "auto"
    batch: Annotated[int, Range(ge=1, le=65_536)] = 128
    precision: Literal["auto", "fp8", "bf16", "fp32"] = "auto"
    compile: bool | None = None
    tasks: Annotated[int, Range(ge=0, le=10_000)] = 40
    seconds: Annotated[float, Range(gt=0, le=3_600)] = 5.0
    threads: int = 0
    workers: Annotated[int, Range(ge=0, le=256)] = 0
    quick: bool = False
    official: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_threads(self.threads)
        if self.tasks and self.tasks < 5:
            raise OneaError(f"tasks is {self.tasks}; the measurement of growth needs at least 5 tasks; 0 skips it.")

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes of inference."""
        return (1, 32) if self.quick else (1, 32, 256)

    def images_per_class(self, device: torch.device) -> int:
        """Enough images for many steps in an epoch of a few seconds."""
        steps = (8 if self.quick else 16) if device.type == "cuda" else (2 if self.quick else 4)
        return -(-steps * self.batch // CLASSES)

    def runtime(self, *, same_numerics: bool) -> Runtime:
        """The runtime of the column ``same numerics`` (fp32) or ``fast``."""
        from onea.runtime import make_runtime

        return make_runtime(self.device, "fp32" if same_numerics else self.precision, self.threads)

    def compiles(self, runtime: Runtime) -> bool:
        """Whether the network is compiled in the column ``fast``."""
        from onea.vit.compiled import can_compile

        if self.compile is None:  # as in a run with many images
            return runtime.device.type == "cuda" and can_compile(runtime.device)
        if self.compile and not can_compile(runtime.device):
            raise OneaError(
                "Compilation needs Triton on a GPU or a C++ compiler, which was not found; use --no-compile."
            )
        return self.compile
