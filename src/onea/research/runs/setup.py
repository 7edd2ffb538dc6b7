# SPDX-License-Identifier: Apache-2.0
"""Creates the objects of a run from its configuration: network, images on the device, stream, method and options."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onea import seeds
from onea.data.dataset import Dataset, Labels
from onea.data.file_checks import find_readable, sha256_of_files
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
from onea.research.runs.stream_file import check_images, stream_from_file
from onea.research.streams import Stream, make_stream, parse_sizes
from onea.runtime import Runtime
from onea.schedules import DatasetSize
from onea.vit.backbones import load_backbone, no_hooks_reason, weights_file_stamp
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.compiled import can_compile
from onea.vit.frozen import FrozenViT

CROP_MARGIN = 256 / 224  # size of packed images relative to the input size, as in the published protocol
DEFAULT_TASKS = 10
_MIN_IMAGES_TO_COMPILE = 20_000  # training images: compilation takes about a minute and halves the training time


@dataclass(frozen=True)
class ImageSubset:
    """Training or test images: rows of an image storage, and the labels of all its rows as stream positions."""

    images: Images
    labels: Tensor
    rows: Tensor


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start.

    Attributes:
        description: the record's fields about the inputs.
        stamps: stamps of the files of images and weights, taken before they were read.
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
        labels = self.train.labels
        row_labels = labels[self.train.rows]
        rows = self.train.rows[(row_labels >= classes.start) & (row_labels < classes.stop)]
        rows = _long_tail(rows, labels, self.stream, self.seed)
        name = self.stream.names[index] if self.stream.names else f"task {index + 1}"
        return Task(index, name, classes, self.train.images, rows, labels[rows], self.seed, cumulative_task)


def prepare(config: RunConfig, runtime: Runtime, adapter_cache: AdapterCache | None = None) -> PreparedRun:
    """Validate the configuration and load network and images; errors are raised before anything is written."""
    if config.protocol == "pilot":
        config = dataclasses.replace(config, normalise="none", geometry="resize-crop")
    weights_stamp = weights_file_stamp(config.backbone)
    method_type: Any = method_class(config.method)
    if method_type.inserts_modules:
        method_type.check_backbone(config.backbone, no_hooks_reason(config.backbone))  # before anything is downloaded
    vit = load_backbone(config.backbone, config.image_size, depth=config.depth)
    dataset = load_run_dataset(config)
    stream = stream_of_run(config, dataset)
    data_size = dataset_size(config, stream, np.bincount(dataset.train.labels, minlength=len(dataset.classes)).tolist())
    options = method_options(config, data_size)
    shared = {"adapter_cache": adapter_cache} if issubclass(method_type, AdapterMerging) else {}
    method = method_type(vit, options, runtime, StreamPlan(stream.classes, stream.tasks), **shared)
    preprocess = _preprocess(config, vit, dataset)
    train, test, stored = _load_images(config, dataset, stream, preprocess, runtime)
    train, test = _select_rows(config, train, test)
    vit.cast_matrices(runtime.dtype, runtime.fp8).to(runtime.device)
    if compiled := _should_compile(config.compile, runtime, len(train.rows)):
        batch_sizes = {-(-batch // runtime.processes.count) for batch in method.batch_sizes()}
        vit.compile_for({EVALUATION_BATCH, *batch_sizes})
    description: Record = {
        "data": {
            "name": dataset.name,
            "fingerprint": dataset.fingerprint,
            "classes": [dataset.classes[index] for index in stream.class_order],
            "train_images": len(train.rows),
            "task_images": data_size.images,  # after a long tail
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
        "preprocess": json.loads(json.dumps(dataclasses.asdict(preprocess))),  # tuples become lists
        "stream": stream.to_json(),
        "options": dataclasses.asdict(options),
    }
    stamps = {
        "data": dataset.stamp,
        "backbone": weights_stamp or weights_file_stamp(config.backbone),
    }  # the latter after a download
    return PreparedRun(stream, train, test, method, description, config.seed, compiled, stamps)


def load_run_dataset(config: RunConfig, *, download: bool = True, cached: bool = True) -> Dataset:
    """The dataset of a run; by default it is downloaded where needed, and generated images are cached."""
    root = Path(config.root) if config.root else None
    return load_dataset(config.data, root=root, cache=cache_folder() if cached else None, download=download)


def sha256_of_images(config: RunConfig, dataset: Dataset, size: int) -> dict[str, str]:
    """Hashes of the training and the test images of a run on a network of this input size.

    The packed pixels are hashed, or the files with ``store`` exact. Generated images have no hash, because the
    fingerprint of their dataset covers the pixels.
    """
    if config.store == "exact":
        return _by_split([sha256_of_files(split.files or ()) for split in (dataset.train, dataset.test)])
    return _by_split([packed.sha256 for packed in _pack_images(config, dataset, size)])


def _by_split(hashes: Sequence[str]) -> dict[str, str]:
    return {split: value for split, value in zip(("train", "test"), hashes, strict=True) if value}


def _should_compile(choice: str, runtime: Runtime, images: int) -> bool:
    if choice == "auto":
        return runtime.device.type == "cuda" and images >= _MIN_IMAGES_TO_COMPILE and can_compile(runtime.device)
    if choice == "yes" and not can_compile(runtime.device):
        needed = "Triton" if runtime.device.type == "cuda" else "a C++ compiler"
        raise OneaError(f"--compile yes needs {needed}, which was not found; install it, or leave out --compile.")
    return choice == "yes"


def _preprocess(config: RunConfig, vit: FrozenViT, dataset: Dataset) -> Preprocess:
    is_raw = config.normalise == "none"
    geometry, resize, interpolation = _geometry(config, vit)
    return Preprocess(
        size=vit.size,
        mean=(0.0, 0.0, 0.0) if is_raw else vit.mean,
        std=(1.0, 1.0, 1.0) if is_raw else vit.std,
        geometry=geometry,
        resize=resize,
        filter=interpolation,
        mirror=dataset.mirror,
    )


def _geometry(config: RunConfig, vit: FrozenViT) -> tuple[Geometry, int, Filter]:
    """How test images are resized: geometry, short side before the crop, interpolation."""
    if config.geometry == "direct":
        return "direct", 0, "bilinear"
    if config.geometry == "resize-crop":
        return "resize-crop", round(vit.size * CROP_MARGIN), "bicubic"
    network = vit.config
    squash = network.crop_mode == "squash" and network.crop_pct == 1
    center_crop = network.crop_mode == "center" and network.crop_pct <= 1
    if network.interpolation not in ("bilinear", "bicubic") or not (squash or center_crop):
        raise OneaError(
            f"The weights of '{vit.name}' expect {network.interpolation} interpolation and crop mode "
            f"{network.crop_mode} with crop_pct {network.crop_pct:g}, which --geometry backbone does not support; "
            "choose direct or resize-crop."
        )
    interpolation: Filter = "bicubic" if network.interpolation == "bicubic" else "bilinear"
    return ("direct", 0, interpolation) if squash else ("resize-crop", int(vit.size / network.crop_pct), interpolation)


def stream_of_run(config: RunConfig, dataset: Dataset) -> Stream:
    """The stream of a run on its dataset."""
    kind = config.stream
    if kind == "file":
        assert config.stream_file is not None
        stream = stream_from_file(config.stream_file, dataset)
        check_images(config.stream_file, stream, dataset, training_rows(dataset, stream, config.seed))
        return stream
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


def _load_images(
    config: RunConfig, dataset: Dataset, stream: Stream, preprocess: Preprocess, runtime: Runtime
) -> tuple[ImageSubset, ImageSubset, dict[str, Any]]:
    """Training and test images, and the record's fields about them."""
    splits = (dataset.train, dataset.test)
    storages: list[tuple[Images, Labels]] = []  # with the rows of the split
    skipped: list[str] = []
    hashes: list[str] = []
    stored: Any
    if config.store == "exact":
        stored = "exact"
        for split in splits:
            if split.files is None:
                raise OneaError("--store exact reads the original files, but this dataset has none; use --store auto.")
            rows, unreadable = find_readable(split, on_bad=config.on_bad, class_names=dataset.classes)
            images = ExactImages([split.files[row] for row in rows], preprocess, runtime.device)
            storages.append((images, rows))
            skipped += unreadable
            hashes.append(sha256_of_files(split.files))
    else:
        packs = _pack_images(config, dataset, preprocess.size)
        stored = list(packs[0].pixels.shape[2:])
        budget = None if config.budget is None else int(config.budget * 1e9)
        total = sum(packed.pixels.nbytes for packed in packs)
        tier = choose_storage_tier(total, budget, runtime.device) if config.store == "auto" else config.store
        for packed in packs:
            packed_images = PackedImages(packed.pixels, preprocess, runtime.device, tier, runtime.pixel_dtype)
            storages.append((packed_images, packed.rows))
            skipped += packed.skipped
            hashes.append(packed.sha256)
    train, test = (
        ImageSubset(images, _positions(stream, split.labels[rows]), torch.arange(len(rows)))
        for (images, rows), split in zip(storages, splits, strict=True)
    )
    by_split = _by_split(hashes)
    return train, test, {"stored": stored, "skipped": skipped, **({"sha256": by_split} if by_split else {})}


