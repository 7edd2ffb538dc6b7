# SPDX-License-Identifier: Apache-2.0
"""What must be known about data and backbone before anything is run: counts, and the width that picks a preset."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from onea.data.names import data_name
from onea.errors import OneaError
from onea.paper.names import BACKBONE, BACKBONE_WIDTH, DATASETS
from onea.record import Record


@dataclass(frozen=True)
class DataFacts:
    """Counts of a dataset.

    Attributes:
        train: training images of each class.
        test: test images of each class.
        loaded: whether they were counted; otherwise they are the published ones, shared out evenly.
    """

    train: tuple[int, ...]
    test: tuple[int, ...]
    loaded: bool

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.train)

    @property
    def per_class(self) -> float:
        """Training images of a class, on average."""
        return sum(self.train) / len(self.train)


def data_facts(data: str, root: str | None) -> DataFacts:
    """Count a dataset's images, or fall back on the published counts where it is one of the paper's and not here."""
    if data == "cifar100":  # the same wherever it is, and counting would first download it
        return _published(data, loaded=True)
    import numpy as np

    from onea.data.sources import load_dataset
    from onea.files import default_cache

    try:
        dataset = load_dataset(data, root=Path(root) if root else None, cache=default_cache())
    except OneaError:
        if data in DATASETS:
            return _published(data, loaded=False)
        raise
    train, test = (
        tuple(np.bincount(side.labels, minlength=len(dataset.classes)).tolist())
        for side in (dataset.train, dataset.test)
    )
    return DataFacts(train, test, loaded=True)


class Recorded:
    """What finished records tell of their data and backbones, which need not be at hand any more."""

    def __init__(self, records: Iterable[Record], root: str | None):
        self._root = root
        self._facts: dict[str, DataFacts] = {}
        self._widths: dict[str, int] = {}
        for record in records:
            config, total = record["config"], tuple(record["total"])
            images, width = record["data"].get("train_images"), record["backbone"].get("width")
            if images is None or width is None:
                continue  # somebody has taken them out
            if config["per_class"] is None and config["holdout"] is None:
                self._facts[config["data"]] = DataFacts(_evenly(images, len(total)), total, loaded=True)
            self._widths[config["backbone"]] = width

    def facts(self, data: str) -> DataFacts:
        """Counts of a dataset, from a record if there is one."""
        return self._facts.get(data) or data_facts(data, self._root)

    def width(self, backbone: str) -> int:
        """The width of a backbone, from a record if there is one."""
        return self._widths.get(backbone) or backbone_width(backbone)


def _published(data: str, loaded: bool) -> DataFacts:
    known = DATASETS[data_name(data)]
    train, test = (_evenly(count, known.classes) for count in (known.train, known.test))
    return DataFacts(train, test, loaded)


def _evenly(count: int, classes: int) -> tuple[int, ...]:
    each, left = divmod(count, classes)
    return (each + 1,) * left + (each,) * (classes - left)


@cache
def backbone_width(name: str) -> int:
    """The width of a backbone, without its weights where that is possible."""
    if name == BACKBONE:
        return BACKBONE_WIDTH
    from onea.vit.backbones import load_backbone
    from onea.vit.embedded import EMBEDDED, file_of
    from onea.vit.weight_files import split_name

    if name in EMBEDDED:
        return _width_in_file(file_of(name))
    if parts := split_name(name):
        return _width_in_file(parts[1])
    import timm
    import torch

    architecture = name.split(".")[0]
    if not timm.is_model(architecture):
        return load_backbone(name).width  # says what is wrong with the name
    with torch.device("meta"):
        return int(timm.create_model(architecture, pretrained=False).num_features)


def _width_in_file(path: Path) -> int:
    from safetensors import SafetensorError, safe_open

    from onea.vit.backbones import load_backbone

    try:
        with safe_open(path, framework="pt") as file:
            return int(file.get_slice("patch_embed.proj.weight").get_shape()[0])
    except (OSError, SafetensorError):
        return load_backbone(str(path)).width  # says what is wrong with the file
