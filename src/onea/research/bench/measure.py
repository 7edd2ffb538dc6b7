# SPDX-License-Identifier: Apache-2.0
"""Measurements of One-A on synthetic images: the workload, its speed, memory and floating-point operations."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from onea.data.dataset import Pixels
from onea.data.image_storage import PackedImages
from onea.data.transforms import Preprocess
from onea.errors import OneaError, did_you_mean
from onea.learner.adapter_training import initial_adapters, train_adapter
from onea.learner.one_a import OneAOptions
from onea.learner.tasks import StreamPlan
from onea.merging.operator import Sizes
from onea.research.bench.config import CLASSES, BenchConfig
from onea.research.bench.results import (
    Row,
    Timing,
    duration,
    rate,
    summarise_times,
    synchronise,
    time_interleaved,
    time_repeatedly,
)
from onea.research.methods.one_a import OneAMethod
from onea.research.runs.evaluation import count_flops, predict_tasks
from onea.research.runs.runner import peak_memory
from onea.research.runs.setup import CROP_MARGIN, ImageSubset, PreparedRun
from onea.research.streams import Stream
from onea.runtime import Progress, Runtime
from onea.vit.backbones import load_backbone
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.fp8 import quantise_rows, scaled_matmul
from onea.vit.frozen import FrozenViT, freeze
from onea.vit.network_config import BUNDLED, NetworkConfig
from onea.vit.weight_files import build_untrained

SEED = 1
_RANDOM = "random:"


@dataclass(frozen=True)
class Workload:
    """A method and its images on one device in one precision."""

    prepared: PreparedRun
    method: OneAMethod
    runtime: Runtime

    @property
    def compiled(self) -> bool:
        """Whether the network is compiled."""
        return self.prepared.compiled


def make_workload(
    config: BenchConfig,
    vit: FrozenViT,
    runtime: Runtime,
    sizes: tuple[int, ...],
    per_class: int,
    test_per_class: int,
    *,
    compiled: bool,
) -> Workload:
    """One-A before its first task, on a stream of tasks of these sizes; ``vit`` is copied."""
    classes = sum(sizes)
    vit = copy.deepcopy(vit).cast_matrices(runtime.dtype, runtime.fp8).to(runtime.device)
    if compiled:
        vit.compile_for({config.batch, EVALUATION_BATCH, *config.batches})
    options = OneAOptions(rank=config.rank, batch_size=config.batch, epochs=1, min_epochs=1, max_epochs=1)
    method = OneAMethod(vit, options, runtime, StreamPlan(classes, len(sizes)))
    preprocess = preprocess_of(vit)
    train, test = (_synthetic_images(classes, count, preprocess, runtime) for count in (per_class, test_per_class))
    stream = Stream(tuple(range(classes)), sizes)
    return Workload(PreparedRun(stream, train, test, method, {}, SEED, compiled), method, runtime)


def single_task_workload(config: BenchConfig, vit: FrozenViT, runtime: Runtime, *, compiled: bool) -> Workload:
    """A single task that is large enough for many steps in an epoch."""
    train, test = config.images_per_class(runtime.device), -(-max(config.batches) // CLASSES)
    return make_workload(config, vit, runtime, (CLASSES,), train, max(train, test), compiled=compiled)


def preprocess_of(vit: FrozenViT) -> Preprocess:
    """The default preprocessing of a run."""
    return Preprocess(size=vit.size, mean=vit.mean, std=vit.std)


def synthetic_pixels(count: int, network_size: int) -> Pixels:
    """Noise in the format of packed images: uint8, larger than the network's input by the margin for crops."""
    side = round(network_size * CROP_MARGIN)
    return np.random.default_rng(SEED).integers(0, 256, (count, 3, side, side), dtype=np.uint8)


def _synthetic_images(classes: int, per_class: int, preprocess: Preprocess, runtime: Runtime) -> ImageSubset:
    pixels = synthetic_pixels(classes * per_class, preprocess.size)
    images = PackedImages(pixels, preprocess, runtime.device, "device", runtime.pixel_dtype)
    return ImageSubset(images, torch.arange(classes).repeat_interleave(per_class), torch.arange(len(pixels)))