def _pack_images(config: RunConfig, dataset: Dataset, network_size: int) -> list[Packed]:
    """Training and test images, packed in one shape for a network of this input size."""
    size, splits, cache = round(network_size * CROP_MARGIN), (dataset.train, dataset.test), cache_folder()
    shape = stored_shape(splits, size, cache)
    return [pack(split, shape, cache=cache, on_bad=config.on_bad, class_names=dataset.classes) for split in splits]


def _select_rows(config: RunConfig, train: ImageSubset, test: ImageSubset) -> tuple[ImageSubset, ImageSubset]:
    """Apply the options ``holdout`` and ``per_class``."""
    rows = train.rows
    if (fraction := config.holdout) is not None:
        if not 0 < fraction < 1:
            raise OneaError(f"holdout is {fraction}; it must lie between 0 and 1.")
        held_out = sample_per_class(
            rows, train.labels, config.seed, "holdout", lambda _, count: max(1, round(fraction * count))
        )
        test = dataclasses.replace(train, rows=held_out)
        rows = rows[~torch.isin(rows, held_out)]
        if len(train.labels[rows].unique()) < len(train.labels.unique()):
            raise OneaError(f"holdout {fraction} leaves a class without training images; hold out less.")
    if (limit := config.per_class) is not None:
        if limit < 1:
            raise OneaError(f"per_class is {limit}; it must be at least 1.")
        rows = sample_per_class(rows, train.labels, config.seed, "per class", lambda _, __: limit)
    return dataclasses.replace(train, rows=rows), test


