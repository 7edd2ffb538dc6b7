# SPDX-License-Identifier: Apache-2.0
"""Whether each class is taught well enough, and what would help: from a model alone, or with a folder of photos."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from onea import seeds
from onea.classifiers.base import Classifier
from onea.classifiers.statistics import ClassStatistics
from onea.classifiers.validation import group_folds
from onea.data.dataset import natural_key
from onea.errors import OneaError
from onea.model.answers import Snapshot
from onea.model.evaluation.confusions import (
    GOOD,
    NO_MISTAKES,
    Mistakes,
    Nearest,
    gaussian_overlap,
    held_out_mistakes,
    held_out_overlap,
    mistakes_of,
    nearest,
)
from onea.model.evaluation.label_errors import Neighbours, Suspicion, classifier, find_label_errors
from onea.model.learning.images import DecodedImages
from onea.model.learning.series import GROUPS, groups_by_class
from onea.model.learning.update_images import MIN_TO_HOLD_OUT
from onea.model.names import check_spelling
from onea.model.reports import MIN_ADVISED
from onea.model.state import State

Advice = Literal[
    "taught enough",
    "not measured",
    "more photos would help",
    "too like another class",
    "often misclassified",
    "no mistakes stand out",
    "few photos",
    "too few to judge",
]
NEEDIEST: tuple[Advice, ...] = (
    "too few to judge",
    "few photos",
    "often misclassified",
    "more photos would help",
    "too like another class",
    "not measured",
    "no mistakes stand out",
    "taught enough",
)

RISE = 0.02  # of that share from half of the photos to all; where it is less, more of the same do not help
ALIKE = 0.25  # share of two classes' photos that are nearer to the other one: they can hardly be told apart
SAME = 6.0  # grey levels by which thumbnails of one photo differ on average, after it was saved or resized again
_THUMBNAIL = 16  # pixels


@dataclass(frozen=True)
class ClassCheck:
    """One class.

    Attributes:
        name: of the class.
        taught: photos that the model has learned it from; 0 where it does not know it.
        photos: in the folder; 0 without one.
        curve: accuracy on held-out photos with 25, 50, 75 and 100 % of the others; None where not measured.
        rival: the class it is most often taken for, if any.
        advice: what follows.
    """

    name: str
    taught: int
    photos: int
    curve: tuple[float, ...] | None
    rival: str | None
    advice: Advice

    @property
    def needy(self) -> bool:
        """Whether something is known that would help."""
        return self.advice not in ("taught enough", "no mistakes stand out", "not measured")


@dataclass(frozen=True)
class Pair:
    """Two classes and the share of their photos that are nearer to the other one, each class with equal weight."""

    first: str
    second: str
    overlap: float

    @property
    def alike(self) -> bool:
        """Whether they can hardly be told apart."""
        return self.overlap >= ALIKE


@dataclass(frozen=True)
class Suspect:
    """A photo that looks like another class. The ``ratio`` (see ``Suspicion``) ranks photos; it is not calibrated."""

    image: str
    given: str
    likelier: str
    ratio: float


@dataclass(frozen=True)
class Duplicate:
    """One photo, or two that can hardly be told apart, under two names."""

    image: str
    given: str
    other_image: str
    other: str
    identical: bool


@dataclass(frozen=True)
class Check:
    """All that was found.

    Attributes:
        version: of the model.
        classes: the neediest first.
        pairs: classes that are confused with each other, most of all first; of each class the nearest ones only.
        suspects: photos that look mislabelled, the most suspicious first; empty without a folder.
        duplicates: photos that come under two names.
        skipped: ``path: reason`` of each photo that could not be read.
        measured: whether there were photos to measure with.
        mistakes: among held-out photos of the folder; without one, of updates.
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
        """The same as JSON-able values."""
        pairs = [{**dataclasses.asdict(pair), "alike": pair.alike} for pair in self.pairs]
        return {**dataclasses.asdict(self), "shares": SHARES, "pairs": pairs}


def check_model(state: State) -> Check:
    """What a model's own statistics tell: classes with few photos, pairs of classes that overlap, and mistakes.

    Mistakes are those among photos that were held out of updates, as far as their features are kept. Overlaps come from
    statistics of photos that the adapter was trained on, so that an overlap is less than that of new photos; which
    pairs overlap most is what they tell.
    """
    if not state.classes:
        return Check(state.version, (), ())
    near = gaussian_overlap(state.statistics, state.images)
    most = near.overlap[:, 0].tolist() if len(state.classes) > 1 else [0.0]
    rivals = _rivals(near, state.classes)
    mistakes, held_out = held_out_mistakes(state)
    often = {one.name for one in mistakes.misclassified}
    found = [
        ClassCheck(name, images, 0, None, rival, _kept_advice(images, overlap, name in often, name in held_out))
        for name, images, rival, overlap in zip(state.classes, state.images, rivals, most, strict=True)
    ]
    return Check(state.version, _neediest_first(found), _pairs(near, state.classes, least=0.01), mistakes=mistakes)


