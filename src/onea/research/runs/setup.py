# SPDX-License-Identifier: Apache-2.0
"""From a configuration to everything a run needs: network, images on their device, stream and method."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onea import seeds
from onea.data.dataset import Dataset, Split
from onea.data.image_files import readable, sha256_of_files
from onea.data.image_storage import ExactImages, Images, PackedImages, choose_storage_tier
from onea.data.transforms import Filter, Geometry, Preprocess
from onea.errors import OneaError
from onea.files import cache_folder
from onea.learner.merged_adapter import AdapterCache
from onea.learner.tasks import StreamPlan, Task
from onea.options import make_options
from onea.research.data.pack import Packed, pack, stored_shape
from onea.research.data.sources import load_dataset
from onea.research.methods import method_class
from onea.research.methods.adapter_merging import AdapterMerging
from onea.research.methods.contract import Method
from onea.research.methods.presets import preset_options
from onea.research.record import Record
from onea.research.runs.config import RunConfig
from onea.research.streams import Stream, make_stream, parse_sizes
from onea.runtime import Runtime
from onea.schedules import DatasetSize
from onea.vit.backbones import load_backbone, stamp_of_weights, why_frozen_only
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.compiled import can_compile
from onea.vit.frozen import FrozenViT

CROP_MARGIN = 256 / 224  # packed images keep the margin around the network's input that the published protocol has
DEFAULT_TASKS = 10
_WORTH_COMPILING = 20_000  # training images: compilation takes about a minute, and saves half of what follows


@dataclass(frozen=True)
class ImageSubset:
    """Training or test images: which rows of a store, and the labels of all its rows as stream positions."""

    images: Images
    labels: Tensor
    rows: Tensor


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start.

    Attributes:
        description: what the record says about the inputs.
        stamps: of the files of images and weights, taken before they were read.
    """

    stream: Stream
    train: ImageSubset
    test: ImageSubset
    method: Method
    description: Record
    seed: int
    compiled: bool = False
    stamps: dict[str, str] = field(default_factory=dict)

    def class_ranges(self, index: int) -> list[range]:
        """The classes of every task up to this one."""
        return [self.stream.range_of(task) for task in range(index + 1)]

    def later_class_ranges(self, index: int) -> list[range]:
        """The classes of every task after this one."""
        return [self.stream.range_of(task) for task in range(index + 1, self.stream.tasks)]

    def task(self, index: int) -> Task:
        """A task of the stream, with its images."""
        classes = self.stream.range_of(index)
        return self._task(index, classes, lambda: self._task(index, range(classes.stop)))

    def _task(self, index: int, classes: range, cumulative_task: Callable[[], Task] | None = None) -> Task:
        labels = self.train.labels[self.train.rows]
        rows = self._limit(self.train.rows[(labels >= classes.start) & (labels < classes.stop)])
        name = self.stream.names[index] if self.stream.names else f"task {index + 1}"
        return Task(index, name, classes, self.train.images, rows, self.train.labels[rows], self.seed, cumulative_task)

    def _limit(self, rows: Tensor) -> Tensor:
        """At most as many images per class as a long-tailed stream allows."""
        limits = self.stream.samples
        if limits is None:
            return rows
        return sample_per_class(rows, self.train.labels, self.seed, "long-tail", lambda position, _: limits[position])


