# SPDX-License-Identifier: Apache-2.0
"""One version of a model, ready to answer; it never changes, so any number of threads may ask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onea.data.image_files import OnBad
from onea.errors import OneaError
from onea.model import calibration
from onea.model.engine import Engine
from onea.model.learning.images import DecodedImages, read_unlabelled
from onea.model.names import UNKNOWN
from onea.model.state import KNOWS_NOTHING, State
from onea.runtime import NO_PROGRESS, Progress
from onea.text import plural

MAJORITY = 0.5
"""The probability that decides a verdict: more than this for none of the classes, or at least this for one class."""

Verdict = Literal["answer", "unsure", "unknown"]
Likely = tuple[tuple[str, float], ...]
_MOST_CANDIDATES = 3


@dataclass(frozen=True)
class Answer:
    """The answer about one image: one distribution over the classes and none of them, and one verdict.

    The probabilities of all classes and of none of them add up to 1.

    >>> answer = Answer("photo.jpg", (("kiwi", 0.7), ("lemon", 0.1)), none=0.2, version=2)
    >>> answer.verdict, answer.label, answer.probability
    ('answer', 'kiwi', 0.7)
    >>> Answer("photo.jpg", (("kiwi", 0.2), ("lemon", 0.1)), none=0.7, version=2).label
    'unknown'
    >>> str(Answer("a.jpg", (("kiwi", 0.4), ("lemon", 0.3)), 0.3, 2, candidates=(("kiwi", 0.4), ("lemon", 0.3))))
    'unsure: kiwi or lemon'

    Attributes:
        image: its path or number.
        top: the most probable classes with their probabilities, best first; whatever the verdict.
        none: the probability that it shows none of the classes; 0 where ``unknown`` is switched off.
        version: of the model.
        candidates: of an unsure answer, the two or three classes that it may be; they are the fewest that have a
            majority together.
    """

    image: str
    top: Likely
    none: float
    version: int
    candidates: Likely = ()

    @property
    def verdict(self) -> Verdict:
        """``unknown`` if none of the classes has the majority, ``answer`` if one of them has it, or ``unsure``."""
        if self.none > MAJORITY:
            return "unknown"
        return "answer" if self.top[0][1] >= MAJORITY else "unsure"

    @property
    def label(self) -> str:
        """The most probable class, also of an unsure answer; or ``unknown``."""
        return UNKNOWN if self.verdict == "unknown" else self.top[0][0]

    @property
    def probability(self) -> float:
        """Of the label: of the class, or that it is none of them."""
        return self.none if self.verdict == "unknown" else self.top[0][1]

    def __str__(self) -> str:
        if self.verdict != "unsure":
            return self.label
        *names, last = (name for name, _ in self.candidates or self.top)
        return f"unsure: {', '.join(names)} or {last}" if names else f"unsure: {last}"

    def as_json(self) -> dict[str, Any]:
        """The answer as JSON-able values; commands and the service give the same ones."""
        return {
            "image": self.image,
            "class": self.label,
            "verdict": self.verdict,
            "probability": self.probability,
            "candidates": _with_names(self.candidates),
            "top": _with_names(self.top),
            "none_of_these": self.none,
            "version": self.version,
        }


def _with_names(likely: Likely) -> list[dict[str, Any]]:
    return [{"class": name, "probability": probability} for name, probability in likely]


def candidates(ranked: Likely, none: float) -> Likely:
    """The classes that an unsure answer may be: the fewest that have a majority together, two or three.

    >>> candidates((("kiwi", 0.4), ("lemon", 0.05), ("lime", 0.05), ("plum", 0.02)), 0.48)
    (('kiwi', 0.4), ('lemon', 0.05), ('lime', 0.05))
    >>> candidates((("kiwi", 0.5), ("lemon", 0.3)), 0.2)
    ()
    """
    if none > MAJORITY or ranked[0][1] >= MAJORITY:
        return ()
    two = sum(probability for _, probability in ranked[:2])
    return ranked[: 2 if two >= MAJORITY else _MOST_CANDIDATES]


@dataclass(frozen=True)
class Distribution:
    """Probabilities of some images, which add up to 1 for each.

    Attributes:
        classes: of each class, ``[N, classes]``.
        none: of none of them, ``[N]``.
    """

    classes: Tensor
    none: Tensor

    @property
    def unknown(self) -> Tensor:
        """Which images are ``unknown``, ``bool [N]``."""
        return self.none > MAJORITY


@dataclass(frozen=True)
class Judgement:
    """What a model makes of some images.

    Attributes:
        scores: of each image for every class, ``[N, classes]``; the largest is the nearest class.
        familiarity: how much each image looks like something that was taught, ``[N]``.
    """

    scores: Tensor
    familiarity: Tensor

    def split(self, sizes: Sequence[int]) -> list[Judgement]:
        """The same in parts of so many images."""
        parts = zip(self.scores.split(list(sizes)), self.familiarity.split(list(sizes)), strict=True)
        return [Judgement(scores, familiarity) for scores, familiarity in parts]


class Snapshot:
    """Answers of one version of a model.

    >>> from onea import OneA
    >>> photos = np.random.default_rng(0).integers(0, 255, (6, 40, 40, 3), dtype=np.uint8)
    >>> present = OneA(backbone="fast", threads=1).learn(photos, ["noise"] * 6).snapshot()
    >>> present.version, present.classes, present.answers(photos[:1])[0].top[0][0]
    (1, ('noise',), 'noise')

    Attributes:
        version: which one.
        classes: what it knows, in the order of the columns of ``predict_proba``.
        state: all that it knows.
        engine: the network that it uses, together with ``adapters``.
        scorer: similarities of features to the classes.
        familiarity: how much features look like something that was taught.
        threshold: the familiarity below which an image is ``unknown``; minus infinity where none is.
        slope: of the log-odds that an image shows none of the classes, by its familiarity; they are 0 at the threshold.
    """

    def __init__(self, engine: Engine, state: State, false_alarms: float | None):
        self.state, self.engine = state, engine
        self.adapters = engine.adapters(state)
        self.scorer = state.classifier.fit(state.statistics)
        self.familiarity, known, hidden = state.calibrated_familiarity()
        self.slope = calibration.fit_slope(known, hidden)
        self.threshold = -math.inf if not false_alarms else calibration.threshold(known, false_alarms)

    @property
    def version(self) -> int:
        """The number of the update that made it."""
        return self.state.version

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes it can answer."""
        return self.state.classes

    @property
    def side(self) -> int:
        """Side of the squares that images are read as."""
        return self.engine.side

    def check_taught(self) -> None:
        """Refuse to go on where no class is known."""
        if not self.classes:
            raise OneaError(KNOWS_NOTHING)

    def check_rate(self, false_alarms: float) -> None:
        """Refuse a share of known images answered ``unknown`` that the held-out images are too few to tell."""
        lowest = calibration.lowest_rate(self.state.margins)
        if false_alarms < lowest:
            images = plural(len(self.state.margins), "image", "images")
            raise OneaError(
                f"unknown is {false_alarms:g}, which {images} held out are too few to promise; give "
                f"{math.ceil(1000 * lowest) / 1000:g} or more, or teach more images."
            )

    def predict(self, images: Any, progress: Progress = NO_PROGRESS) -> npt.NDArray[np.str_]:
        """The class of each image, or ``unknown``."""
        found = self.judge(images, progress)
        names = np.array([*self.classes, UNKNOWN])
        unknown = self.distribution(found).unknown
        rows = torch.where(unknown, len(self.classes), _ranked(found.scores)[:, 0])
        answers: npt.NDArray[np.str_] = names[rows.numpy()]
        return answers

    def predict_proba(self, images: Any, progress: Progress = NO_PROGRESS) -> npt.NDArray[np.float64]:
        """The probability of each known class, ``[N, classes]``; a row adds up to 1 less that of none of them."""
        found: npt.NDArray[np.float64] = self.distribution(self.judge(images, progress)).classes.numpy()
        return found

    def predict_topk(self, images: Any, k: int = 5, progress: Progress = NO_PROGRESS) -> list[list[tuple[str, float]]]:
        """The ``k`` most probable classes of each image with their probabilities, best first."""
        return [list(answer.top) for answer in self.answers(images, k, None, progress)]

    def answers(
        self, images: Any, k: int = 5, on_bad: OnBad | None = "fail", progress: Progress = NO_PROGRESS
    ) -> list[Answer]:
        """All there is to say about each image."""
        batch = images if isinstance(images, DecodedImages) else self.read(images, on_bad, progress)
        return self.answers_from(batch, self.judge(batch, progress), k)

    def answers_from(self, batch: DecodedImages, found: Judgement, k: int = 5) -> list[Answer]:
        """All there is to say about images that have been judged."""
        if k < 1:
            raise OneaError(f"k is {k}; ask for at least one class.")
        probabilities = self.distribution(found)
        rows = _ranked(found.scores)[:, : max(k, _MOST_CANDIDATES)]
        best = probabilities.classes.gather(1, rows).tolist()
        answers = []
        for image, places, chances, none in zip(
            batch.names, rows.tolist(), best, probabilities.none.tolist(), strict=True
        ):
            ranked = tuple((self.classes[row], chance) for row, chance in zip(places, chances, strict=True))
            answers.append(Answer(image, ranked[:k], none, self.version, candidates(ranked, none)))
        return answers

    def read(self, images: Any, on_bad: OnBad | None = "fail", progress: Progress = NO_PROGRESS) -> DecodedImages:
        """Images as the network needs them, to be asked about as often as wanted."""
        return read_unlabelled(images, self.engine.side, on_bad, progress)

    def similarities(self, images: Any) -> Tensor:
        """Similarity of each image to every class, ``[N, classes]``."""
        return self.judge(images).scores

    def judge(self, images: Any, progress: Progress = NO_PROGRESS) -> Judgement:
        """Scores of each image for every class, and how familiar it looks."""
        self.check_taught()
        return self.judge_features(self.features(images, progress))

    def features(self, images: Any, progress: Progress = NO_PROGRESS) -> Tensor:
        """What the network and the adapter make of each image, ``[N, width]``."""
        batch = images if isinstance(images, DecodedImages) else self.read(images, None, progress)
        return self.engine.features(batch.pixels, self.adapters, progress=progress)

    def judge_features(self, features: Tensor) -> Judgement:
        """The same from the features of images."""
        scores = self.scorer(features)
        if not bool(scores.isfinite().all()):
            raise OneaError("The model's answers are not numbers, so it is damaged; go back with undo.")
        return Judgement(scores, self.familiarity(features, scores))

    def distribution(self, found: Judgement) -> Distribution:
        """The probabilities of each class and of none of them; calibrated on held-out images."""
        exact = found.scores.double(), found.familiarity.double()
        return Distribution(*calibration.distribution(*exact, self.state.temperature, self.threshold, self.slope))


def _ranked(scores: Tensor) -> Tensor:
    """Classes from the nearest to the farthest; of two that are equally near, the older one first."""
    return scores.sort(dim=1, descending=True, stable=True).indices