def check_photos(model: Snapshot, batch: DecodedImages) -> Check:
    """What photos of class folders tell, whether the model was taught with them or is about to be.

    Features are those of the model's adapter. Classes with photos here are judged from these photos, whatever the model
    has made of them; classes without come with what the model knows of them.

    Raises:
        OneaError: there is nothing to compare the classes with.
    """
    assert batch.labels is not None
    check_spelling(batch.labels, model.classes)
    given = sorted(set(batch.labels), key=natural_key)
    silent = [name for name in model.classes if name not in given]
    names = [*silent, *given]
    if len(names) < 2:
        raise OneaError(f"There is only the class '{names[0]}'; add a second one to compare it with, then check again.")
    counts = Counter(batch.labels)
    labels = torch.tensor([names.index(label) for label in batch.labels])
    features = model.engine.features(batch.pixels, model.adapters)
    known = _statistics(model.state, silent)
    examined = find_label_errors(known, features, labels)

    right = torch.full((len(names), len(SHARES)), torch.nan, dtype=torch.float64)
    overlap = torch.zeros(len(names), len(names), dtype=torch.float64)
    judged = torch.tensor([counts[label] >= MIN_TO_HOLD_OUT for label in batch.labels])
    mistakes = NO_MISTAKES
    if bool(judged.any()):
        rest, part, rows = known.add(features[~judged], labels[~judged]), features[judged], labels[judged]
        curves = learning_curves(classifier(), rest, part, rows, groups_by_class(part, rows, GROUPS))
        right, overlap = curves.right, held_out_overlap(curves.scores, rows)
        mistakes = mistakes_of(curves.scores.argmax(1), rows, names)

    taught = dict(zip(model.classes, model.state.images, strict=True))
    rivals = _rivals(nearest(overlap), names)
    classes = []
    for row, name in enumerate(names):
        if name in counts:
            curve = None if right[row].isnan().any() else tuple(right[row].tolist())
            advice = _advice(counts[name], curve)
            classes.append(ClassCheck(name, taught.get(name, 0), counts[name], curve, rivals[row], advice))
    pairs = _pairs(nearest((overlap + overlap.T) / 2), names)
    return Check(
        model.version,
        _neediest_first(classes),
        pairs,
        _suspects(batch, names, examined.suspicion),
        _duplicates(batch, examined.near),
        batch.skipped,
        measured=True,
        mistakes=mistakes,
    )


def _statistics(state: State, kept: list[str]) -> ClassStatistics:
    """Statistics to which the photos are added: what is known of classes that have none, or nothing at all."""
    if not kept:
        return ClassStatistics.empty(state.statistics.width)
    rows = torch.tensor([state.row(name) for name in kept])
    return dataclasses.replace(state.statistics.select_classes(rows), factors=None, cut=None)


def _kept_advice(photos: int, overlap: float, misclassified: bool, held_out: bool) -> Advice:
    """The same from what a model keeps.

    >>> _kept_advice(30, 0.3, False, True), _kept_advice(30, 0.0, False, True), _kept_advice(30, 0.0, False, False)
    ('too like another class', 'no mistakes stand out', 'not measured')
    """
    found = _advice(photos, None)
    if found != "not measured":
        return found
    if misclassified:
        return "often misclassified"
    if overlap >= ALIKE:
        return "too like another class"
    return "no mistakes stand out" if held_out else "not measured"


def _advice(photos: int, curve: tuple[float, ...] | None) -> Advice:
    """The plain rule that the documentation states.

    >>> _advice(30, (0.5, 0.6, 0.7, 0.8)), _advice(30, (0.7, 0.7, 0.7, 0.7))
    ('more photos would help', 'too like another class')
    """
    if photos < MIN_TO_HOLD_OUT:
        return "too few to judge"
    if photos < MIN_ADVISED:
        return "few photos"
    if curve is None:
        return "not measured"
    if curve[-1] >= GOOD:
        return "taught enough"
    return "more photos would help" if curve[-1] - curve[SHARES.index(0.5)] >= RISE else "too like another class"


def _neediest_first(classes: list[ClassCheck]) -> tuple[ClassCheck, ...]:
    def need(one: ClassCheck) -> tuple[int, float, int, str]:
        return NEEDIEST.index(one.advice), one.curve[-1] if one.curve else 0.0, one.photos or one.taught, one.name

    return tuple(sorted(classes, key=need))


def _rivals(near: Nearest, names: tuple[str, ...] | list[str]) -> list[str | None]:
    """For each class the one that most of its photos are nearer to."""
    if len(names) < 2:
        return [None] * len(names)
    best = zip(near.overlap[:, 0].tolist(), near.rows[:, 0].tolist(), strict=True)
    return [names[row] if share > 0 else None for share, row in best]


def _pairs(near: Nearest, names: tuple[str, ...] | list[str], least: float = 0.05) -> tuple[Pair, ...]:
    """Pairs of classes that share at least so much, the most alike first."""
    found = [Pair(names[i], names[j], overlap) for (i, j), overlap in near.pairs(least).items()]
    return tuple(sorted(found, key=lambda pair: (-pair.overlap, pair.first, pair.second)))


