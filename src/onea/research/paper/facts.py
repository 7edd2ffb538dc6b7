# SPDX-License-Identifier: Apache-2.0
"""What must be known about data before anything is run: how many images there are of each class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from onea.errors import OneaError
from onea.research.data import data_name
from onea.research.paper.names import DATASETS
from onea.research.record import Record


@dataclass(frozen=True)
class DataFacts:
    """Counts of a dataset.

    Attributes:
        train: training images of each class.
        test: test images of each class.
        loaded: whether they were counted; otherwise they are the published ones, shared out evenly.
        groups: how many natural tasks there are.
    """

    train: tuple[int, ...]
    test: tuple[int, ...]
    loaded: bool
    groups: int = 0

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
        return published(data)
    import numpy as np

    from onea.files import cache_folder
    from onea.research.data.sources import load_dataset

    try:
        dataset = load_dataset(data, root=Path(root) if root else None, cache=cache_folder())
    except OneaError:
        if data in DATASETS:
            return published(data, loaded=False)
        raise
    train, test = (
        tuple(np.bincount(side.labels, minlength=len(dataset.classes)).tolist())
        for side in (dataset.train, dataset.test)
    )
    return DataFacts(train, test, loaded=True, groups=len(dataset.groups))


class Recorded:
    """What finished records tell of their data, which need not be at hand any more."""

    def __init__(self, records: Iterable[Record], root: str | None):
        self._root = root
        self._facts: dict[str, DataFacts] = {}
        for record in records:
            config, total = record["config"], tuple(record["total"])
            images = record["data"].get("train_images")  # somebody may have taken it out
            if images is not None and config["per_class"] is None and config["holdout"] is None:
                self._facts[config["data"]] = DataFacts(_evenly(images, len(total)), total, loaded=True)

    def facts(self, data: str) -> DataFacts:
        """Counts of a dataset, from a record if there is one."""
        return self._facts.get(data) or data_facts(data, self._root)


def published(data: str, loaded: bool = True) -> DataFacts:
    """The published counts of one of the datasets of the paper, shared out evenly among its classes."""
    known = DATASETS[data_name(data)]
    train, test = (_evenly(count, known.classes) for count in (known.train, known.test))
    return DataFacts(train, test, loaded)


def _evenly(count: int, classes: int) -> tuple[int, ...]:
    each, left = divmod(count, classes)
    return (each + 1,) * left + (each,) * (classes - left)
