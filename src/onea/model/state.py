# SPDX-License-Identifier: Apache-2.0
"""What a model knows after so many updates: an immutable value that can be swapped whole."""

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
from onea.classifiers.familiarity import NUM_SIGNALS, Familiarity, Signals
from onea.classifiers.gaussian import RegularisedGaussian
from onea.classifiers.statistics import ClassStatistics
from onea.errors import OneaError, did_you_mean, truncate
from onea.model.held_out import HeldOut
from onea.model.learning.fingerprints import NO_PRINTS, Repeats, find_repeats, first_copies
from onea.model.names import as_numbers, check_names
from onea.runtime import NO_PROGRESS, Progress
from onea.tensors import Tensors

Update = dict[str, Any]

READOUTS = ("rgda", "whitened", "slda", "ncm")  # and any other classifier that a model can keep
NO_SIGNALS, NO_ROWS = torch.empty(0, NUM_SIGNALS), torch.empty(0, dtype=torch.int64)
NO_HELD = torch.empty(0, 1, 1)
KNOWS_NOTHING = "The model knows no class yet; teach it some first."
NOTHING_NAMED = "No class is named, so nothing would change; name at least one to forget."
_ROWS = ("margin_rows", "hidden_rows", "fingerprint_rows", "held_rows")  # which class each of their images shows
_CHOICE = f"{', '.join(READOUTS[:-1])} or {READOUTS[-1]}"


@cache
def classifier_for(readout: str) -> Classifier:
    """The classifier that a readout names."""
    try:
        found = make_classifier(readout)
    except OneaError:
        raise OneaError(f"readout is '{truncate(readout)}'; choose {_CHOICE}.") from None
    if not found.follows_drift or not isinstance(found.statistics(1), ClassStatistics):
        raise OneaError(f"readout is '{readout}', which cannot follow an adapter that learns; choose {_CHOICE}.")
    return found


def statistics_for(readout: str, width: int) -> ClassStatistics:
    """Statistics of no class that a readout can answer from; the scatter is always kept, for another readout."""
    needed = classifier_for(readout).statistics(width)
    assert isinstance(needed, ClassStatistics)
    return needed if needed.detail else ClassStatistics.empty(width)