def bench_backbone(name: str) -> FrozenViT:
    """The bundled backbone, a ``.safetensors`` file, timm's ``architecture.tag``, or random weights.

    ``random:ARCHITECTURE``, or just timm's ``ARCHITECTURE`` without a tag, has random weights with a fixed seed.
    """
    architecture = name.removeprefix(_RANDOM)
    if architecture == name and (name == BUNDLED or "." in name):
        return load_backbone(name)
    import timm

    names = timm.list_models()
    if architecture not in names:
        raise OneaError(f"Unknown architecture '{architecture}'; {did_you_mean(architecture, [BUNDLED, *names])}")
    config = NetworkConfig.from_timm(architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = build_untrained(architecture, config, device="cpu")
    return freeze(network, _RANDOM + architecture, "random", config)


# Dense FLOP/s from the data sheets, by the first of these names that is part of the chip's name.
_NOMINAL_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"fp8": 4500e12, "bf16": 2250e12, "fp32": 75e12}),
    ("H200", {"fp8": 1979e12, "bf16": 989e12, "fp32": 67e12}),
    ("H100 PCIe", {"fp8": 1513e12, "bf16": 756e12, "fp32": 51e12}),
    ("H100", {"fp8": 1979e12, "bf16": 989e12, "fp32": 67e12}),
    ("A100", {"bf16": 312e12, "fp32": 19.5e12}),
    ("L40S", {"fp8": 733e12, "bf16": 362e12, "fp32": 91.6e12}),
    ("L4", {"fp8": 242e12, "bf16": 121e12, "fp32": 30.3e12}),
    ("A10", {"bf16": 125e12, "fp32": 31.2e12}),
)
_FLOPS_BATCH = 2


def inference_flops(method: OneAMethod) -> float:
    """FLOPs per image of a forward pass with the adapter."""
    images = _images(method)
    return count_flops(lambda: method.features(images, method.adapter)) / _FLOPS_BATCH


def training_flops(method: OneAMethod) -> float:
    """FLOPs per image of a forward and backward pass with gradients for the adapter."""
    images = _images(method)
    adapters = initial_adapters(method.vit, method.options, seed=0).to(images.device)

    def step() -> None:
        with method.runtime.autocast():
            loss = method.vit(images, adapters).sum()
        loss.backward()

    return count_flops(step) / _FLOPS_BATCH


def _images(method: OneAMethod) -> torch.Tensor:
    return torch.zeros(_FLOPS_BATCH, 3, method.vit.size, method.vit.size, device=method.runtime.device)


def nominal_peak(chip: str, precision: str) -> float | None:
    """Dense FLOP/s from the data sheet; None for a chip that is not listed.

    >>> nominal_peak("NVIDIA H200", "bf16")
    989000000000000.0
    >>> nominal_peak("AMD EPYC", "bf16")
    """
    return next((peaks.get(precision) for name, peaks in _NOMINAL_PEAKS if name in chip), None)


def measured_peak(device: torch.device, precision: str, seconds: float) -> float:
    """The highest FLOP/s of a large square matrix product."""
    side = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(side, side, device=device) for _ in range(2))
    if precision == "fp8":
        factors = (*quantise_rows(left), *quantise_rows(right))
        return 2 * side**3 / time_repeatedly(lambda: scaled_matmul(*factors), device, seconds).best
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = left.to(dtype), right.to(dtype)
    return 2 * side**3 / time_repeatedly(lambda: left @ right, device, seconds).best


InferenceFunction = Callable[[], object]
_QUEUED_BATCHES = 8  # launched before the host synchronises, as in an evaluation


def inference_rows(
    functions: Mapping[str, InferenceFunction], batch: int, device: torch.device, seconds: float
) -> Iterator[Row]:
    """Latency of one batch, and throughput of several batches that are queued on an asynchronous device.

    The columns are measured in turn, because the differences between them are small.
    """
    setting = f"batch {batch}"
    timings = time_interleaved(list(functions.values()), device, seconds)
    for column, timing in zip(functions, timings, strict=True):
        yield duration("inference", setting, column, timing)
    images = batch
    if device.type != "cpu":
        images = _QUEUED_BATCHES * batch
        timings = time_interleaved([_queued(function) for function in functions.values()], device, seconds)
    for column, timing in zip(functions, timings, strict=True):
        yield rate("inference", setting, column, images, timing)


