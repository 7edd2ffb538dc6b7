# SPDX-License-Identifier: Apache-2.0
"""What is timed: One-A on synthetic images, put together as a run puts it together, and its network."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch

from onea.data.dataset import Pixels
from onea.data.image_storage import PackedImages
from onea.data.transforms import Preprocess
from onea.errors import OneaError, nearest
from onea.learner.one_a import OneAOptions
from onea.learner.tasks import StreamPlan
from onea.research.bench.config import CLASSES, BenchConfig
from onea.research.methods.one_a import OneAMethod
from onea.research.runs.setup import CROP_MARGIN, Prepared, Side
from onea.research.streams import Stream
from onea.runtime import Runtime
from onea.vit.backbones import load_backbone
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.embedded import EMBEDDED
from onea.vit.frozen import FrozenViT, frozen
from onea.vit.network_config import NetworkConfig
from onea.vit.weight_files import blank_network

SEED = 1
_RANDOM = "random:"


@dataclass(frozen=True)
class Workload:
    """A method and its images on one device in one precision."""

    prepared: Prepared
    method: OneAMethod
    runtime: Runtime

    @property
    def compiled(self) -> bool:
        """Whether the network's passes are compiled."""
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
    """One-A before its first task, on a stream of tasks of these sizes; ``vit`` itself is not changed."""
    classes = sum(sizes)
    vit = copy.deepcopy(vit).keep_matrices_in(runtime.dtype, runtime.fp8).to(runtime.device)
    if compiled:
        vit.compile_for({config.batch, EVALUATION_BATCH, *config.batches})
    options = OneAOptions(rank=config.rank, batch_size=config.batch, epochs=1, min_epochs=1, max_epochs=1)
    method = OneAMethod(vit, options, runtime, StreamPlan(classes, len(sizes)))
    preprocess = preprocess_of(vit)
    train, test = (_side(classes, count, preprocess, runtime) for count in (per_class, test_per_class))
    stream = Stream(tuple(range(classes)), sizes)
    return Workload(Prepared(stream, train, test, method, {}, SEED, compiled), method, runtime)


def one_task(config: BenchConfig, vit: FrozenViT, runtime: Runtime, *, compiled: bool) -> Workload:
    """A single task, large enough that an epoch is many steps on this device."""
    train, test = config.images_per_class(runtime.device), -(-max(config.batches) // CLASSES)
    return make_workload(config, vit, runtime, (CLASSES,), train, max(train, test), compiled=compiled)


def preprocess_of(vit: FrozenViT) -> Preprocess:
    """The preprocessing of a run by default."""
    return Preprocess(size=vit.size, mean=vit.mean, std=vit.std)


def synthetic_pixels(count: int, network_size: int) -> Pixels:
    """Noise as a run would store it: uint8 with the margin that crops need."""
    side = round(network_size * CROP_MARGIN)
    return np.random.default_rng(SEED).integers(0, 256, (count, 3, side, side), dtype=np.uint8)


def _side(classes: int, per_class: int, preprocess: Preprocess, runtime: Runtime) -> Side:
    pixels = synthetic_pixels(classes * per_class, preprocess.size)
    images = PackedImages(pixels, preprocess, runtime.device, "device", runtime.pixel_dtype)
    return Side(images, torch.arange(classes).repeat_interleave(per_class), torch.arange(len(pixels)))


def bench_backbone(name: str) -> FrozenViT:
    """An embedded backbone, a ``.safetensors`` file, timm's ``architecture.tag``, or random weights.

    ``random:ARCHITECTURE``, or just timm's ``ARCHITECTURE`` without a tag, needs no download.
    """
    if name.startswith(_RANDOM):
        return random_backbone(name.removeprefix(_RANDOM))
    if name in EMBEDDED or name.endswith(".safetensors") or "." in name:
        return load_backbone(name)
    return random_backbone(name)


def random_backbone(architecture: str) -> FrozenViT:
    """A network of timm with fixed random weights."""
    import timm

    known = timm.list_models()
    if architecture not in known:
        raise OneaError(f"Unknown architecture '{architecture}'; {nearest(architecture, [*EMBEDDED, *known])}")
    config = NetworkConfig.of_timm(architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = blank_network(architecture, config, device="cpu")
    return frozen(network, _RANDOM + architecture, "random", config)
