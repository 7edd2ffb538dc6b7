# SPDX-License-Identifier: Apache-2.0
"""What is timed: One-A on synthetic images, put together as a run puts it together."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from onea.data.dataset import Pixels
from onea.data.store import PackedImages
from onea.data.transforms import Preprocess
from onea.errors import OneaError
from onea.methods.contract import EVALUATION_BATCH
from onea.methods.one_a import OneAMethod, OneAOptions
from onea.options import check_threads
from onea.runs.setup import CROP_MARGIN, Prepared, Side
from onea.runtime import Runtime, make_runtime
from onea.streams import Stream
from onea.tasks import Plan
from onea.vit.compiled import can_compile
from onea.vit.frozen import FrozenViT

SEED = 1
_HOUR = 3_600  # seconds
_BOUNDS = (("rank", 1, 65_536), ("batch", 1, 65_536), ("workers", 0, 256), ("tasks", 0, 10_000))
CLASSES = 8  # a power of two, so that usual batches come out even: a last batch of two images would cost as much


@dataclass(frozen=True)
class BenchConfig:
    """What to measure and for how long.

    Attributes:
        backbone: see ``bench_backbone``.
        rank: of the adapter.
        device: ``cpu``, ``cuda``, ... or ``auto``.
        batch: images per training step.
        precision: of the fast column; ``auto`` is bf16 where the chip has it.
        compile: whether the fast column is compiled; None is yes on a GPU that can.
        tasks: of the stream on which growth is measured; 0 leaves growth out.
        seconds: about how long one measurement takes.
        threads: CPU threads; 0 is all.
        workers: processes that prepare images for the plain loop; 0 is one per core, eight at the most.
        quick: fewer batch sizes and smaller epochs.
    """

    backbone: str
    rank: int = 128
    device: str = "auto"
    batch: int = 128
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    compile: bool | None = None
    tasks: int = 40
    seconds: float = 5.0
    threads: int = 0
    workers: int = 0
    quick: bool = False

    def __post_init__(self) -> None:
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
        return make_runtime(self.device, "fp32" if same_numerics else self.precision, self.threads)

    def compiles(self, runtime: Runtime) -> bool:
        """Whether the fast column compiles the network."""
        if self.compile is None:  # as a run with many images does
            return runtime.device.type == "cuda" and can_compile(runtime.device)
        if self.compile and not can_compile(runtime.device):
            raise OneaError(
                "Compilation needs Triton on a GPU or a C++ compiler, which was not found; use --no-compile."
            )
        return self.compile


@dataclass(frozen=True)
class Scene:
    """A method and its images on one device in one precision."""

    prepared: Prepared
    method: OneAMethod
    runtime: Runtime

    @property
    def compiled(self) -> bool:
        """Whether the network's passes are compiled."""
        return self.prepared.compiled


def make_scene(
    config: BenchConfig,
    vit: FrozenViT,
    runtime: Runtime,
    sizes: tuple[int, ...],
    per_class: int,
    test_per_class: int,
    *,
    compiled: bool,
) -> Scene:
    """One-A before its first task, on a stream of tasks of these sizes; ``vit`` itself is not changed."""
    classes = sum(sizes)
    vit = copy.deepcopy(vit).keep_matrices_in(runtime.dtype).to(runtime.device)
    if compiled:
        vit.compile_for({config.batch, EVALUATION_BATCH, *config.batches})
    options = OneAOptions(rank=config.rank, batch_size=config.batch, epochs=1, min_epochs=1, max_epochs=1)
    method = OneAMethod(vit, options, runtime, Plan(classes, len(sizes)))
    preprocess = preprocess_of(vit)
    train, test = (_side(classes, count, preprocess, runtime) for count in (per_class, test_per_class))
    stream = Stream(tuple(range(classes)), sizes)
    return Scene(Prepared(stream, train, test, method, {}, SEED, compiled), method, runtime)


def one_task(config: BenchConfig, vit: FrozenViT, runtime: Runtime, *, compiled: bool) -> Scene:
    """A single task, large enough that an epoch is many steps on this device."""
    train, test = config.images_per_class(runtime.device), -(-max(config.batches) // CLASSES)
    return make_scene(config, vit, runtime, (CLASSES,), train, max(train, test), compiled=compiled)


def preprocess_of(vit: FrozenViT) -> Preprocess:
    """What a run does to images by default."""
    return Preprocess(size=vit.size, mean=vit.mean, std=vit.std)


def synthetic_pixels(count: int, network_size: int) -> Pixels:
    """Noise as a run would store it: uint8 with the margin that crops need."""
    side = round(network_size * CROP_MARGIN)
    return np.random.default_rng(SEED).integers(0, 256, (count, 3, side, side), dtype=np.uint8)


def _side(classes: int, per_class: int, preprocess: Preprocess, runtime: Runtime) -> Side:
    pixels = synthetic_pixels(classes * per_class, preprocess.size)
    images = PackedImages(pixels, preprocess, runtime.device, "device", runtime.pixel_dtype)
    return Side(images, torch.arange(classes).repeat_interleave(per_class), torch.arange(len(pixels)))