def _queued(function: InferenceFunction) -> InferenceFunction:
    return lambda: [function() for _ in range(_QUEUED_BATCHES)]


_MIN_EPOCHS, _MAX_EPOCHS = 3, 60


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak memory of a GPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_rows(column: str, batch: int, device: torch.device) -> Iterator[Row]:
    """The peak memory of a GPU in training since it was reset."""
    if device.type == "cuda":
        yield Row("peak memory", f"training, batch {batch}", column, peak_memory(device)["device"] / 1e6, "MB")


class EpochTimer(Progress):
    """Records the times at which epochs begin."""

    def __init__(self, device: torch.device):
        self._device = device
        self.times: list[float] = []

    def start_epoch(self, epoch: int, epochs: int, images: int) -> None:
        """Record the time."""
        self.add_time()

    def add_time(self) -> None:
        """Record the time once all operations on the device have finished."""
        synchronise(self._device)
        self.times.append(time.perf_counter())


@dataclass(frozen=True)
class Measurements:
    """Measurements of a workload for one column.

    Attributes:
        name: the column.
        workload: what is measured.
        seconds: approximate time of each measurement.
    """

    name: str
    workload: Workload
    seconds: float

    def training(self) -> Iterator[Row]:
        """Training end to end: augmentation of stored images, loss with the contrastive term, optimiser."""
        workload, task = self.workload, self.workload.prepared.task(0)
        device, batch = workload.runtime.device, workload.method.options.batch_size
        reset_peak_memory(device)
        warm = self._epochs(2)[-1]
        count = min(max(round(self.seconds / warm), _MIN_EPOCHS), _MAX_EPOCHS)
        yield rate("training", f"batch {batch}", self.name, len(task), summarise_times(self._epochs(count + 1)[1:]))
        yield from peak_memory_rows(self.name, batch, device)

    def _epochs(self, count: int) -> list[float]:
        """Seconds of each epoch of one training."""
        workload, method, task = self.workload, self.workload.method, self.workload.prepared.task(0)
        timer = EpochTimer(workload.runtime.device)
        options = replace(method.options, epochs=count, min_epochs=count, max_epochs=count)
        runtime = replace(workload.runtime, progress=timer)
        train_adapter(
            method.vit, method.learner.new_adapters(task.seed, task.index), task, options, runtime, method.plan
        )
        timer.add_time()
        return [end - start for start, end in pairwise(timer.times)]

    def prototypes(self) -> Iterator[Row]:
        """Computation of the class means of a task."""
        method, task = self.workload.method, self.workload.prepared.task(0)
        timing = self._timed(lambda: method.compute_prototypes(task, method.adapter))
        yield rate("prototypes", "", self.name, len(task), timing)

    def inference(self, batch: int) -> InferenceFunction:
        """A function that computes the scores of stored images."""
        method, images, rows = self.workload.method, self.workload.prepared.test.images, torch.arange(batch)
        return lambda: method.scores(images.test_views(rows))

    def evaluation(self) -> Iterator[Row]:
        """The evaluation of a run over all test images."""
        prepared = self.workload.prepared
        count, class_ranges = len(prepared.test.rows), prepared.class_ranges(0)
        timing = self._timed(lambda: predict_tasks(self.workload.method, prepared.test, class_ranges, prepared.seed))
        yield Row("evaluation", f"{count} images", self.name, timing.seconds, "s", timing.spread)

    def merge(self) -> Iterator[Row]:
        """A merge of two random adapters, with and without the analysis that a run records."""
        method = self.workload.method
        generator = torch.Generator().manual_seed(0)
        old, new = (
            {
                name: torch.randn(value.shape, generator=generator).to(value)
                for name, value in method.adapter.state_dict().items()
            }
            for _ in range(2)
        )
        sizes, operator = Sizes(40, 5, 4000, 500), method.learner.operator
        setting = f"{method.vit.depth} blocks, rank {method.options.rank}, float64"
        yield duration("merge", setting, self.name, self._timed(lambda: operator(old, new, sizes, {})))
        yield duration(
            "merge and record", setting, self.name, self._timed(lambda: operator(old, new, sizes, {}).report())
        )

    def _timed(self, action: Callable[[], object]) -> Timing:
        return time_repeatedly(action, self.workload.runtime.device, self.seconds)
