# SPDX-License-Identifier: Apache-2.0
"""Predictions of one version of a model. A snapshot is immutable, so several threads can use it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onea.data.file_checks import OnBad
from onea.errors import OneaError
from onea.model import calibration
from onea.model.engine import Engine
from onea.model.learning.images import DecodedImages, read_unlabelled
from onea.model.names import UNKNOWN
from onea.model.state import NO_CLASSES, State
from onea.runtime import NO_PROGRESS, Progress
from onea.text import plural

MAJORITY = 0.5
"""The verdict is ``unknown`` if none of the classes is more probable than this, ``answer`` if a class reaches it."""

Verdict = Literal["answer", "unsure", "unknown"]
Likely = tuple[tuple[str, float], ...]
_MAX_CANDIDATES = 3


@dataclass(frozen=True)
class Answer:
    """The prediction for one image: a distribution over the classes and none of them, and a verdict.

    The probabilities of all classes and of none of them add up to 1.

    >>> answer = Answer("photo.jpg", (("kiwi", 0.7), ("lemon", 0.1)), none=0.2, version=2)
    >>> answer.verdict, answer.label, answer.probability
    ('answer', 'kiwi', 0.7)
    >>> Answer("photo.jpg", (("kiwi", 0.2), ("lemon", 0.1)), none=0.7, version=2).label
    'unknown'
    >>> str(Answer("a.jpg", (("kiwi", 0.4), ("lemon", 0.3)), 0.3, 2, candidates=(("kiwi", 0.4), ("lemon", 0.3))))
    'unsure: kiwi or lemon'

    Attributes:
        image: path or number of the image.
        top: the most probable classes with their probabilities, best first, for every verdict.
        none: the probability that the image shows none of the classes; 0 if ``unknown`` is switched off.
        version: version of the model.
        candidates: for the verdict ``unsure``, the two or three most probable classes, which have a majority together.
    """

    image: str
    top: Likely
    none: float
    version: int
    candidates: Likely = ()

    @property
    def verdict(self) -> Verdict:
        """``unknown`` or ``answer``, if none of the classes or one class has the majority; otherwise ``unsure``."""
        if self.none > MAJORITY:
            return "unknown"
        return "answer" if self.top[0][1] >= MAJORITY else "unsure"

    @property
    def label(self) -> str:
        """The most probable class, also for ``unsure``; or ``unknown``."""
        return UNKNOWN if self.verdict == "unknown" else self.top[0][0]

    @property
    def probability(self) -> float:
        """The probability of the label."""
        return self.none if self.verdict == "unknown" else self.top[0][1]

    def __str__(self) -> str:
        if self.verdict != "unsure":
            return self.label
        *names, last = (name for name, _ in self.candidates or self.top)
        return f"unsure: {', '.join(names)} or {last}" if names else f"unsure: {last}"

    def as_json(self) -> dict[str, Any]:
        """The answer as values for JSON, in the commands and in the service."""
        return {
            "image": self.image,
            "class": self.label,
            "verdict": self.verdict,
            "probability": self.probability,
            "candidates": _as_objects(self.candidates),
            "top": _as_objects(self.top),
            "none_of_these": self.none,
            "version": self.version,
        }


def _as_objects(likely: Likely) -> list[dict[str, Any]]:
    return [{"class": name, "probability": probability} for name, probability in likely]


def candidates(ranked: Likely, none: float) -> Likely:
    """The candidates of an unsure answer: the best two classes if they have a majority, otherwise the best three.

    >>> candidates((("kiwi", 0.4), ("lemon", 0.05), ("lime", 0.05), ("plum", 0.02)), 0.48)
    (('kiwi', 0.4), ('lemon', 0.05), ('lime', 0.05))
    >>> candidates((("kiwi", 0.5), ("lemon", 0.3)), 0.2)
    ()
    """
    if none > MAJORITY or ranked[0][1] >= MAJORITY:
        return ()
    two = sum(probability for _, probability in ranked[:2])
    return ranked[: 2 if two >= MAJORITY else _MAX_CANDIDATES]


@dataclass(frozen=True)
class Distribution:
    """Probabilities for a batch of images; they add up to 1 for each image.

    Attributes:
        classes: probability of each class, ``[N, classes]``.
        none: probability of none of the classes, ``[N]``.
    """

    classes: Tensor
    none: Tensor

    @property
    def unknown(self) -> Tensor:
        """Which images are ``unknown``, ``bool [N]``."""
        return self.none > MAJORITY


@dataclass(frozen=True)
class Scores:
    """Scores of a batch of images.

    Attributes:
        scores: scores of each image for every class, ``[N, classes]``; the largest is that of the predicted class.
        familiarity: similarity of each image to the images that were taught, ``[N]``.
    """

    scores: Tensor
    familiarity: Tensor

    def split(self, sizes: Sequence[int]) -> list[Scores]:
        """Split the scores into consecutive batches of these sizes."""
        parts = zip(self.scores.split(list(sizes)), self.familiarity.split(list(sizes)), strict=True)
        return [Scores(scores, familiarity) for scores, familiarity in parts]


class Snapshot:
    """Predictions of one version of a model.

    >>> from onea import OneA
    >>> photos = np.random.default_rng(0).integers(0, 255, (6, 40, 40, 3), dtype=np.uint8)
    >>> snapshot = OneA(image_size=56, threads=1).learn(photos, ["noise"] * 6).snapshot()
    >>> snapshot.version, snapshot.classes, snapshot.answers(photos[:1])[0].top[0][0]
    (1, ('noise',), 'noise')

    Attributes:
        version: number of the version.
        classes: names of the classes, in the order of the columns of ``predict_proba``.
        state: state of the model.
        engine: the network.
        scorer: computes scores from features.
        familiarity: computes familiarity from features and scores.
        threshold: the familiarity below which an image is ``unknown``; minus infinity if none is.
        slope: slope of the log-odds that an image shows none of the classes, as a function of its familiarity; they
            are 0 at the threshold.
    """

    def __init__(self, engine: Engine, state: State, unknown_rate: float | None):
        self.state, self.engine = state, engine
        self.adapters = engine.adapters(state)
        self.scorer = state.classifier.fit(state.statistics)
        self.familiarity, known, left_out = state.fit_familiarity()
        self.slope = calibration.fit_slope(known, left_out)
        self.threshold = calibration.fit_threshold(known, unknown_rate) if unknown_rate else -math.inf

    @property
    def version(self) -> int:
        """The number of the version."""
        return self.state.version

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of the model."""
        return self.state.classes

    @property
    def side(self) -> int:
        """Side of the square images, in pixels."""
        return self.engine.side

    def check_has_classes(self) -> None:
        """Raise an error if there are no classes."""
        if not self.classes:
            raise OneaError(NO_CLASSES)

    def check_unknown_rate(self, rate: float) -> None:
        """Raise an error if the held-out images are too few to keep the rate of ``unknown`` that low."""
        lowest = calibration.min_unknown_rate(len(self.state.held_out_signals))
        if rate < lowest:
            images = plural(len(self.state.held_out_signals), "image", "images")
            raise OneaError(
                f"unknown is {rate:g}, but {images} held out are too few to guarantee that; choose "
                f"{math.ceil(1000 * lowest) / 1000:g} or more, or teach more images."
            )

    def predict(self, images: Any, progress: Progress = NO_PROGRESS) -> npt.NDArray[np.str_]:
        """The class of each image, or ``unknown``."""
        scores = self.compute_scores(images, progress)
        unknown = self.probabilities(scores).unknown
        rows = torch.where(unknown, len(self.classes), _rank(scores.scores)[:, 0])
        labels: npt.NDArray[np.str_] = np.array([*self.classes, UNKNOWN])[rows.numpy()]
        return labels

    def predict_proba(self, images: Any, progress: Progress = NO_PROGRESS) -> npt.NDArray[np.float64]:
        """The probability of each class, ``[N, classes]``; a row and the probability of none of them add up to 1."""
        probabilities = self.probabilities(self.compute_scores(images, progress)).classes
        return cast(npt.NDArray[np.float64], probabilities.numpy())

    def predict_topk(self, images: Any, k: int = 5, progress: Progress = NO_PROGRESS) -> list[list[tuple[str, float]]]:
        """The ``k`` most probable classes of each image with their probabilities, best first."""
        return [list(answer.top) for answer in self.answers(images, k, None, progress)]

    def answers(
        self, images: Any, k: int = 5, on_bad: OnBad | None = "fail", progress: Progress = NO_PROGRESS
    ) -> list[Answer]:
        """The full prediction for each image."""
        batch = images if isinstance(images, DecodedImages) else self.read(images, on_bad, progress)
        return self.answers_from(batch, self.compute_scores(batch, progress), k)

    def answers_from(self, batch: DecodedImages, scores: Scores, k: int = 5) -> list[Answer]:
        """The full prediction for each image, from its scores."""
        if k < 1:
            raise OneaError(f"k is {k}; it must be at least 1.")
        probabilities = self.probabilities(scores)
        order = _rank(scores.scores)[:, : max(k, _MAX_CANDIDATES)]
        best = probabilities.classes.gather(1, order).tolist()
        answers = []
        for image, rows, values, none in zip(
            batch.names, order.tolist(), best, probabilities.none.tolist(), strict=True
        ):
            ranked = tuple((self.classes[row], value) for row, value in zip(rows, values, strict=True))
            answers.append(Answer(image, ranked[:k], none, self.version, candidates(ranked, none)))
        return answers

    def read(self, images: Any, on_bad: OnBad | None = "fail", progress: Progress = NO_PROGRESS) -> DecodedImages:
        """Decode images and resize them for the network."""
        return read_unlabelled(images, self.engine.side, on_bad, progress)

    def compute_scores(self, images: Any, progress: Progress = NO_PROGRESS) -> Scores:
        """Scores of each image for every class, and its familiarity."""
        self.check_has_classes()
        return self.score_features(self.features(images, progress))

    def features(self, images: Any, progress: Progress = NO_PROGRESS) -> Tensor:
        """Features of each image by the network with the adapter, ``[N, width]``."""
        batch = images if isinstance(images, DecodedImages) else self.read(images, None, progress)
        return self.engine.features(batch.pixels, self.adapters, progress=progress)

    def score_features(self, features: Tensor) -> Scores:
        """Scores and familiarity from features."""
        scores = self.scorer(features)
        if not bool(scores.isfinite().all()):
            raise OneaError("The model is damaged: its scores are not finite; restore an earlier version with undo.")
        return Scores(scores, self.familiarity(features, scores))

    def probabilities(self, scores: Scores) -> Distribution:
        """The calibrated probabilities of each class and of none of the classes."""
        calibrated = calibration.probabilities(
            scores.scores.double(), scores.familiarity.double(), self.state.temperature, self.threshold, self.slope
        )
        return Distribution(*calibrated)


def _rank(scores: Tensor) -> Tensor:
    """Classes by descending score; of equal scores, the older class comes first."""
    return scores.sort(dim=1, descending=True, stable=True).indices
