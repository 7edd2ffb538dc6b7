# SPDX-License-Identifier: Apache-2.0
"""The images of an update: the class of each, whether it was taught before, and whether it is held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onea import seeds
from onea.data.dataset import natural_key
from onea.errors import OneaError
from onea.learner.held_out import hold_out
from onea.model.learning.fingerprints import Repeats, fingerprints
from onea.model.learning.images import DecodedImages
from onea.model.learning.series import find_series
from onea.model.names import check_names
from onea.model.state import State
from onea.runtime import Progress

MIN_TO_HOLD_OUT = 4  # a class with fewer images has none held out


@dataclass(frozen=True)
class UpdateImages:
    """The images of an update before anything is learned from them.

    Attributes:
        names: their classes, in natural order.
        labels: the position of each image's class in ``names``, ``[N]``.
        classes: all classes of the model after the update; new ones come last.
        rows: the position of each image's class in ``classes``, ``[N]``.
        series: the series of each image, numbered within its class, ``[N]``.
        trained: images that the adapter may be trained on, ``bool [N]``; the others are held out.
        repeats: images that were taught before, or come twice, and all fingerprints.
    """

    names: list[str]
    labels: Tensor
    classes: tuple[str, ...]
    rows: Tensor
    series: Tensor
    trained: Tensor
    repeats: Repeats

    @classmethod
    def of(
        cls,
        batch: DecodedImages,
        names: list[str],
        features: Tensor,
        state: State,
        held_out: float,
        seed: int,
        progress: Progress,
    ) -> UpdateImages:
        """Find series and repeated photos, and hold out about the share ``held_out`` of each class.

        A photo that was held out before is held out again; other photos that were taught before are not held out.
        """
        assert batch.labels is not None
        position = {label: index for index, label in enumerate(names)}
        labels = torch.tensor([position[label] for label in batch.labels])
        classes = state.classes + tuple(label for label in names if label not in state.classes)
        series = find_series(features, labels, state.statistics)
        held = held_out_rows(labels, names, series, held_out, seed, state.next_update)
        trained = torch.ones(len(labels), dtype=torch.bool).index_fill(0, held, False)
        rows = torch.tensor([classes.index(label) for label in names])[labels]
        repeats = state.find_repeats(fingerprints(batch.pixels), batch.labels, progress)
        held_before = state.held_out.contains(rows, repeats.fingerprints)
        trained = _restore_split(trained, rows, repeats.taught_before, held_before)
        return cls(names, labels, classes, rows, series, trained, repeats)

    @property
    def new(self) -> Tensor:
        """Images that are added to the statistics, ``bool [N]``: all but repeated ones."""
        return ~self.repeats.repeated

    @property
    def evaluated(self) -> Tensor:
        """Images that accuracy is measured on, ``bool [N]``: held out, and no copies of other images."""
        return self.repeats.independent_of(self.trained)

    @property
    def training_counts(self) -> Counter[str]:
        """The number of images of each class that the adapter may be trained on."""
        return Counter(self.names[label] for label in self.labels[self.trained].tolist())


def held_out_rows(labels: Tensor, names: Sequence[str], groups: Tensor, share: float, seed: int, update: int) -> Tensor:
    """Images to hold out: about this share of each class, at least one of a class with ``MIN_TO_HOLD_OUT`` images.

    The choice depends on the seed, the update and the name of the class, and not on other classes.
    """
    orders = []
    for index, name in enumerate(names):
        of_class = (labels == index).nonzero()[:, 0]
        if share > 0 and len(of_class) >= MIN_TO_HOLD_OUT:
            generator = seeds.generator(seed, update, f"held out/{name}")
            orders.append(of_class[torch.randperm(len(of_class), generator=generator)])
    return hold_out(orders, share, groups, least=1).sort().values


def _restore_split(trained: Tensor, rows: Tensor, taught_before: Tensor, held_before: Tensor) -> Tensor:
    """Images that the adapter may be trained on: of those taught before, the ones that were not held out then.

    A class is split anew if none of its images was held out before, or if only such images come again.

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
    counts = Counter(batch.labels)
    for name in names:
        if counts[name] < 2 and name not in state.classes:
            raise OneaError(f"Class '{name}' has one image; give at least two, better ten or more.")
    return names


def has_integer_labels(state: State, batch: DecodedImages) -> bool:
    """Whether the classes of a model are given as whole numbers, which its first update decides."""
    return state.integer_labels if state.classes else batch.integer_labels