def training_rows(dataset: Dataset, stream: Stream, seed: int) -> list[int]:
    """The rows of a dataset's training images that a stream has."""
    rows = torch.arange(len(dataset.train))
    return _long_tail(rows, _positions(stream, dataset.train.labels), stream, seed).tolist()


def _positions(stream: Stream, labels: Labels) -> Tensor:
    """Labels of a dataset as positions in its stream."""
    position = np.empty(stream.classes, dtype=np.int64)
    position[list(stream.class_order)] = np.arange(stream.classes)
    return torch.from_numpy(position[labels])


def _long_tail(rows: Tensor, labels: Tensor, stream: Stream, seed: int) -> Tensor:
    """The rows that remain of each class in a long-tailed stream; otherwise all."""
    if (limits := stream.samples) is None:
        return rows
    return sample_per_class(rows, labels, seed, "long-tail", lambda position, _: limits[position])


def sample_per_class(rows: Tensor, labels: Tensor, seed: int, purpose: str, count: Callable[[int, int], int]) -> Tensor:
    """A random sample of the rows of every class; ``count`` gets the class and its number of rows."""
    row_labels = labels[rows]
    samples = []
    for position in row_labels.unique().tolist():
        class_rows = rows[row_labels == position]
        order = torch.randperm(len(class_rows), generator=seeds.generator(seed, position, purpose))
        samples.append(class_rows[order[: count(position, len(class_rows))]])
    return torch.cat(samples).sort().values


def method_options(config: RunConfig, size: DatasetSize) -> Any:
    """The options of a run's method for a dataset of this size: its preset, updated by those of the configuration."""
    preset = preset_options(config.method, config.preset, size, config.options)
    return make_options(method_class(config.method).Options, preset | config.options)


def images_per_task(config: RunConfig, stream: Stream, counts: Sequence[int]) -> list[int]:
    """The number of training images of each task.

    Args:
        config: configuration of the run.
        stream: stream of the run.
        counts: training images of each class, in the order of the dataset.
    """

    def class_images(position: int) -> int:
        count = counts[stream.class_order[position]]
        if config.holdout is not None:
            count -= max(1, round(config.holdout * count))
        limits = [limit for limit in (config.per_class, stream.samples and stream.samples[position]) if limit]
        return min(count, *limits) if limits else count

    return [sum(class_images(position) for position in stream.range_of(task)) for task in range(stream.tasks)]


def dataset_size(config: RunConfig, stream: Stream, counts: Sequence[int]) -> DatasetSize:
    """The numbers from which the default preset is computed."""
    return DatasetSize(sum(images_per_task(config, stream, counts)), stream.classes, stream.tasks)


def recorded_dataset_size(record: Record) -> DatasetSize:
    """The size of the dataset of a record; older records lack ``task_images``."""
    data, sizes = record["data"], record["stream"]["sizes"]
    return DatasetSize(data.get("task_images") or data["train_images"], sum(sizes), len(sizes))