def new_id() -> str:
    """Tells apart states that happen to have the same version."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class State:
    """One version of a model; nothing in it ever changes. Class ``i`` has row ``i`` everywhere. All on the CPU.

    Attributes:
        version: number of the update that made it; never used twice.
        backbone: name and sha256 of the frozen network, a file's name without its folder; its depth where not all
            blocks are used; where they are known, the licence of its weights and, of one from a file, how it is built.
        preprocess: how images become its input.
        options: of the training and the merge.
        adapter: the one adapter that is kept.
        merged: the number of images of each class that the adapter was trained on, forgotten classes included.
        statistics: the prototype of each class, and how images spread around them.
        readout: the name of the classifier that answers from them.
        margins: signals of familiarity of images that were held out, ``[R, 5]``.
        margin_rows: the class that each of them shows, ``[R]``.
        hidden: those of images of classes that were left out, as deviations from known images, ``[S, 5]``.
        hidden_rows: the class that each of these shows, ``[S]``.
        background: features of images that show none of the classes, ``[B, width]``; exact in bfloat16.
        fingerprints: of the images that were taught, ``int64 [P, 2]``.
        fingerprint_rows: the class that each of them was taught as, ``[P]``.
        held: features of images held out of training, newest first, ``[H, views, width]``; exact in bfloat16.
        held_rows: the class that each of them shows, ``[H]``.
        held_prints: their fingerprints, ``[H, 2]``.
        temperature: of the probabilities.
        calibrated_on: images that the temperature was fitted on.
        updates: what happened so far, oldest first, as JSON-able values.
        numbers: whether the first classes were given as whole numbers.
    """

    version: int
    backbone: Mapping[str, Any]
    preprocess: Mapping[str, Any]
    options: Mapping[str, Any]
    classes: tuple[str, ...]
    adapter: Tensors
    merged: Mapping[str, int]
    statistics: ClassStatistics
    readout: str
    margins: Tensor
    margin_rows: Tensor
    hidden: Tensor
    hidden_rows: Tensor
    background: Tensor
    temperature: float
    calibrated_on: int
    updates: tuple[Update, ...]
    fingerprints: Tensor = NO_PRINTS
    fingerprint_rows: Tensor = NO_ROWS
    held: Tensor = NO_HELD
    held_rows: Tensor = NO_ROWS
    held_prints: Tensor = NO_PRINTS
    numbers: bool = False
    id: str = field(default_factory=new_id)

    @property
    def classifier(self) -> Classifier:
        """The rule that answers."""
        return classifier_for(self.readout)

    def signals(self) -> Signals:
        """What tells new images from known ones."""
        return Signals(self.statistics, isinstance(self.classifier, RegularisedGaussian), self.background)

    def calibrated_familiarity(self) -> tuple[Familiarity, Tensor, Tensor]:
        """The familiarity of images as a module, that of images held out, and that of images of classes left out."""
        rule = Familiarity(self.signals(), self.margins, self.hidden)
        return rule, rule.combine(rule.scale(self.margins)), rule.combine(self.hidden)

    @property
    def held_out(self) -> HeldOut:
        """What is kept of images held out of training."""
        return HeldOut(self.held, self.held_rows, self.held_prints)

    @property
    def background_images(self) -> int:
        """The number of images that were taught as background and as no class since; features of some are kept."""
        return background_images(self.updates)

    @property
    def images(self) -> list[int]:
        """The number of images of each class."""
        return (self.statistics.counts // int(self.options.get("views", 1))).tolist()

    @property
    def erased(self) -> bool:
        """Whether the last update forgot classes everywhere."""
        return bool(self.updates) and "everywhere" in self.updates[-1]

    @property
    def next_update(self) -> int:
        """Which update the next one is; it decides all draws, so that one undone and taught again is the same."""
        return len(self.updates) + 1

    def row(self, name: str) -> int:
        """The row of a class."""
        if not self.classes:
            raise OneaError(KNOWS_NOTHING)
        if name not in self.classes:
            raise OneaError(f"The model does not know '{name}'; {did_you_mean(name, self.classes)}")
        return self.classes.index(name)

    def repeats(self, prints: Tensor, labels: Sequence[str], progress: Progress = NO_PROGRESS) -> Repeats:
        """Which photos with these fingerprints were taught before, as the same class or another."""
        known = [self.classes[row] for row in self.fingerprint_rows.tolist()]
        return find_repeats(prints, labels, self.fingerprints, known, progress)

    def taught_as(self, prints: Tensor) -> dict[int, str]:
        """Which photos with these fingerprints were taught, by their rows, and as what."""
        found = enumerate(first_copies(prints, self.fingerprints).tolist())
        return {row: self.classes[self.fingerprint_rows[at]] for row, at in found if at >= 0}

    def labels(self, names: Sequence[str]) -> npt.NDArray[Any]:
        """Names of classes, or ``unknown``, as the labels that were given: numbers while all classes are, or text."""
        numbers = as_numbers(names) if self.numbers and as_numbers(self.classes) is not None else None
        return np.array(names, dtype=np.str_) if numbers is None else numbers

    def without(self, names: Sequence[str], version: int, date: str) -> State:
        """The next state, which no longer answers these classes; see ``storage.erasure`` for the rest."""
        gone = {self.row(name): name for name in names}  # whoever names a class twice means it once
        if not gone:
            raise OneaError(NOTHING_NAMED)
        kept = [row for row in range(len(self.classes)) if row not in gone]
        return self.reduced(kept, version, noted("forget", version, date, list(gone.values()), len(kept)))

    def reduced(self, kept: list[int], version: int, note: Update) -> State:
        """The next state with these classes alone, and with what is known of images of these."""
        chosen = torch.tensor(kept, dtype=torch.int64)
        position = torch.full((len(self.classes),), -1).scatter(0, chosen, torch.arange(len(kept)))
        rows, hidden = position[self.margin_rows], position[self.hidden_rows]
        prints, held = position[self.fingerprint_rows], position[self.held_rows]
        return replace(
            self,
            id=new_id(),
            version=version,
            classes=tuple(self.classes[row] for row in kept),
            statistics=self.statistics.select_classes(chosen),
            margins=self.margins[rows >= 0],
            margin_rows=rows[rows >= 0],
            hidden=self.hidden[hidden >= 0],
            hidden_rows=hidden[hidden >= 0],
            fingerprints=self.fingerprints[prints >= 0],
            fingerprint_rows=prints[prints >= 0],
            held=self.held[held >= 0],
            held_rows=held[held >= 0],
            held_prints=self.held_prints[held >= 0],
            updates=(*self.updates, note),
        )

    def joined(self, old: str, new: str, version: int, date: str) -> State:
        """The next state, in which two classes are one, called by the name of the second."""
        row, into = self.row(old), self.row(new)
        if row == into:
            raise OneaError(f"'{old}' and '{new}' are one class already; name two that the model knows.")
        kept = [each for each in range(len(self.classes)) if each != row]
        note = noted("rename", version, date, [old, new], len(kept)) | {"joined": True}
        both = replace(
            self,
            statistics=self.statistics.merge_classes(row, into).compact(),
            merged=merged_under(self.merged, old, new),
            **{name: rows.where(rows != row, into) for name in _ROWS for rows in (getattr(self, name),)},
        )
        return both.reduced(kept, version, note)

    def renamed(self, old: str, new: str, version: int, date: str) -> State:
        """The next state, in which a class has another name; it takes the place of a forgotten one of that name."""
        row = self.row(old)
        if new == old:
            raise OneaError(f"The class is called '{old}' already, so nothing would change; give it another name.")
        check_names([new], [name for name in self.classes if name != old])
        if new in self.classes:
            raise OneaError(
                f"The model already knows '{new}'; choose another name for '{old}', or set merge=True to make them one."
            )
        classes = (*self.classes[:row], new, *self.classes[row + 1 :])
        note = noted("rename", version, date, [old, new], len(classes))
        return replace(
            self,
            id=new_id(),
            version=version,
            classes=classes,
            merged=merged_under(self.merged, old, new),
            updates=(*self.updates, note),
        )


def background_images(updates: Sequence[Mapping[str, Any]]) -> int:
    """The number of background images in a history, less those that became images of a class.

    >>> background_images([{"kind": "learn", "images": 40}, {"kind": "background", "images": 7}])
    7
    """
    given: int = sum(update["images"] for update in updates if update["kind"] == "background")
    return max(0, given - became_classes(updates))


def became_classes(updates: Sequence[Mapping[str, Any]]) -> int:
    """The number of background images in a history that were taught as a class later."""
    return sum(int(update.get("were_background", 0)) for update in updates)


def merged_with(merged: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """The images of each class inside the adapter after more were merged.

    >>> merged_with({"apple": 5, "pear": 5}, {"apple": 2, "plum": 3})
    {'apple': 7, 'pear': 5, 'plum': 3}
    """
    return dict(Counter(merged) + Counter(more))


def merged_under(merged: Mapping[str, int], old: str, new: str) -> dict[str, int]:
    """The images of each class inside the adapter after one got another name.

    >>> merged_under({"apple": 5, "pear": 5}, "apple", "plum")
    {'pear': 5, 'plum': 5}
    """
    rest = {name: images for name, images in merged.items() if name != old}
    return merged_with(rest, {new: merged.get(old, 0)})


def noted(kind: str, version: int, date: str, classes: list[str], known: int) -> Update:
    """An update as histories write it; those that read images say more."""
    return {"version": version, "kind": kind, "date": date, "classes": classes, "known": known}
