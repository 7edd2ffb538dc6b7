# SPDX-License-Identifier: Apache-2.0
"""Checks of a model alone or of photos: advice for each class, confused classes, suspect labels and duplicates."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from onea import seeds
from onea.classifiers.base import Classifier
from onea.classifiers.statistics import ClassStatistics
from onea.classifiers.validation import assign_folds
from onea.data.dataset import natural_key
from onea.errors import OneaError
from onea.model.answers import Snapshot
from onea.model.evaluation.confusions import (
    GOOD_ACCURACY,
    NO_MISTAKES,
    Mistakes,
    NearestClasses,
    count_mistakes,
    gaussian_overlap,
    held_out_mistakes,
    held_out_overlap,
    nearest_classes,
)
from onea.model.evaluation.label_errors import LabelErrors, find_label_errors, label_error_classifier
from onea.model.learning.images import DecodedImages
from onea.model.learning.series import MAX_GROUPS, groups_by_class
from onea.model.learning.update_images import MIN_TO_HOLD_OUT
from onea.model.names import check_spelling
from onea.model.reports import MIN_ADVISED
from onea.model.state import State

Advice = Literal[
    "taught enough",
    "not measured",
    "more photos would help",
    "too similar to another class",
    "often misclassified",
    "no mistakes stand out",
    "few photos",
    "too few to judge",
]
ADVICE_BY_URGENCY: tuple[Advice, ...] = (
    "too few to judge",
    "few photos",
    "often misclassified",
    "more photos would help",
    "too similar to another class",
    "not measured",
    "no mistakes stand out",
    "taught enough",
)
SHARES = (0.25, 0.5, 0.75, 1.0)  # of a class's photos, at the points of a learning curve
_NUM_ORDERS = 4  # random orders of the series of a class, over which a learning curve is averaged
_MIN_GAIN = 0.02  # of accuracy, from half of the photos to all, from which more photos would help
_CONFUSABLE = 0.25  # overlap from which two classes can hardly be distinguished
_MIN_OVERLAP, _MIN_GAUSSIAN_OVERLAP = 0.05, 0.01  # of the pairs that are listed
_THUMBNAIL = 16  # pixels
_MAX_DIFFERENCE = 6.0  # mean difference in grey levels of thumbnails of one photo that was saved or resized again


@dataclass(frozen=True)
class ClassCheck:
    """The result for one class.

    Attributes:
        name: name of the class.
        taught: number of photos that the model learned it from; 0 for a class that is not in the model.
        photos: number of photos in the folder; 0 without a folder.
        curve: accuracy on held-out photos with 25, 50, 75 and 100 % of the others; None if not measured.
        rival: the class with which it is confused most often, if any.
        advice: how to improve its accuracy, if necessary.
    """

    name: str
    taught: int
    photos: int
    curve: tuple[float, ...] | None
    rival: str | None
    advice: Advice

    @property
    def needs_attention(self) -> bool:
        """Whether the advice calls for action."""
        return self.advice not in ("taught enough", "no mistakes stand out", "not measured")


@dataclass(frozen=True)
class Pair:
    """Two classes and the share of their photos that are nearer to the other one; both classes have the same weight."""

    first: str
    second: str
    overlap: float

    @property
    def alike(self) -> bool:
        """Whether the classes can hardly be distinguished."""
        return self.overlap >= _CONFUSABLE


@dataclass(frozen=True)
class Suspect:
    """A photo whose label may be wrong.

    Attributes:
        image: path of the photo.
        given: label of the photo.
        likelier: the most likely other class.
        ratio: log of the likelihood ratio of that class to the label; for ranking, as it is not calibrated.
    """

    image: str
    given: str
    likelier: str
    ratio: float


@dataclass(frozen=True)
class Duplicate:
    """A photo with two labels; ``identical`` if all pixels are equal, otherwise the two images are nearly equal."""

    image: str
    given: str
    other_image: str
    other: str
    identical: bool


@dataclass(frozen=True)
class Check:
    """The results of a check.

    Attributes:
        version: version of the model.
        classes: the most urgent advice first.
        pairs: the largest overlap first; each class with its nearest classes only.
        suspects: photos that look mislabelled, the most suspicious first; empty without a folder.
        duplicates: photos with two labels.
        skipped: ``path: reason`` of each photo that could not be read.
        measured: whether the check was made with a folder of photos.
        mistakes: mistakes on held-out photos: of the folder or, without a folder, of the updates.
    """

    version: int
    classes: tuple[ClassCheck, ...]
    pairs: tuple[Pair, ...]
    suspects: tuple[Suspect, ...] = ()
    duplicates: tuple[Duplicate, ...] = ()
    skipped: tuple[str, ...] = ()
    measured: bool = False
    mistakes: Mistakes = NO_MISTAKES

    def as_json(self) -> dict[str, Any]:
        """The results as values for JSON."""
        pairs = [{**dataclasses.asdict(pair), "alike": pair.alike} for pair in self.pairs]
        return {**dataclasses.asdict(self), "shares": SHARES, "pairs": pairs}


def check_model(state: State) -> Check:
    """Check a model by its statistics and its stored held-out features, without photos.

    The statistics are those of photos that the adapter was trained on. Classes of new photos overlap more, so only the
    ranking of the pairs is reliable.
    """
    if not state.classes:
        return Check(state.version, (), ())
    neighbours = gaussian_overlap(state.statistics, state.images)
    overlaps = neighbours.overlap[:, 0].tolist() if len(state.classes) > 1 else [0.0]
    mistakes, measured = held_out_mistakes(state)
    misclassified = {result.name for result in mistakes.misclassified}
    rivals = _rivals(neighbours, state.classes)
    classes = [
        ClassCheck(
            name, photos, 0, None, rival, _advise_by_model(photos, overlap, name in misclassified, name in measured)
        )
        for name, photos, rival, overlap in zip(state.classes, state.images, rivals, overlaps, strict=True)
    ]
    pairs = _pairs(neighbours, state.classes, _MIN_GAUSSIAN_OVERLAP)
    return Check(state.version, _by_urgency(classes), pairs, mistakes=mistakes)


def check_photos(model: Snapshot, batch: DecodedImages) -> Check:
    """Check labelled photos, whether or not the model was taught with them.

    Features are computed with the model's adapter. Classes of the photos are evaluated by cross-validation on the
    photos alone; for the model's other classes, its statistics are used.

    Raises:
        OneaError: there is only one class.
    """
    assert batch.labels is not None
    check_spelling(batch.labels, model.classes)
    photo_classes = sorted(set(batch.labels), key=natural_key)
    other_classes = [name for name in model.classes if name not in photo_classes]
    names = [*other_classes, *photo_classes]
    if len(names) < 2:
        raise OneaError(
            f"There is only the class '{names[0]}'; add a second class to compare it with, then check again."
        )
    counts = Counter(batch.labels)
    rows = torch.tensor([names.index(label) for label in batch.labels])
    features = model.engine.features(batch.pixels, model.adapters)
    known = _select_statistics(model.state, other_classes)
    errors = find_label_errors(known, features, rows)

    accuracy = torch.full((len(names), len(SHARES)), torch.nan, dtype=torch.float64)
    overlap = torch.zeros(len(names), len(names), dtype=torch.float64)
    tested = torch.tensor([counts[label] >= MIN_TO_HOLD_OUT for label in batch.labels])
    mistakes = NO_MISTAKES
    if bool(tested.any()):
        others, tested_features, tested_rows = (
            known.add(features[~tested], rows[~tested]),
            features[tested],
            rows[tested],
        )
        series = groups_by_class(tested_features, tested_rows, MAX_GROUPS)
        curves = learning_curves(label_error_classifier(), others, tested_features, tested_rows, series)
        accuracy, overlap = curves.accuracy, held_out_overlap(curves.scores, tested_rows)
        mistakes = count_mistakes(curves.scores.argmax(1), tested_rows, names)

    taught = dict(zip(model.classes, model.state.images, strict=True))
    rivals = _rivals(nearest_classes(overlap), names)
    classes = []
    for row, name in enumerate(names[len(other_classes) :], len(other_classes)):
        curve = None if accuracy[row].isnan().any() else tuple(accuracy[row].tolist())
        advice = _advise(counts[name], curve)
        classes.append(ClassCheck(name, taught.get(name, 0), counts[name], curve, rivals[row], advice))
    return Check(
        model.version,
        _by_urgency(classes),
        _pairs(nearest_classes((overlap + overlap.T) / 2), names, _MIN_OVERLAP),
        _suspects(batch, names, errors),
        _duplicates(batch, errors.neighbours),
        batch.skipped,
        measured=True,
        mistakes=mistakes,
    )


def _select_statistics(state: State, classes: Sequence[str]) -> ClassStatistics:
    """The means of these classes with the covariance of all classes; empty statistics if there are none."""
    if not classes:
        return ClassStatistics.empty(state.statistics.width)
    rows = torch.tensor([state.row(name) for name in classes])
    return replace(state.statistics.select_classes(rows), factors=None, cut=None)


def _advise_by_model(photos: int, overlap: float, misclassified: bool, held_out: bool) -> Advice:
    """The advice for a class from a model: by its largest overlap, its mistakes, and whether it has held-out photos.

    >>> [_advise_by_model(30, *facts) for facts in ((0.3, False, True), (0.0, False, True), (0.0, False, False))]
    ['too similar to another class', 'no mistakes stand out', 'not measured']
    """
    advice = _advise(photos, None)
    if advice != "not measured":
        return advice
    if misclassified:
        return "often misclassified"
    if overlap >= _CONFUSABLE:
        return "too similar to another class"
    return "no mistakes stand out" if held_out else "not measured"


def _advise(photos: int, curve: Sequence[float] | None) -> Advice:
    """The advice for a class from its number of photos and its learning curve.

    >>> _advise(30, (0.5, 0.6, 0.7, 0.8)), _advise(30, (0.7, 0.7, 0.7, 0.7))
    ('more photos would help', 'too similar to another class')
    """
    if photos < MIN_TO_HOLD_OUT:
        return "too few to judge"
    if photos < MIN_ADVISED:
        return "few photos"
    if curve is None:
        return "not measured"
    if curve[-1] >= GOOD_ACCURACY:
        return "taught enough"
    gain = curve[-1] - curve[SHARES.index(0.5)]
    return "more photos would help" if gain >= _MIN_GAIN else "too similar to another class"


def _by_urgency(classes: Sequence[ClassCheck]) -> tuple[ClassCheck, ...]:
    def key(check: ClassCheck) -> tuple[int, float, int, str]:
        accuracy = check.curve[-1] if check.curve else 0.0
        return ADVICE_BY_URGENCY.index(check.advice), accuracy, check.photos or check.taught, check.name

    return tuple(sorted(classes, key=key))


def _rivals(neighbours: NearestClasses, names: Sequence[str]) -> list[str | None]:
    """The class that each class overlaps most with."""
    if len(names) < 2:
        return [None] * len(names)
    nearest = zip(neighbours.overlap[:, 0].tolist(), neighbours.rows[:, 0].tolist(), strict=True)
    return [names[row] if overlap > 0 else None for overlap, row in nearest]


def _pairs(neighbours: NearestClasses, names: Sequence[str], threshold: float) -> tuple[Pair, ...]:
    pairs = [Pair(names[i], names[j], overlap) for (i, j), overlap in neighbours.pairs(threshold).items()]
    return tuple(sorted(pairs, key=lambda pair: (-pair.overlap, pair.first, pair.second)))


def _suspects(batch: DecodedImages, names: Sequence[str], errors: LabelErrors) -> tuple[Suspect, ...]:
    assert batch.labels is not None
    order = errors.ratio.argsort(descending=True, stable=True)
    return tuple(
        Suspect(batch.names[photo], batch.labels[photo], names[int(errors.likelier[photo])], float(errors.ratio[photo]))
        for photo in order[: int((errors.ratio > 0).sum())].tolist()
    )


def _duplicates(batch: DecodedImages, neighbours: Tensor) -> tuple[Duplicate, ...]:
    """Pairs of nearest neighbours with different labels and nearly equal thumbnails."""
    assert batch.labels is not None
    thumbnails = F.adaptive_avg_pool2d(torch.from_numpy(batch.pixels).float(), _THUMBNAIL)
    differences = torch.stack([(thumbnails - thumbnails[column]).abs().mean((1, 2, 3)) for column in neighbours.T], 1)
    close = (differences <= _MAX_DIFFERENCE).nonzero().tolist()
    pairs = {tuple(sorted((photo, int(neighbours[photo, rank])))) for photo, rank in close}
    duplicates = []
    for photo, other in sorted(pairs):
        if batch.labels[photo] != batch.labels[other]:
            identical = bool((batch.pixels[photo] == batch.pixels[other]).all())
            names = batch.names[photo], batch.labels[photo], batch.names[other], batch.labels[other]
            duplicates.append(Duplicate(*names, identical))
    return tuple(sorted(duplicates, key=lambda duplicate: not duplicate.identical))


@dataclass(frozen=True)
class LearningCurves:
    """Accuracy by the number of photos of a class.

    Attributes:
        accuracy: accuracy of each class on held-out photos with each of ``SHARES`` of its other photos, ``[C, 4]``;
            NaN for a class without photos.
        scores: scores of each photo for every class, by statistics of all photos outside its fold, ``[N, C]``.
    """

    accuracy: Tensor
    scores: Tensor


def learning_curves(
    classifier: Classifier, known: ClassStatistics, features: Tensor, rows: Tensor, groups: Tensor
) -> LearningCurves:
    """Cross-validate each class with a part of its photos and with all photos of the other classes.

    The photos of a class are added series by series, in several random orders. Whole series are held out, because new
    photos come from other series.

    Args:
        classifier: refitted for every fold.
        known: statistics of other photos.
        features: features of the photos, ``[N, width]``.
        rows: the class of each photo.
        groups: the series of each photo.
    """
    num_classes = max(known.classes, int(rows.max()) + 1)
    correct = torch.zeros(num_classes, len(SHARES), dtype=torch.float64)
    scores, folds = torch.empty(len(rows), num_classes), assign_folds(rows, groups)
    for fold in folds.unique():
        test = folds == fold
        labels = rows[test]
        statistics = known.add(features[~test], rows[~test])
        training = {row: (~test & (rows == row)).nonzero()[:, 0] for row in labels.unique().tolist()}
        subsets = [
            _shuffle_series(photos, groups[photos], order, row)[: math.ceil(share * len(photos))]
            for row, photos in training.items()
            for share in SHARES[:-1]
            for order in range(_NUM_ORDERS)
        ]
        fold_scores, subset_scores = classifier.fit(_append_subsets(statistics, features, subsets))(
            features[test]
        ).tensor_split([num_classes], 1)
        best_other = fold_scores.scatter(1, labels[:, None], -torch.inf).amax(1)
        position = torch.searchsorted(torch.tensor(list(training)), labels)
        subset_scores = subset_scores.reshape(len(labels), len(training), len(SHARES) - 1, _NUM_ORDERS)
        with_subsets = subset_scores[torch.arange(len(labels)), position] > best_other[:, None, None]
        with_all = fold_scores.gather(1, labels[:, None]) > best_other[:, None]
        correct.index_add_(0, labels, torch.cat([with_subsets.double().mean(2), with_all.double()], dim=1))
        scores[test] = fold_scores
    counts = torch.bincount(rows, minlength=num_classes)
    return LearningCurves(correct / counts.where(counts > 0, torch.nan)[:, None], scores)


def _shuffle_series(photos: Tensor, groups: Tensor, order: int, row: int) -> Tensor:
    """The photos of a class with its series in random order, and random order within each series."""
    generator = seeds.generator(0, order, f"learning curve/{row}")
    series, position = groups.unique(return_inverse=True)
    rank = torch.randperm(len(series), generator=generator)
    shuffled = torch.randperm(len(photos), generator=generator)
    return photos[shuffled[rank[position[shuffled]].argsort(stable=True)]]


def _append_subsets(statistics: ClassStatistics, features: Tensor, subsets: Sequence[Tensor]) -> ClassStatistics:
    """The statistics with the mean of each subset of photos as an additional class; the scatter is unchanged."""
    if not subsets:
        return statistics
    rows = torch.repeat_interleave(torch.arange(len(subsets)), torch.tensor([len(subset) for subset in subsets]))
    means = ClassStatistics.empty(statistics.width, scatter=False).add(features[torch.cat(tuple(subsets))], rows)
    return replace(
        statistics.concatenate(means), scatter=statistics.scatter, degrees_of_freedom=statistics.degrees_of_freedom
    )
