# SPDX-License-Identifier: Apache-2.0
"""How well a model does on images whose class is known, and on images of nothing that it was taught."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from onea.data.image_files import OnBad
from onea.errors import OneaError
from onea.metrics import wilson_interval
from onea.model.answers import Snapshot
from onea.model.evaluation.metrics import Counts, OpenSet, is_correct
from onea.model.learning.fingerprints import fingerprints
from onea.model.learning.images import DecodedImages, check_folder, find_images, read_labelled
from onea.model.names import UNKNOWN, check_spelling, folded
from onea.model.reports import folder_notes
from onea.runtime import NO_PROGRESS, Progress
from onea.text import plural


@dataclass(frozen=True)
class Mistake:
    """An image that is answered with another class than its own.

    Attributes:
        image: its path or number.
        label: the class that it shows.
        predicted: the class that is answered.
        probability: of that class.
    """

    image: str
    label: str
    predicted: str
    probability: float


@dataclass(frozen=True)
class Evaluation:
    """What a model answered on labelled images: accuracy, wrong and unknown are shares of them and add up to 1.

    >>> found = Evaluation(("kiwi", "lemon"), np.array([[7, 2], [0, 10]]), np.array([1, 0]), (), version=1)
    >>> found.accuracy, found.wrong, found.unknown
    (0.85, 0.1, 0.05)
    >>> found.worst_first()[0], found.confusions()
    (('kiwi', Counts(images=10, correct=7, unknown=1)), [('kiwi', 'lemon', 2)])

    Attributes:
        classes: of the images, in natural order, then those only answered.
        confusion: ``int64 [classes, classes]``: images of a class (row) by the class that is answered (column).
        unknown_of: images of each class that are answered ``unknown`` instead.
        untaught_classes: classes of images that the model was never taught; they count nowhere else.
        open_set: how these images compare with unknown ones, where some were given.
        taught_images: how many of the images the model was taught with, which says little about new ones.
        ignored_files: files of the folder that are no photos by their ending, or lie in no class folder.
        group_folders: folders of the folder that hold class folders.
        skipped: ``path: reason`` of each image that could not be read.
        mistakes: the images of classes that were taught and are taken for others, the surest first.
    """

    classes: tuple[str, ...]
    confusion: npt.NDArray[np.int64]
    unknown_of: npt.NDArray[np.int64]
    untaught_classes: tuple[str, ...]
    version: int
    open_set: OpenSet | None = None
    taught_images: int = 0
    ignored_files: tuple[str, ...] = ()
    group_folders: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    mistakes: tuple[Mistake, ...] = ()

    @property
    def remarks(self) -> list[str]:
        """What a person should know about these figures, in sentences."""
        lines = folder_notes(self.ignored_files, self.group_folders)
        if self.taught_images:
            one = self.taught_images == 1
            were, they = ("was", "it does") if one else ("were", "they do")
            total = int(self.confusion.sum() + self.unknown_of.sum())
            lines.append(
                f"{self.taught_images:,} of {total:,} images {were} taught: {they} not tell how new ones are answered"
            )
        return lines

    @cached_property
    def by_class(self) -> dict[str, Counts]:
        """How each class of the images was answered, those that were never taught included."""
        images, correct = (self.confusion.sum(1) + self.unknown_of).tolist(), np.diagonal(self.confusion).tolist()
        rows = zip(self.classes, images, correct, self.unknown_of.tolist(), strict=True)
        return {name: Counts(*numbers) for name, *numbers in rows if numbers[0]}

    @property
    def _taught(self) -> list[Counts]:
        return [found for name, found in self.by_class.items() if name not in self.untaught_classes]

    @cached_property
    def total(self) -> Counts:
        """How the images of classes that were taught were answered."""
        return sum(self._taught, Counts(0, 0, 0))

    @property
    def images(self) -> int:
        """The number of images of classes that were taught."""
        return self.total.images

    @property
    def accuracy(self) -> float:
        """Share of them that are answered with their class (``onea.model.evaluation.metrics``)."""
        return self.total.accuracy

    @property
    def wrong(self) -> float:
        """Share of them that are answered with another class."""
        return self.total.wrong / self.images

    @property
    def balanced_accuracy(self) -> float:
        """Mean accuracy of the classes."""
        return sum(found.accuracy for found in self._taught) / len(self._taught)

    @property
    def unknown(self) -> float:
        """Share of them that were answered ``unknown``."""
        return self.total.unknown / self.images

    def worst_first(self) -> list[tuple[str, Counts]]:
        """Each class that was taught and has images, the worst first."""
        taught = (item for item in self.by_class.items() if item[0] not in self.untaught_classes)
        return sorted(taught, key=lambda item: (item[1].accuracy, item[0]))

    def confusions(self, most: int = 10) -> list[tuple[str, str, int]]:
        """The most frequent mistakes about classes that were taught: class, answer, images."""
        wrong = self.confusion - np.diag(np.diagonal(self.confusion))
        found = [(self.classes[i], self.classes[j], int(wrong[i, j])) for i, j in np.argwhere(wrong)]
        mistakes = (mistake for mistake in found if mistake[0] not in self.untaught_classes)
        return sorted(mistakes, key=lambda mistake: (-mistake[2], mistake[0], mistake[1]))[:most]

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the accuracy."""
        return wilson_interval(self.total.correct, self.images)

    def __str__(self) -> str:
        low, high = (100 * end for end in self.interval)
        return (
            f"{self.total} of {plural(self.images, 'image', 'images')} (version {self.version}); "
            f"accuracy {low:.0f} to {high:.0f} % (95 % confidence interval); mean accuracy of the classes "
            f"{100 * self.balanced_accuracy:.1f} %"
        )

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON-able values; the worst class first."""
        return {
            "version": self.version,
            "images": self.images,
            "accuracy": self.accuracy,
            "accuracy_interval": list(self.interval),
            "balanced_accuracy": self.balanced_accuracy,
            "wrong": self.wrong,
            "unknown": self.unknown,
            "classes": [
                {
                    "class": name,
                    "images": one.images,
                    "correct": one.correct,
                    "wrong": one.wrong,
                    "unknown": one.unknown,
                }
                for name, one in self.worst_first()
            ],
            "untaught_classes": [
                {"class": name, "images": self.by_class[name].images, "unknown": self.by_class[name].unknown}
                for name in self.untaught_classes
            ],
            "confusions": [
                {"class": name, "predicted": answer, "images": images}
                for name, answer, images in self.confusions(self.confusion.size)
            ],
            "mistakes": [
                {"image": one.image, "class": one.label, "predicted": one.predicted, "probability": one.probability}
                for one in self.mistakes
            ],
            "open_set": self.open_set and self.open_set.as_json(),
            "taught_images": self.taught_images,
            "ignored_files": list(self.ignored_files),
            "group_folders": list(self.group_folders),
            "skipped": list(self.skipped),
        }


def evaluate(
    model: Snapshot,
    images: Any,
    labels: Any = None,
    unknown: Path | None = None,
    on_bad: OnBad = "fail",
    progress: Progress = NO_PROGRESS,
) -> Evaluation:
    """Ask a model about images whose class is known: a folder of class folders, or images and labels.

    Args:
        model: which is asked.
        images: the folder, or the images.
        labels: of the images; None for a folder.
        unknown: folder with images of nothing that the model was taught, to compare the images of known classes with.
        on_bad: what an image that cannot be read does: ``fail`` or ``skip``.
        progress: hears how far it is.
    """
    strange = None if unknown is None else _read_unknown(model, unknown, on_bad)
    batch = read_labelled(images, labels, model.side, on_bad, progress, purpose="evaluate")
    assert batch.labels is not None
    check_spelling(batch.labels, model.classes)
    judged = model.compute_scores(batch, progress)
    answers = model.answers_from(batch, judged, k=1)
    shown = sorted(set(batch.labels))
    if not set(shown) & set(model.classes):
        raise OneaError(
            f"The model knows none of the classes in these images ({', '.join(shown[:5])}); check the names."
        )
    given = [answer.label for answer in answers]
    classes = (*shown, *sorted({*given} - {*shown, UNKNOWN}))
    row = {name: index for index, name in enumerate(classes)}
    confusion = np.zeros((len(classes), len(classes)), np.int64)
    unknown_of = np.zeros(len(classes), np.int64)
    for truth, label in zip(batch.labels, given, strict=True):
        if label == UNKNOWN:
            unknown_of[row[truth]] += 1
        else:
            confusion[row[truth], row[label]] += 1
    never = tuple(name for name in shown if name not in model.classes)
    open_set = None
    if strange is not None:
        taught = torch.tensor([truth not in never for truth in batch.labels])
        nearest = torch.from_numpy(is_correct(batch.labels, [answer.top[0][0] for answer in answers]))
        unfamiliar = model.compute_scores(strange).familiarity
        open_set = OpenSet(judged.familiarity[taught], nearest[taught], unfamiliar, model.threshold)
    taught_images = len(model.state.find_taught(fingerprints(batch.pixels)))
    mistakes = [
        Mistake(answer.image, truth, answer.label, answer.probability)
        for truth, answer in zip(batch.labels, answers, strict=True)
        if truth in model.classes and answer.label not in (truth, UNKNOWN)
    ]
    mistakes.sort(key=lambda mistake: -mistake.probability)
    return Evaluation(
        classes,
        confusion,
        unknown_of,
        never,
        model.version,
        open_set,
        taught_images,
        ignored_files=batch.ignored_files,
        group_folders=batch.group_folders,
        skipped=(*batch.skipped, *(strange.skipped if strange else ())),
        mistakes=tuple(mistakes),
    )


def _read_unknown(model: Snapshot, folder: Path, on_bad: OnBad) -> DecodedImages:
    """All images below a folder, none of which may lie in a folder named as a class that the model knows."""
    check_folder(folder, "images of nothing that the model was taught")
    files = find_images(folder)
    known = {folded(name): name for name in model.classes}
    inside = {part for file in files for part in file.relative_to(folder).parent.parts}
    if taught := sorted(known[folded(name)] for name in {folder.resolve().name, *inside} if folded(name) in known):
        raise OneaError(
            f"{folder} holds images of '{taught[0]}', which the model knows; leave only images of nothing that it was "
            "taught."
        )
    return model.read(files, on_bad)