def prepare(config: RunConfig, runtime: Runtime, adapter_cache: AdapterCache | None = None) -> PreparedRun:
    """Check everything and load everything; raises before anything is written if the request cannot be met."""
    config = _protocol(config)
    weights = stamp_of_weights(config.backbone)
    if (kind := method_class(config.method)).trains_network:
        kind.check_backbone(config.backbone, why_frozen_only(config.backbone))  # before anything is fetched
    vit = load_backbone(config.backbone, config.image_size, depth=config.depth)
    dataset = dataset_of(config)
    stream = _stream(config, dataset)
    shape = shape_of(config, stream, np.bincount(dataset.train.labels, minlength=len(dataset.classes)).tolist())
    method, options = _method(config, vit, stream, options_of(config, shape), runtime, adapter_cache)
    preprocess = _preprocess(config, vit, dataset)
    train, test, stored = _images(config, dataset, stream, preprocess, runtime)
    train, test = _choose_rows(config, train, test)
    vit.cast_matrices(runtime.dtype, runtime.fp8).to(runtime.device)
    if compiled := _worth_compiling(config.compile, runtime, len(train.rows)):
        vit.compile_for(_batch_sizes(method, runtime))
    description: Record = {
        "data": {
            "name": dataset.name,
            "fingerprint": dataset.fingerprint,
            "classes": [dataset.classes[index] for index in stream.class_order],
            "train_images": len(train.rows),
            "task_images": shape.images,  # without those that a long tail leaves out
            "test_images": len(test.rows),
            **stored,
        },
        "backbone": {
            "name": vit.name,
            "sha256": vit.digest,
            "input": vit.size,
            "depth": vit.depth,
            "width": vit.width,
            **({"licence": vit.config.licence} if vit.config.licence else {}),
        },
        "preprocess": json.loads(json.dumps(dataclasses.asdict(preprocess))),  # as it will read back: lists, no tuples
        "stream": stream.to_json(),
        "options": options,
    }
    stamps = {"data": dataset.stamp, "backbone": weights or stamp_of_weights(config.backbone)}  # fetched only now
    return PreparedRun(stream, train, test, method, description, config.seed, compiled, stamps)


def dataset_of(config: RunConfig, *, fetch: bool = True, cached: bool = True) -> Dataset:
    """The dataset of a run; unless told not to, what is missing is fetched, and what is drawn here is kept."""
    root = Path(config.root) if config.root else None
    return load_dataset(config.data, root=root, cache=cache_folder() if cached else None, fetch=fetch)


def sha256_of_images(config: RunConfig, dataset: Dataset, size: int) -> dict[str, str]:
    """Digests of the training and the test images of a run on a network of this input size.

    They are of the pixels as they are packed, or of the files where those are read anew every time. Images that are not
    in files have none: the fingerprint of their dataset covers the pixels.
    """
    if config.store == "exact":
        return _by_side(sha256_of_files(side.files or ()) for side in (dataset.train, dataset.test))
    return _by_side(packed.sha256 for packed in _packs(config, dataset, size))


def _by_side(digests: Iterable[str]) -> dict[str, str]:
    return {side: digest for side, digest in zip(("train", "test"), digests, strict=True) if digest}


def _worth_compiling(wish: str, runtime: Runtime, images: int) -> bool:
    if wish == "auto":
        return runtime.device.type == "cuda" and images >= _WORTH_COMPILING and can_compile(runtime.device)
    if wish == "yes" and not can_compile(runtime.device):
        needed = "Triton" if runtime.device.type == "cuda" else "a C++ compiler"
        raise OneaError(f"--compile yes needs {needed}, which was not found; install it, or leave --compile out.")
    return wish == "yes"


