# SPDX-License-Identifier: Apache-2.0
"""The images of an update: their classes and series, which ones are repeated, and which ones are held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from onea import seeds
from onea.data.dataset import natural_key
from onea.errors import OneaError
from onea.learner.held_out import hold_out
from onea.model.learning.fingerprints import Repeats, compute_fingerprints
from onea.model.learning.images import DecodedImages
from onea.model.learning.series import find_series
from onea.model.names import check_names
from onea.model.state import State
from onea.runtime import Progress
from onea.tensors import rows_of_each

MIN_TO_HOLD_OUT = 4  # a class with fewer images has none held out


@dataclass(frozen=True)
class UpdateImages:
    """The images of an update before anything is learned from them.

    Attributes:
        names: classes of the images, in natural order.
        labels: the position of each image's class in ``names``, ``[N]``.
        classes: all classes of the model after the update; new ones come last.
        rows: the position of each image's class in ``classes``, ``[N]``.
        features: features with the adapter before the update, ``[N, width]``.
        series: the series of each image, numbered within its class, ``[N]``.
        trained: which images the adapter may be trained on, ``bool [N]``; the others are held out.
        repeats: repeated images, and all fingerprints.
        repeated_classes: rows of the classes all of whose earlier images are in this update again.
        taught: which images are those of the user, ``bool [N]``; the others are stored copies of earlier photos.
    """

    names: list[str]
    labels: Tensor
    classes: tuple[str, ...]
    rows: Tensor
    features: Tensor
    series: Tensor
    trained: Tensor
    repeats: Repeats
    repeated_classes: Tensor
    taught: Tensor

    @classmethod
    def prepare(
        cls,
        batch: DecodedImages,
        features: Tensor,
        state: State,
        held_out: float,
        seed: int,
        progress: Progress,
    ) -> UpdateImages:
        """Find series and repeated images, and hold out about the share ``held_out`` of each class.

        Images that were held out before are held out again; other repeated images are not.
        """
        assert batch.labels is not None
        names = sorted(set(batch.labels), key=natural_key)
        position = {label: index for index, label in enumerate(names)}
        labels = torch.tensor([position[label] for label in batch.labels])
        row_of = {name: row for row, name in enumerate(state.classes)}
        classes = state.classes + tuple(label for label in names if label not in row_of)
        row_of |= {name: row for row, name in enumerate(classes[len(state.classes) :], len(state.classes))}
        series = find_series(features, labels, state.statistics)
        held = held_out_rows(labels, names, series, held_out, seed, state.next_update)
        trained = torch.ones(len(labels), dtype=torch.bool).index_fill(0, held, False)
        rows = torch.tensor([row_of[label] for label in names])[labels]
        fingerprints = compute_fingerprints(batch.pixels) if batch.fingerprints is None else batch.fingerprints
        repeats = state.find_repeats(fingerprints, batch.labels, progress)
        held_before = state.held_out.contains(rows, repeats.fingerprints)
        trained = _restore_split(trained, rows, repeats.taught_before, held_before)
        counts = torch.bincount(state.fingerprint_rows[repeats.matched], minlength=len(state.classes))
        complete = (counts > 0) & (counts >= torch.tensor(state.images, dtype=torch.int64))
        taught = torch.arange(len(labels)) < len(labels) - batch.copies
        return cls(names, labels, classes, rows, features, series, trained, repeats, complete.nonzero()[:, 0], taught)

    @property
    def new(self) -> Tensor:
        """Which images are added to the statistics, ``bool [N]``: those that are not repeated."""
        return self.taught & ~self.repeats.repeated

    @property
    def are_taught_again(self) -> bool:
        """Whether the user gave all earlier images of a class again, to train on them."""
        return bool((self.taught & torch.isin(self.rows, self.repeated_classes)).any())

    @cached_property
    def evaluated(self) -> Tensor:
        """Which images the accuracy is measured on, ``bool [N]``: held out, and not copies of other images."""
        return self.repeats.independent_of(self.trained)

    @property
    def recompute(self) -> tuple[Tensor, Tensor]:
        """``repeated_classes``, and their repeated images without duplicates, ``bool [N]``."""
        repeated = self.repeats.taught_before & ~self.repeats.duplicates
        return self.repeated_classes, torch.isin(self.rows, self.repeated_classes) & repeated

    @property
    def training_counts(self) -> Counter[str]:
        """The number of images of each class that the adapter may be trained on."""
        return Counter(self.names[label] for label in self.labels[self.trained].tolist())

    def newly_trained_counts(self, before: Mapping[str, int]) -> Counter[str]:
        """``training_counts`` without copies of classes that the adapter stood for before."""
        was_trained = torch.tensor([name in before for name in self.names])[self.labels]
        return Counter(self.names[label] for label in self.labels[self.trained & (self.taught | ~was_trained)].tolist())


def held_out_rows(labels: Tensor, names: Sequence[str], groups: Tensor, share: float, seed: int, update: int) -> Tensor:
    """Images to hold out: about this share of each class, at least one of a class with ``MIN_TO_HOLD_OUT`` images.

    The selection depends on the seed, the update and the name of the class, and not on other classes.
    """
    orders = []
    for index, of_class in rows_of_each(labels):
        name = names[index]
        if share > 0 and len(of_class) >= MIN_TO_HOLD_OUT:
            generator = seeds.generator(seed, update, f"held out/{name}")
            orders.append(of_class[torch.randperm(len(of_class), generator=generator)])
    return hold_out(orders, share, groups, min_per_class=1).sort().values


def _restore_split(trained: Tensor, rows: Tensor, taught_before: Tensor, held_before: Tensor) -> Tensor:
    """Which images the adapter may be trained on: of the repeated ones, those that were not held out before.

    If all repeated images of a class were held out, or none, the new split is used.

    >>> trained, held = torch.tensor([True, False, True, True]), torch.tensor([True, False, False, False])
    >>> before = torch.tensor([True, True, True, False])
    >>> _restore_split(trained, torch.zeros(4, dtype=torch.int64), before, held).tolist()
    [False, True, True, True]
    """
    was_split = torch.isin(rows, rows[held_before]) & torch.isin(rows, rows[taught_before & ~held_before])
    return trained.where(~(was_split & taught_before), ~held_before)


def class_names(batch: DecodedImages, state: State) -> list[str]:
    """The classes of an update in natural order.

    Raises:
        OneaError: a name is invalid, or a new class has a single image.
    """
    assert batch.labels is not None
    names = sorted(set(batch.labels), key=natural_key)
    check_names(names, state.classes)
    counts, known = Counter(batch.labels), set(state.classes)
    for name in names:
        if counts[name] < 2 and name not in known:
            raise OneaError(f"Class '{name}' has only one image; give at least two, preferably ten or more.")
    return names


def has_integer_labels(state: State, batch: DecodedImages) -> bool:
    """Whether the labels of the first update were whole numbers."""
    return state.integer_labels if state.classes else batch.integer_labels