def _suspects(batch: DecodedImages, names: list[str], found: Suspicion) -> tuple[Suspect, ...]:
    """The photos that another class is likelier for, the most suspicious first."""
    assert batch.labels is not None
    order = found.ratio.argsort(descending=True, stable=True)
    return tuple(
        Suspect(batch.names[row], batch.labels[row], names[int(found.likelier[row])], float(found.ratio[row]))
        for row in order[: int((found.ratio > 0).sum())].tolist()
    )


def _duplicates(batch: DecodedImages, near: Neighbours) -> tuple[Duplicate, ...]:
    """Neighbours under another name that are one photo, perhaps saved or resized again; each pair once."""
    assert batch.labels is not None
    found = []
    small = F.adaptive_avg_pool2d(torch.from_numpy(batch.pixels).float(), _THUMBNAIL)
    close = torch.stack([(small - small[rows]).abs().mean((1, 2, 3)) <= SAME for rows in near.rows.T], 1)
    pairs = {(row, int(near.rows[row, place])) for row, place in close.nonzero().tolist()}
    for row, other in sorted({(min(pair), max(pair)) for pair in pairs}):
        if batch.labels[row] != batch.labels[other]:
            identical = bool((batch.pixels[row] == batch.pixels[other]).all())
            names = batch.names[row], batch.labels[row], batch.names[other], batch.labels[other]
            found.append(Duplicate(*names, identical))
    return tuple(sorted(found, key=lambda one: not one.identical))


SHARES = (0.25, 0.5, 0.75, 1.0)
_DRAWS = 4  # orders in which the series of a class may have arrived


@dataclass(frozen=True)
class LearningCurves:
    """What was measured.

    Attributes:
        right: of each class the share of held-out photos that are right with each of ``SHARES`` of the others,
            ``[C, 4]``; NaN for a class without photos.
        scores: of each photo for every class, by all photos outside its fold, ``[N, C]``.
    """

    right: Tensor
    scores: Tensor


def learning_curves(
    classifier: Classifier, known: ClassStatistics, features: Tensor, rows: Tensor, groups: Tensor
) -> LearningCurves:
    """How many held-out photos of each class are right when only some of its others are used.

    All other classes keep all of their photos, so a class's curve is about its own photos alone. They arrive series by
    series (``groups``), in several random orders. Whole series are held out, as they stand for tomorrow's photos.

    Args:
        classifier: fitted anew to every choice of photos.
        known: statistics of what is known besides these photos.
        features: of the photos, ``[N, width]``.
        rows: the class of each photo.
        groups: the series of each photo.
    """
    classes = max(known.classes, int(rows.max()) + 1)
    right, held = torch.zeros(classes, len(SHARES), dtype=torch.float64), torch.bincount(rows, minlength=classes)
    unseen, fold = torch.empty(len(rows), classes), group_folds(rows, groups)
    for part in fold.unique():
        here = fold == part
        full = known.add(features[~here], rows[~here])
        judged = rows[here]
        taught = {row: (~here & (rows == row)).nonzero()[:, 0] for row in judged.unique().tolist()}
        chosen = [
            _arrived(own, groups[own], draw, row)[: math.ceil(share * len(own))]
            for row, own in taught.items()
            for share in SHARES[:-1]
            for draw in range(_DRAWS)
        ]
        scores = classifier.fit(_with_variants(full, features, chosen))(features[here])
        place = torch.searchsorted(torch.tensor(list(taught)), judged)
        own, rivals = scores.gather(1, judged[:, None]), scores[:, :classes].scatter(1, judged[:, None], -torch.inf)
        variants = scores[:, classes:].reshape(len(judged), len(taught), len(SHARES) - 1, _DRAWS)
        partly = variants[torch.arange(len(judged)), place] > rivals.amax(1)[:, None, None]
        wholly = own > rivals.amax(1, keepdim=True)
        right.index_add_(0, judged, torch.cat([partly.double().mean(2), wholly.double()], dim=1))
        unseen[here] = scores[:, :classes]
    return LearningCurves(right / held.where(held > 0, torch.nan)[:, None], unseen)


def _arrived(own: Tensor, groups: Tensor, draw: int, row: int) -> Tensor:
    """A class's photos in an order in which they may have arrived: series by series."""
    generator = seeds.generator(0, draw, f"learning curve/{row}")
    names, member = groups.unique(return_inverse=True)
    place, order = torch.randperm(len(names), generator=generator), torch.randperm(len(own), generator=generator)
    return own[order[place[member[order]].argsort(stable=True)]]


def _with_variants(full: ClassStatistics, features: Tensor, chosen: list[Tensor]) -> ClassStatistics:
    """The statistics with one more row for each choice of photos; the spread of all classes stays as it is."""
    if not chosen:
        return full
    numbers = torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor([len(one) for one in chosen]))
    means = ClassStatistics.empty(full.width, scatter=False).add(features[torch.cat(chosen)], numbers)
    return replace(full.concatenate(means), scatter=full.scatter, freedom=full.freedom)