def _batch_sizes(method: Method, runtime: Runtime) -> set[int]:
    return {EVALUATION_BATCH} | {-(-batch // runtime.processes.count) for batch in method.batch_sizes()}


def _protocol(config: RunConfig) -> RunConfig:
    if config.protocol == "pilot":
        return dataclasses.replace(config, normalise="none", geometry="resize-crop")
    return config


def _preprocess(config: RunConfig, vit: FrozenViT, dataset: Dataset) -> Preprocess:
    raw = config.normalise == "none"
    own, resize, filter = _geometry(config, vit)
    return Preprocess(
        size=vit.size,
        mean=(0.0, 0.0, 0.0) if raw else vit.mean,
        std=(1.0, 1.0, 1.0) if raw else vit.std,
        geometry=own,
        resize=resize,
        filter=filter,
        mirror=dataset.mirror,
    )


def _geometry(config: RunConfig, vit: FrozenViT) -> tuple[Geometry, int, Filter]:
    """How test images get the network's size: geometry, short side before the crop, interpolation."""
    if config.geometry == "direct":
        return "direct", 0, "bilinear"
    if config.geometry == "resize-crop":
        return "resize-crop", round(vit.size * CROP_MARGIN), "bicubic"
    known = vit.config
    squashed = known.crop_mode == "squash" and known.crop_pct == 1
    cut = known.crop_mode == "center" and known.crop_pct <= 1
    if known.interpolation not in ("bilinear", "bicubic") or not (squashed or cut):
        raise OneaError(
            f"Images of '{vit.name}' are prepared by {known.interpolation} and {known.crop_mode} with a share of "
            f"{known.crop_pct:g}, which --geometry backbone cannot do; choose direct or resize-crop."
        )
    filter: Filter = "bicubic" if known.interpolation == "bicubic" else "bilinear"
    return ("direct", 0, filter) if squashed else ("resize-crop", int(vit.size / known.crop_pct), filter)


def _stream(config: RunConfig, dataset: Dataset) -> Stream:
    kind = config.stream
    if kind == "auto":
        natural = dataset.groups and config.tasks is None
        kind = "sizes" if config.sizes else "natural" if natural else "step"
    if kind == "natural" and not dataset.groups:
        raise OneaError(
            f"'{dataset.name}' has no natural groups; give --tasks, or put class folders into task folders."
        )
    tasks = config.tasks or (min(DEFAULT_TASKS, len(dataset.classes)) if kind in ("step", "balanced") else None)
    return make_stream(
        classes=len(dataset.classes),
        tasks=tasks,
        kind=kind,
        gamma=config.gamma,
        sizes=parse_sizes(config.sizes) if config.sizes else None,
        order=config.order,
        seed=config.seed,
        groups=dataset.groups,
        long_tail=config.long_tail,
        n_max=min(int(np.bincount(dataset.train.labels).max()), config.per_class or sys.maxsize),
    )


def _method(
    config: RunConfig,
    vit: FrozenViT,
    stream: Stream,
    options: Any,
    runtime: Runtime,
    adapter_cache: AdapterCache | None,
) -> tuple[Method, dict[str, Any]]:
    kind = method_class(config.method)
    plan = StreamPlan(stream.classes, stream.tasks)
    if issubclass(kind, AdapterMerging):
        return kind(vit, options, runtime, plan, adapter_cache), dataclasses.asdict(options)
    return kind(vit, options, runtime, plan), dataclasses.asdict(options)


def _images(
    config: RunConfig, dataset: Dataset, stream: Stream, preprocess: Preprocess, runtime: Runtime
) -> tuple[ImageSubset, ImageSubset, dict[str, Any]]:
    position = np.empty(stream.classes, dtype=np.int64)
    position[list(stream.class_order)] = np.arange(stream.classes)
    sides = (dataset.train, dataset.test)
    if config.store == "exact":
        (train, bad), (test, more) = (_exact(config, dataset, side, position, preprocess, runtime) for side in sides)
        told = {"stored": "exact", "skipped": bad + more, "sha256": sha256_of_images(config, dataset, 0)}
        return train, test, told
    packs = _packs(config, dataset, preprocess.size)
    budget = None if config.budget is None else int(config.budget * 1e9)
    total = sum(packed.pixels.nbytes for packed in packs)
    tier = choose_storage_tier(total, budget, runtime.device) if config.store == "auto" else config.store
    train, test = (
        ImageSubset(
            PackedImages(packed.pixels, preprocess, runtime.device, tier, runtime.pixel_dtype),
            torch.from_numpy(position[side.labels[packed.rows]]),
            torch.arange(len(packed.rows)),
        )
        for packed, side in zip(packs, sides, strict=True)
    )
    stored = {"stored": [packs[0].height, packs[0].width], "skipped": [line for p in packs for line in p.skipped]}
    digests = _by_side(packed.sha256 for packed in packs)
    return train, test, stored | ({"sha256": digests} if digests else {})


def _packs(config: RunConfig, dataset: Dataset, network_size: int) -> list[Packed]:
    """Training and test images, packed alike for a network of this input size."""
    size, sides, cache = round(network_size * CROP_MARGIN), (dataset.train, dataset.test), cache_folder()
    shape = stored_shape(sides, size, cache)
    return [
        pack(side, size, cache=cache, on_bad=config.on_bad, shape=shape, class_names=dataset.classes) for side in sides
    ]


def _choose_rows(config: RunConfig, train: ImageSubset, test: ImageSubset) -> tuple[ImageSubset, ImageSubset]:
    """Fewer training images, or held-out ones in place of the test images, as asked."""
    rows = train.rows
    if (share := config.holdout) is not None:
        if not 0 < share < 1:
            raise OneaError(f"holdout is {share}; it must lie between 0 and 1.")
        held = sample_per_class(
            rows, train.labels, config.seed, "holdout", lambda _, count: max(1, round(share * count))
        )
        test = dataclasses.replace(train, rows=held)
        rows = rows[~torch.isin(rows, held)]
        if len(train.labels[rows].unique()) < len(train.labels.unique()):
            raise OneaError(f"holdout {share} leaves a class without training images; hold out less.")
    if (most := config.per_class) is not None:
        if most < 1:
            raise OneaError(f"per_class is {most}; it must be at least 1.")
        rows = sample_per_class(rows, train.labels, config.seed, "per class", lambda _, __: most)
    return dataclasses.replace(train, rows=rows), test


def sample_per_class(rows: Tensor, labels: Tensor, seed: int, purpose: str, count: Callable[[int, int], int]) -> Tensor:
    """Some rows of every class, chosen by the seed; ``count`` says how many, given the class and how many it has."""
    own = labels[rows]
    kept = []
    for position in own.unique().tolist():
        of_class = rows[own == position]
        draw = torch.randperm(len(of_class), generator=seeds.generator(seed, position, purpose))
        kept.append(of_class[draw[: count(position, len(of_class))]])
    return torch.cat(kept).sort().values


def _exact(
    config: RunConfig,
    dataset: Dataset,
    side: Split,
    position: np.ndarray[Any, Any],
    preprocess: Preprocess,
    runtime: Runtime,
) -> tuple[ImageSubset, list[str]]:
    """Original files that can be read, and what is wrong with the others."""
    if side.files is None:
        raise OneaError("--store exact streams original files, and this dataset has none; use --store auto.")
    rows, skipped = readable(side, on_bad=config.on_bad, class_names=dataset.classes)
    images = ExactImages([side.files[row] for row in rows], preprocess, runtime.device)
    return ImageSubset(images, torch.from_numpy(position[side.labels[rows]]), torch.arange(len(rows))), skipped


def options_of(config: RunConfig, shape: DatasetSize) -> Any:
    """The options of a run's method on data of this shape: its preset, and what was asked for on top."""
    preset = preset_options(config.method, config.preset, shape, config.options)
    return make_options(method_class(config.method).Options, preset | config.options)


def images_per_task(config: RunConfig, stream: Stream, counts: Sequence[int]) -> list[int]:
    """Training images of each task of a run; ``counts`` are those of the dataset's classes, in its own order."""

    def left(position: int) -> int:
        count = counts[stream.class_order[position]]
        if config.holdout is not None:
            count -= max(1, round(config.holdout * count))
        limits = [limit for limit in (config.per_class, stream.samples and stream.samples[position]) if limit]
        return min(count, *limits) if limits else count

    return [sum(left(position) for position in stream.range_of(task)) for task in range(stream.tasks)]


def shape_of(config: RunConfig, stream: Stream, counts: Sequence[int]) -> DatasetSize:
    """What the rule of the default preset looks at."""
    return DatasetSize(sum(images_per_task(config, stream, counts)), stream.classes, stream.tasks)


def shape_of_record(record: Record) -> DatasetSize:
    """The shape that a record tells; older ones know only how many images there were before a long tail."""
    data, sizes = record["data"], record["stream"]["sizes"]
    return DatasetSize(data.get("task_images") or data["train_images"], sum(sizes), len(sizes))
