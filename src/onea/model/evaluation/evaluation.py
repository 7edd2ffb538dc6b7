# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a model on labelled images: accuracy, confusion matrix and mistakes; optionally on unknown images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from onea.data.file_checks import OnBad
from onea.errors import OneaError
from onea.metrics import wilson_interval
from onea.model.answers import Snapshot
from onea.model.evaluation.metrics import Counts, OpenSet, is_correct
from onea.model.learning.fingerprints import compute_fingerprints
from onea.model.learning.images import DecodedImages, check_folder, find_images, read_labelled
from onea.model.names import UNKNOWN, check_spelling, normalise
from onea.model.reports import folder_notes
from onea.runtime import NO_PROGRESS, Progress
from onea.text import plural


@dataclass(frozen=True)
class Mistake:
    """A misclassified image.

    Attributes:
        image: path or number of the image.
        label: true class.
        predicted: the predicted class.
        probability: probability of the predicted class.
    """

    image: str
    label: str
    predicted: str
    probability: float


@dataclass(frozen=True)
class Evaluation:
    """The predictions of a model on labelled images. Accuracy, ``wrong_rate`` and ``unknown_rate`` add up to 1.

    >>> result = Evaluation(("kiwi", "lemon"), np.array([[7, 2], [0, 10]]), np.array([1, 0]), (), version=1)
    >>> result.accuracy, result.wrong_rate, result.unknown_rate
    (0.85, 0.1, 0.05)
    >>> result.worst_first()[0], result.confusions()
    (('kiwi', Counts(images=10, correct=7, unknown=1)), [('kiwi', 'lemon', 2)])

    Attributes:
        classes: classes of the images, sorted by name, then those that are only predicted.
        confusion: ``int64 [classes, classes]``: images of a class (row) by the predicted class (column).
        unknown_counts: images of each class that are predicted as ``unknown``.
        untaught_classes: classes of images that the model was never taught; they are not part of the accuracy.
        version: version of the model.
        open_set: the comparison with unknown images, if there are any.
        taught_images: number of images that the model was taught with, on which the accuracy is too high.
        ignored_files: files of the folder without the suffix of a photo, or outside class folders.
        group_folders: subfolders that contain class folders.
        skipped: ``path: reason`` of each image that could not be read.
        mistakes: misclassified images of taught classes, the highest probability first.
    """

    classes: tuple[str, ...]
    confusion: npt.NDArray[np.int64]
    unknown_counts: npt.NDArray[np.int64]
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
        """Remarks on the images, one line each."""
        lines = folder_notes(self.ignored_files, self.group_folders)
        if self.taught_images:
            total = int(self.confusion.sum() + self.unknown_counts.sum())
            were = "was" if self.taught_images == 1 else "were"
            lines.append(
                f"{self.taught_images:,} of {total:,} images {were} taught: the accuracy on new images may be lower"
            )
        return lines

    @cached_property
    def by_class(self) -> dict[str, Counts]:
        """Predictions on the images of each class, including untaught classes."""
        images, correct = self.confusion.sum(1) + self.unknown_counts, np.diagonal(self.confusion)
        rows = zip(self.classes, images.tolist(), correct.tolist(), self.unknown_counts.tolist(), strict=True)
        return {name: Counts(*numbers) for name, *numbers in rows if numbers[0]}

    @property
    def _taught(self) -> dict[str, Counts]:
        return {name: counts for name, counts in self.by_class.items() if name not in self.untaught_classes}

    @cached_property
    def total(self) -> Counts:
        """Predictions on all images of taught classes."""
        return sum(self._taught.values(), Counts(0, 0, 0))

    @property
    def images(self) -> int:
        """The number of images of taught classes."""
        return self.total.images

    @property
    def accuracy(self) -> float:
        """The share of images of taught classes that are correctly classified."""
        return self.total.accuracy

    @property
    def wrong_rate(self) -> float:
        """The share of images of taught classes that are misclassified."""
        return self.total.wrong / self.images

    @property
    def unknown_rate(self) -> float:
        """The share of images of taught classes that are predicted as ``unknown``."""
        return self.total.unknown / self.images

    @property
    def balanced_accuracy(self) -> float:
        """The mean accuracy of the taught classes."""
        return sum(counts.accuracy for counts in self._taught.values()) / len(self._taught)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the accuracy."""
        return wilson_interval(self.total.correct, self.images)

    def worst_first(self) -> list[tuple[str, Counts]]:
        """Taught classes by increasing accuracy."""
        return sorted(self._taught.items(), key=lambda item: (item[1].accuracy, item[0]))

    def confusions(self, limit: int = 10) -> list[tuple[str, str, int]]:
        """The most frequent mistakes on taught classes: class, prediction, images."""
        wrong = self.confusion - np.diag(np.diagonal(self.confusion))
        counts = [(self.classes[i], self.classes[j], int(wrong[i, j])) for i, j in np.argwhere(wrong)]
        mistakes = (mistake for mistake in counts if mistake[0] not in self.untaught_classes)
        return sorted(mistakes, key=lambda mistake: (-mistake[2], mistake[0], mistake[1]))[:limit]

    def __str__(self) -> str:
        low, high = (100 * end for end in self.interval)
        return (
            f"{self.total} of {plural(self.images, 'image', 'images')} (version {self.version}); "
            f"accuracy {low:.0f} to {high:.0f} % (95 % confidence interval); mean accuracy of the classes "
            f"{100 * self.balanced_accuracy:.1f} %"
        )

    def as_json(self) -> dict[str, Any]:
        """All results as values for JSON; the class with the lowest accuracy first."""
        return {
            "version": self.version,
            "images": self.images,
            "accuracy": self.accuracy,
            "accuracy_interval": list(self.interval),
            "balanced_accuracy": self.balanced_accuracy,
            "wrong": self.wrong_rate,
            "unknown": self.unknown_rate,
            "classes": [
                {
                    "class": name,
                    "images": counts.images,
                    "correct": counts.correct,
                    "wrong": counts.wrong,
                    "unknown": counts.unknown,
                }
                for name, counts in self.worst_first()
            ],
            "untaught_classes": [
                {"class": name, "images": self.by_class[name].images, "unknown": self.by_class[name].unknown}
                for name in self.untaught_classes
            ],
            "confusions": [
                {"class": name, "predicted": predicted, "images": images}
                for name, predicted, images in self.confusions(self.confusion.size)
            ],
            "mistakes": [
                {
                    "image": mistake.image,
                    "class": mistake.label,
                    "predicted": mistake.predicted,
                    "probability": mistake.probability,
                }
                for mistake in self.mistakes
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
    """Evaluate a model on a folder of class folders, or on images and labels.

    Args:
        model: the version to evaluate.
        images: the folder, or the images.
        labels: labels of the images; None for a folder.
        unknown: folder with images of none of the model's classes.
        on_bad: ``fail`` or ``skip`` images that cannot be read.
        progress: is notified of every batch.
    """
    unknown_batch = None if unknown is None else _read_unknown(model, unknown, on_bad)
    batch = read_labelled(images, labels, model.side, on_bad, progress, purpose="evaluate")
    assert batch.labels is not None
    check_spelling(batch.labels, model.classes)
    scores = model.compute_scores(batch, progress)
    answers = model.answers_from(batch, scores, k=1)
    image_classes = sorted(set(batch.labels))
    untaught = tuple(name for name in image_classes if name not in model.classes)
    if len(untaught) == len(image_classes):
        raise OneaError(
            f"None of the classes of these images are in the model ({', '.join(untaught[:5])}); check the names."
        )
    classes = (*image_classes, *sorted({answer.label for answer in answers} - {*image_classes, UNKNOWN}))
    rows = {name: row for row, name in enumerate(classes)}
    table = np.zeros((len(classes), len(classes) + 1), np.int64)  # the last column is for unknown
    mistakes = []
    for label, answer in zip(batch.labels, answers, strict=True):
        table[rows[label], len(classes) if answer.label == UNKNOWN else rows[answer.label]] += 1
        if label in model.classes and answer.label not in (label, UNKNOWN):
            mistakes.append(Mistake(answer.image, label, answer.label, answer.probability))
    open_set = None
    if unknown_batch is not None:
        taught = torch.tensor([label not in untaught for label in batch.labels])
        correct = torch.from_numpy(is_correct(batch.labels, [answer.top[0][0] for answer in answers]))
        unfamiliar = model.compute_scores(unknown_batch).familiarity
        open_set = OpenSet(scores.familiarity[taught], correct[taught], unfamiliar, model.threshold)
    return Evaluation(
        classes,
        table[:, :-1],
        table[:, -1],
        untaught,
        model.version,
        open_set,
        taught_images=len(model.state.find_taught(compute_fingerprints(batch.pixels))),
        ignored_files=batch.ignored_files,
        group_folders=batch.group_folders,
        skipped=(*batch.skipped, *(unknown_batch.skipped if unknown_batch else ())),
        mistakes=tuple(sorted(mistakes, key=lambda mistake: -mistake.probability)),
    )


def _read_unknown(model: Snapshot, folder: Path, on_bad: OnBad) -> DecodedImages:
    """All images below a folder; no folder may have the name of one of the model's classes."""
    check_folder(folder, "images of untaught classes")
    files = find_images(folder)
    known = {normalise(name): name for name in model.classes}
    folders = {folder.resolve().name, *(part for file in files for part in file.relative_to(folder).parent.parts)}
    if taught := sorted(known[normalise(name)] for name in folders if normalise(name) in known):
        raise OneaError(
            f"{folder} contains images of '{taught[0]}', a class of the model; give only images of untaught classes."
        )
    return model.read(files, on_bad)
