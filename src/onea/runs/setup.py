"""From a configuration to everything a run needs: network, images on their device, stream and method."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onea import seeds
from onea.data.dataset import Dataset, Split
from onea.data.pack import default_cache, pack, stored_shape
from onea.data.sources import load_dataset
from onea.data.store import ExactImages, Images, PackedImages, choose_place
from onea.data.transforms import Preprocess
from onea.errors import OneaError
from onea.methods import method_class
from onea.methods.adapter_merging import AdapterMemo, AdapterMerging
from onea.methods.contract import Method
from onea.methods.presets import choose_preset, preset_options
from onea.options import build
from onea.runs.config import RunConfig
from onea.runtime import Runtime
from onea.streams import Stream, make_stream, parse_sizes
from onea.tasks import Plan, Task
from onea.vit.backbones import load_backbone
from onea.vit.frozen import FrozenViT

_CROP_MARGIN = 256 / 224  # packed images keep the margin around the network's input that the published protocol has
_DEFAULT_TASKS = 10


@dataclass(frozen=True)
class Side:
    """Training or test images with their labels as stream positions."""

    images: Images
    labels: Tensor


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    stream: Stream
    train: Side
    test: Side
    method: Method
    description: dict[str, Any]
    seed: int

    def task(self, index: int) -> Task:
        """A task of the stream, with its images."""
        classes = self.stream.range_of(index)
        inside = (self.train.labels >= classes.start) & (self.train.labels < classes.stop)
        rows = self._limit(inside.nonzero()[:, 0])
        name = self.stream.names[index] if self.stream.names else f"task {index + 1}"
        return Task(index, name, classes, self.train.images, rows, self.train.labels[rows], self.seed)

    def _limit(self, rows: Tensor) -> Tensor:
        """At most as many images per class as a long-tailed stream allows, chosen by the seed."""
        if self.stream.samples is None:
            return rows
        labels = self.train.labels[rows]
        kept = []
        for position in labels.unique().tolist():
            own = rows[labels == position]
            draw = torch.randperm(len(own), generator=seeds.generator(self.seed, position, "long-tail"))
            kept.append(own[draw[: self.stream.samples[position]]])
        return torch.cat(kept).sort().values


def prepare(config: RunConfig, runtime: Runtime, memo: AdapterMemo | None = None) -> Prepared:
    """Check everything and load everything; raises before anything is written if the request cannot be met."""
    config = _protocol(config)
    vit = load_backbone(config.backbone)
    dataset = load_dataset(config.data, root=Path(config.root) if config.root else None, cache=default_cache())
    stream = _stream(config, dataset)
    method, options = _method(config, vit, stream, runtime, memo)
    train, test, stored = _images(config, dataset, stream, _preprocess(config, vit, dataset), runtime)
    vit.keep_matrices_in(runtime.dtype).to(runtime.device)
    description = {
        "data": {
            "name": dataset.name,
            "fingerprint": dataset.fingerprint,
            "classes": [dataset.classes[index] for index in stream.class_order],
            "train_images": len(train.labels),
            "test_images": len(test.labels),
            **stored,
        },
        "backbone": {"name": vit.name, "sha256": vit.digest, "input": vit.size, "depth": vit.depth, "width": vit.width},
        "stream": stream.to_json(),
        "options": options,
    }
    return Prepared(stream, train, test, method, description, config.seed)


def _protocol(config: RunConfig) -> RunConfig:
    if config.protocol == "pilot":
        return dataclasses.replace(config, normalise="none", geometry="resize-crop")
    return config


def _preprocess(config: RunConfig, vit: FrozenViT, dataset: Dataset) -> Preprocess:
    raw = config.normalise == "none"
    crop = config.geometry == "resize-crop"
    return Preprocess(
        size=vit.size,
        mean=(0.0, 0.0, 0.0) if raw else vit.mean,
        std=(1.0, 1.0, 1.0) if raw else vit.std,
        geometry=config.geometry,
        resize=round(vit.size * _CROP_MARGIN) if crop else 0,
        filter="bicubic" if crop else "bilinear",
        mirror=dataset.mirror,
    )


def _stream(config: RunConfig, dataset: Dataset) -> Stream:
    kind = config.stream
    if kind == "auto":
        natural = dataset.groups and config.tasks is None
        kind = "sizes" if config.sizes else "natural" if natural else "step"
    if kind == "natural" and not dataset.groups:
        raise OneaError(
            f"'{dataset.name}' has no natural groups; give --tasks, or put class folders into task folders."
        )
    tasks = config.tasks or (min(_DEFAULT_TASKS, len(dataset.classes)) if kind in ("step", "balanced") else None)
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
        n_max=int(np.bincount(dataset.train.labels).max()),
    )


def _method(
    config: RunConfig, vit: FrozenViT, stream: Stream, runtime: Runtime, memo: AdapterMemo | None
) -> tuple[Method, dict[str, Any]]:
    kind = method_class(config.method)
    known = {field.name for field in dataclasses.fields(kind.Options)}
    preset = preset_options(choose_preset(config.preset, vit.width), config.data)
    options: Any = build(
        kind.Options, {name: value for name, value in preset.items() if name in known} | config.options
    )
    plan = Plan(stream.classes, stream.tasks)
    if issubclass(kind, AdapterMerging):
        return kind(vit, options, runtime, plan, memo), dataclasses.asdict(options)
    return kind(vit, options, runtime, plan), dataclasses.asdict(options)


def _images(
    config: RunConfig, dataset: Dataset, stream: Stream, preprocess: Preprocess, runtime: Runtime
) -> tuple[Side, Side, dict[str, Any]]:
    position = np.empty(stream.classes, dtype=np.int64)
    position[list(stream.class_order)] = np.arange(stream.classes)
    sides = (dataset.train, dataset.test)
    if config.store == "exact":
        train, test = (_exact(side, position, preprocess, runtime) for side in sides)
        return train, test, {"stored": "exact", "skipped": []}
    size = round(preprocess.size * _CROP_MARGIN)
    shape = stored_shape(sides, size)
    packs = [
        pack(side, size, cache=default_cache(), on_bad=config.on_bad, shape=shape, class_names=dataset.classes)
        for side in sides
    ]
    budget = None if config.budget is None else int(config.budget * 1e9)
    total = sum(packed.pixels.nbytes for packed in packs)
    place = choose_place(total, budget, runtime.device) if config.store == "auto" else config.store
    train, test = (
        Side(
            PackedImages(packed.pixels, preprocess, runtime.device, place),
            torch.from_numpy(position[side.labels[packed.rows]]),
        )
        for packed, side in zip(packs, sides, strict=True)
    )
    return train, test, {"stored": list(shape), "skipped": [line for packed in packs for line in packed.skipped]}


def _exact(side: Split, position: np.ndarray[Any, Any], preprocess: Preprocess, runtime: Runtime) -> Side:
    if side.files is None:
        raise OneaError("--store exact streams original files, and this dataset has none; use --store auto.")
    return Side(ExactImages(side.files, preprocess, runtime.device), torch.from_numpy(position[side.labels]))
