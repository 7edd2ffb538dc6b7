# SPDX-License-Identifier: Apache-2.0
"""The images of an update: what each of them shows, whether it was there before, and what it is for."""

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
from onea.model.learning.series import series
from onea.model.names import check_names
from onea.model.state import State
from onea.runtime import Progress

FEW = 4  # a class with fewer images holds none out


@dataclass(frozen=True)
class UpdateImages:
    """What is known of each image of an update before anything is learned from it.

    Attributes:
        names: their classes, in natural order.
        labels: the position of each image's class among these, ``[N]``.
        classes: all classes that the model knows after the update, new ones behind the others.
        rows: the position of each image's class among those, ``[N]``.
        series: the series of each image, numbered within its class, ``[N]``.
        trained: images that the adapter may be trained on, ``bool [N]``; the others are held out.
        repeats: images that were there before, or come twice; their fingerprints.
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
        """Sort out images by their features and by what the model was taught; about the share ``held_out`` is.

        A photo that was held out of training before is held out again, and others that were taught before are not.
        """
        assert batch.labels is not None
        position = {label: index for index, label in enumerate(names)}
        labels = torch.tensor([position[label] for label in batch.labels])
        classes = state.classes + tuple(label for label in names if label not in state.classes)
        alike = series(features, labels, state.statistics)
        held = held_out_rows(labels, names, alike, held_out, seed, state.next_update)
        trained = torch.ones(len(labels), dtype=torch.bool).index_fill(0, held, False)
        rows = torch.tensor([classes.index(label) for label in names])[labels]
        repeats = state.repeats(fingerprints(batch.pixels), batch.labels, progress)
        held_before = state.held_out.shown_by(rows, repeats.fingerprints)
        return cls(
            names=names,
            labels=labels,
            classes=classes,
            rows=rows,
            series=alike,
            trained=_as_before(trained, rows, repeats.before, held_before),
            repeats=repeats,
        )

    @property
    def new(self) -> Tensor:
        """Images that join the statistics, ``bool [N]``: those that were not there before as the same class."""
        return ~self.repeats.seen

    @property
    def measured(self) -> Tensor:
        """Images that say how well new ones are answered, ``bool [N]``."""
        return self.repeats.unseen_by(self.trained)

    @property
    def taught(self) -> Counter[str]:
        """The number of images of each class that the adapter may be trained on."""
        return Counter(self.names[label] for label in self.labels[self.trained].tolist())


def held_out_rows(labels: Tensor, names: Sequence[str], groups: Tensor, share: float, seed: int, update: int) -> Tensor:
    """Images kept out of training: about this share of each class, at least one of a class with four or more.

    The draw depends on the seed, the update and the name of the class, and not on other classes.
    """
    orders = []
    for index, name in enumerate(names):
        own = (labels == index).nonzero()[:, 0]
        if share > 0 and len(own) >= FEW:
            generator = seeds.generator(seed, update, f"held out/{name}")
            orders.append(own[torch.randperm(len(own), generator=generator)])
    return hold_out(orders, share, groups, least=1).sort().values


def _as_before(trained: Tensor, rows: Tensor, before: Tensor, held: Tensor) -> Tensor:
    """Which images the adapter may be trained on: of those taught before, the ones that were not held out then.

    A class of which nothing was held out, or nothing else comes again, is divided anew.

    >>> trained, held = torch.tensor([True, False, True, True]), torch.tensor([True, False, False, False])
    >>> _as_before(trained, torch.zeros(4, dtype=torch.int64), torch.tensor([True, True, True, False]), held).tolist()
    [False, True, True, True]
    """
    divided = torch.isin(rows, rows[held]) & torch.isin(rows, rows[before & ~held])
    return trained.where(~(divided & before), ~held)


def checked_classes(batch: DecodedImages, state: State) -> list[str]:
    """The classes of an update in natural order, or one sentence about what is wrong with them."""
    assert batch.labels is not None
    names = sorted(set(batch.labels), key=natural_key)
    check_names(names, state.classes)
    counts = Counter(batch.labels)
    for name in names:
        if counts[name] < 2 and name not in state.classes:
            raise OneaError(f"Class '{name}' has one image; give at least two, better ten or more.")
    return names


def given_as_numbers(state: State, batch: DecodedImages) -> bool:
    """Whether a model was given its classes as whole numbers; its first update decides."""
    return state.numbers if state.classes else batch.numbers
