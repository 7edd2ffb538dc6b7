# SPDX-License-Identifier: Apache-2.0
"""The immutable state of a model after an update."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onea.classifiers import make_classifier
from onea.classifiers.base import Classifier
from onea.classifiers.familiarity import NUM_SIGNALS, ClassSpread, Familiarity, Signals
from onea.classifiers.gaussian import RegularisedGaussian
from onea.classifiers.statistics import ClassStatistics
from onea.errors import OneaError, did_you_mean, truncate
from onea.model.exemplars import Exemplars
from onea.model.held_out import HeldOutImages
from onea.model.learning.fingerprints import NO_FINGERPRINTS, Repeats, find_copies, find_repeats
from onea.model.names import as_integers, check_names
from onea.runtime import NO_PROGRESS, Progress
from onea.tensors import Tensors

Update = dict[str, Any]
"""One entry of the history, as JSON."""

READOUTS = ("rgda", "whitened", "slda", "ncm")  # those suggested; any classifier that can follow drift will do
NO_SIGNALS, NO_ROWS = torch.empty(0, NUM_SIGNALS), torch.empty(0, dtype=torch.int64)
NO_FEATURES = torch.empty(0, 1, 1)
NO_CLASSES = "The model has no classes yet; teach it some first."
NO_CLASS_NAMED = "No class was named; name at least one to forget."
_CHOICE = f"{', '.join(READOUTS[:-1])} or {READOUTS[-1]}"
# Tensors with one entry per image, and the tensor with the class of each of these images.
_PER_IMAGE = {
    "held_out_signals": "held_out_signal_rows",
    "left_out_signals": "left_out_signal_rows",
    "fingerprints": "fingerprint_rows",
    "held_out_features": "held_out_rows",
    "held_out_fingerprints": "held_out_rows",
}


@cache
def classifier_for(readout: str) -> Classifier:
    """The classifier with this name, if it can be the readout of a model."""
    try:
        classifier = make_classifier(readout)
    except OneaError:
        raise OneaError(f"readout is '{truncate(readout)}'; choose {_CHOICE}.") from None
    if not classifier.follows_drift or not isinstance(classifier.statistics(1), ClassStatistics):
        raise OneaError(f"readout is '{readout}', which cannot follow changes of the adapter; choose {_CHOICE}.")
    return classifier


def empty_statistics(readout: str, width: int) -> ClassStatistics:
    """Statistics without classes for a readout; the scatter is always included, so that the readout can change."""
    statistics = classifier_for(readout).statistics(width)
    assert isinstance(statistics, ClassStatistics)
    return statistics if statistics.detail else ClassStatistics.empty(width)


def new_id() -> str:
    """A random id, to distinguish states with the same version number."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class State:
    """One version of a model; it never changes. Class ``i`` has row ``i`` in all tensors, which are on the CPU.

    Attributes:
        version: number of the update that made this state; never used twice.
        backbone: name and sha256 of the frozen network, and its depth if not all blocks are used; the licence of its
            weights if known; for a file, its name without the folder and its configuration.
        preprocess: preprocessing of the images.
        options: options of the training and the merge.
        classes: names of the classes.
        adapter: the merged adapter.
        adapter_images: the number of images of each class that the adapter stands for: of classes that it was trained
            on or distinguished without training, forgotten ones included.
        statistics: mean of each class, and the scatter around the means.
        readout: the name of the classifier.
        held_out_signals: signals of familiarity of images by statistics without them, ``[R, 5]``.
        held_out_signal_rows: the class of each of these images, ``[R]``.
        left_out_signals: signals of images whose class was left out of the statistics, standardised, ``[S, 5]``.
        left_out_signal_rows: the class of each of these images, ``[S]``.
        background: features of images that show none of the classes, ``[B, width]``; exact in bfloat16.
        temperature: temperature of the softmax.
        calibration_images: the number of images that the temperature was fitted to.
        updates: the history, oldest first.
        fingerprints: fingerprints of the images learned, ``int64 [P, 2]``.
        fingerprint_rows: the class of each of these images, ``[P]``.
        held_out_features: features of images held out of training, newest first, ``[H, views, width]``; exact in
            bfloat16.
        held_out_rows: the class of each of these images, ``[H]``.
        held_out_fingerprints: fingerprints of these images, ``[H, 2]``.
        exemplars: small copies of photos for later trainings, by class.
        integer_labels: whether the classes of the first update were given as whole numbers.
        id: random identifier, new for each state.
    """

    version: int
    backbone: Mapping[str, Any]
    preprocess: Mapping[str, Any]
    options: Mapping[str, Any]
    classes: tuple[str, ...]
    adapter: Tensors
    adapter_images: Mapping[str, int]
    statistics: ClassStatistics
    readout: str
    held_out_signals: Tensor
    held_out_signal_rows: Tensor
    left_out_signals: Tensor
    left_out_signal_rows: Tensor
    background: Tensor
    temperature: float
    calibration_images: int
    updates: tuple[Update, ...]
    fingerprints: Tensor = NO_FINGERPRINTS
    fingerprint_rows: Tensor = NO_ROWS
    held_out_features: Tensor = NO_FEATURES
    held_out_rows: Tensor = NO_ROWS
    held_out_fingerprints: Tensor = NO_FINGERPRINTS
    exemplars: Exemplars = field(default_factory=dict)
    integer_labels: bool = False
    id: str = field(default_factory=new_id)

    @property
    def classifier(self) -> Classifier:
        """The classifier that predicts from the statistics."""
        return classifier_for(self.readout)

    def signals(self, spread: ClassSpread | None = None) -> Signals:
        """The signals that distinguish known from unknown images; ``spread`` is that of a larger set of classes."""
        return Signals(self.statistics, isinstance(self.classifier, RegularisedGaussian), self.background, spread)

    def fit_familiarity(self) -> tuple[Familiarity, Tensor, Tensor]:
        """The familiarity as a module, and the values of held-out images and of images of left-out classes."""
        module = Familiarity(self.signals(), self.held_out_signals, self.left_out_signals)
        return module, module.combine(module.scale(self.held_out_signals)), module.combine(self.left_out_signals)

    @property
    def held_out(self) -> HeldOutImages:
        """The stored images held out of training."""
        return HeldOutImages(self.held_out_features, self.held_out_rows, self.held_out_fingerprints)

    @property
    def background_images(self) -> int:
        """The number of background images, minus those that were later taught as a class."""
        return background_images(self.updates)

    @property
    def images(self) -> list[int]:
        """The number of images of each class."""
        return (self.statistics.counts // int(self.options.get("views", 1))).tolist()

    @property
    def is_erasure(self) -> bool:
        """Whether the last update forgot classes everywhere."""
        return bool(self.updates) and "everywhere" in self.updates[-1]

    @property
    def next_update(self) -> int:
        """The position of the next update in the history.

        It seeds all random numbers, so an update that is undone and repeated gives the same result.
        """
        return len(self.updates) + 1

    def row(self, name: str) -> int:
        """The row of a class."""
        if not self.classes:
            raise OneaError(NO_CLASSES)
        if name not in self.classes:
            raise OneaError(f"The model has no class '{name}'; {did_you_mean(name, self.classes)}")
        return self.classes.index(name)

    def find_repeats(self, fingerprints: Tensor, labels: Sequence[str], progress: Progress = NO_PROGRESS) -> Repeats:
        """Find images of an update that were taught before, as the same class or as another one."""
        known_labels = [self.classes[row] for row in self.fingerprint_rows.tolist()]
        return find_repeats(fingerprints, labels, self.fingerprints, known_labels, progress)

    def find_taught(self, fingerprints: Tensor) -> dict[int, str]:
        """Positions of the images that were taught before, with their classes."""
        copies = enumerate(find_copies(fingerprints, self.fingerprints).tolist())
        return {position: self.classes[self.fingerprint_rows[copy]] for position, copy in copies if copy >= 0}

    def labels(self, names: Sequence[str]) -> npt.NDArray[Any]:
        """Class names, or ``unknown``, as labels: integers if all classes were given as such, otherwise text."""
        integers = as_integers(names) if self.integer_labels and as_integers(self.classes) is not None else None
        return np.array(names, dtype=np.str_) if integers is None else integers

    def forget(self, names: Sequence[str], version: int, date: str) -> State:
        """The next state without these classes; their names stay in the history, unlike with ``storage.erasure``."""
        forgotten = {self.row(name): name for name in names}  # a class that is named twice counts once
        if not forgotten:
            raise OneaError(NO_CLASS_NAMED)
        kept = [row for row in range(len(self.classes)) if row not in forgotten]
        entry = history_entry("forget", version, date, list(forgotten.values()), len(kept))
        return self.keep_classes(kept, version, entry)

    def keep_classes(self, kept: list[int], version: int, entry: Update) -> State:
        """The next state with some of the classes, and the stored data of their images."""
        rows = torch.tensor(kept, dtype=torch.int64)
        new_row = torch.full((len(self.classes),), -1).scatter(0, rows, torch.arange(len(kept)))
        per_image: dict[str, Any] = {}
        for name, rows_name in _PER_IMAGE.items():
            moved = new_row[getattr(self, rows_name)]
            per_image[name], per_image[rows_name] = getattr(self, name)[moved >= 0], moved[moved >= 0]
        return replace(
            self,
            id=new_id(),
            version=version,
            classes=tuple(self.classes[row] for row in kept),
            statistics=self.statistics.select_classes(rows),
            exemplars={name: self.exemplars[name] for row in kept if (name := self.classes[row]) in self.exemplars},
            updates=(*self.updates, entry),
            **per_image,
        )

    def merge_classes(self, old: str, new: str, version: int, date: str) -> State:
        """The next state, in which two classes are merged under the name of the second."""
        row, target = self.row(old), self.row(new)
        if row == target:
            raise OneaError(f"'{old}' and '{new}' are the same class; give the names of two classes.")
        kept = [other for other in range(len(self.classes)) if other != row]
        entry = history_entry("rename", version, date, [old, new], len(kept)) | {"merged": True}
        merged = replace(
            self,
            statistics=self.statistics.merge_classes(row, target).compact(),
            adapter_images=rename_count(self.adapter_images, old, new),
            exemplars=rename_files(self.exemplars, old, new),
            **{
                name: rows.where(rows != row, target) for name in _PER_IMAGE.values() for rows in (getattr(self, name),)
            },
        )
        return merged.keep_classes(kept, version, entry)

    def rename(self, old: str, new: str, version: int, date: str) -> State:
        """The next state, in which a class is renamed; the new name may be that of a forgotten class."""
        row = self.row(old)
        if new == old:
            raise OneaError(f"The class is already called '{old}'; give it another name.")
        check_names([new], [name for name in self.classes if name != old])
        if new in self.classes:
            raise OneaError(
                f"The model already has a class '{new}'; choose another name for '{old}', or merge them with "
                "merge=True."
            )
        classes = (*self.classes[:row], new, *self.classes[row + 1 :])
        return replace(
            self,
            id=new_id(),
            version=version,
            classes=classes,
            adapter_images=rename_count(self.adapter_images, old, new),
            exemplars=rename_files(self.exemplars, old, new),
            updates=(*self.updates, history_entry("rename", version, date, [old, new], len(classes))),
        )


def background_images(updates: Sequence[Mapping[str, Any]]) -> int:
    """The number of background images in a history, minus those that were later taught as a class.

    >>> background_images([{"kind": "learn", "images": 40}, {"kind": "background", "images": 7}])
    7
    """
    taught: int = sum(update["images"] for update in updates if update["kind"] == "background")
    return max(0, taught - relabelled_images(updates))


def relabelled_images(updates: Sequence[Mapping[str, Any]]) -> int:
    """The number of background images in a history that were later taught as a class."""
    return sum(int(update.get("relabelled_background", 0)) for update in updates)


def add_counts(images: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """The sum of two numbers of images for each class.

    >>> add_counts({"apple": 5, "pear": 5}, {"apple": 2, "plum": 3})
    {'apple': 7, 'pear': 5, 'plum': 3}
    """
    return dict(Counter(images) + Counter(more))


def rename_count(images: Mapping[str, int], old: str, new: str) -> dict[str, int]:
    """Numbers of images of each class after one class was renamed.

    >>> rename_count({"apple": 5, "pear": 5}, "apple", "plum")
    {'pear': 5, 'plum': 5}
    """
    others = {name: count for name, count in images.items() if name != old}
    return add_counts(others, {new: images.get(old, 0)})


def rename_files(exemplars: Exemplars, old: str, new: str) -> Exemplars:
    """The stored copies after a class was renamed or merged into another one."""
    others = {name: files for name, files in exemplars.items() if name != old}
    return others | ({new: exemplars.get(new, ()) + exemplars[old]} if old in exemplars else {})


def history_entry(kind: str, version: int, date: str, classes: list[str], known: int) -> Update:
    """The fields that every entry of the history has."""
    return {"version": version, "kind": kind, "date": date, "classes": classes, "known": known}
