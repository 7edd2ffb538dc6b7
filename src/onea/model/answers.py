# SPDX-License-Identifier: Apache-2.0
"""One version of a model, ready to answer; it never changes, so any number of threads may ask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onea.data.unreadable import OnBad
from onea.errors import OneaError
from onea.model import calibration
from onea.model.engine import Engine
from onea.model.images import DecodedImages, read_unlabelled
from onea.model.names import UNKNOWN
from onea.model.state import KNOWS_NOTHING, State
from onea.runtime import NOBODY, Progress
from onea.text import count


@dataclass(frozen=True)
class Answer:
    """What a model says about one image.

    >>> answer = Answer("photo.jpg", "kiwi", (("kiwi", 0.9), ("lemon", 0.1)), version=2, none=0.2)
    >>> answer.label, answer.probability, answer.unknown
    ('kiwi', 0.9, False)

    Attributes:
        image: its path or number.
        label: the class, or ``unknown``.
        top: the most likely classes with their probabilities, best first; also for an unknown image. They suppose that
            it shows one of the classes.
        version: of the model that said so.
        none: the chance that it shows none of the classes, if half of all images showed none; None where the model
            cannot tell, because it knows one class or was taught by an earlier version.
    """

    image: str
    label: str
    top: tuple[tuple[str, float], ...]
    version: int
    none: float | None = None

    @property
    def unknown(self) -> bool:
        """Whether the image is too far from every class."""
        return self.label == UNKNOWN

    @property
    def probability(self) -> float | None:
        """Of the class that is answered; None where none is."""
        return None if self.unknown else self.top[0][1]


def as_rows(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Answers as JSON-able values, under the names that a service has for them; ``answer`` is an earlier one."""
    return [
        {
            "image": answer.image,
            "class": answer.label,
            "answer": answer.label,
            "probability": answer.probability,
            "unknown": answer.unknown,
            "top": [{"class": name, "probability": chance} for name, chance in answer.top],
            "none_of_these": answer.none,
            "version": answer.version,
        }
        for answer in answers
    ]


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
        threshold: the familiarity below which an image is ``unknown``.
    """

    def __init__(self, engine: Engine, state: State, false_alarms: float | None):
        self.state, self.engine = state, engine
        self.adapters = engine.adapters(state)
        self.scorer = state.classifier.fit(state.statistics)
        self.familiarity, known, hidden = state.calibrated_familiarity()
        self._odds = calibration.fit_chance(known, hidden)
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
            images = count(len(self.state.margins), "image", "images")
            raise OneaError(
                f"unknown is {false_alarms:g}, which {images} held out are too few to promise; give "
                f"{math.ceil(1000 * lowest) / 1000:g} or more, or teach more images."
            )

    def predict(self, images: Any, progress: Progress = NOBODY) -> npt.NDArray[np.str_]:
        """The class of each image, or ``unknown``."""
        found = self.judge(images, progress)
        names = np.array([*self.classes, UNKNOWN])
        rows = torch.where(self._strange(found), len(self.classes), _ranked(found.scores)[:, 0])
        answers: npt.NDArray[np.str_] = names[rows.numpy()]
        return answers

    def predict_proba(self, images: Any, progress: Progress = NOBODY) -> npt.NDArray[np.float64]:
        """The probability of each known class, ``[N, classes]``; calibrated on held-out images."""
        found: npt.NDArray[np.float64] = self.probabilities(self.judge(images, progress).scores).numpy()
        return found

    def predict_topk(self, images: Any, k: int = 5, progress: Progress = NOBODY) -> list[list[tuple[str, float]]]:
        """The ``k`` most likely classes of each image with their probabilities, best first."""
        return [list(answer.top) for answer in self.answers(images, k, None, progress)]

    def answers(
        self, images: Any, k: int = 5, on_bad: OnBad | None = "fail", progress: Progress = NOBODY
    ) -> list[Answer]:
        """All there is to say about each image."""
        batch = images if isinstance(images, DecodedImages) else self.read(images, on_bad, progress)
        return self.answers_from(batch, self.judge(batch, progress), k)

    def answers_from(self, batch: DecodedImages, found: Judgement, k: int = 5) -> list[Answer]:
        """All there is to say about images that have been judged."""
        if k < 1:
            raise OneaError(f"k is {k}; ask for at least one class.")
        rows = _ranked(found.scores)[:, :k]
        likely = self.probabilities(found.scores).gather(1, rows)
        strange = self._strange(found).tolist()
        chances_of_none = self._chances_of_none(found)
        return [
            Answer(
                image,
                UNKNOWN if odd else self.classes[best[0]],
                tuple((self.classes[row], p) for row, p in zip(best, chances, strict=True)),
                self.version,
                none,
            )
            for image, odd, best, chances, none in zip(
                batch.names, strange, rows.tolist(), likely.tolist(), chances_of_none, strict=True
            )
        ]

    def read(self, images: Any, on_bad: OnBad | None = "fail", progress: Progress = NOBODY) -> DecodedImages:
        """Images as the network needs them, to be asked about as often as wanted."""
        return read_unlabelled(images, self.engine.side, on_bad, progress)

    def similarities(self, images: Any) -> Tensor:
        """Similarity of each image to every class, ``[N, classes]``."""
        return self.judge(images).scores

    def judge(self, images: Any, progress: Progress = NOBODY) -> Judgement:
        """Scores of each image for every class, and how familiar it looks."""
        self.check_taught()
        return self.judge_features(self.features(images, progress))

    def features(self, images: Any, progress: Progress = NOBODY) -> Tensor:
        """What the network and the adapter make of each image, ``[N, width]``."""
        batch = images if isinstance(images, DecodedImages) else self.read(images, None, progress)
        return self.engine.features(batch.pixels, self.adapters, progress=progress)

    def judge_features(self, features: Tensor) -> Judgement:
        """The same from the features of images."""
        scores = self.scorer(features)
        if not bool(scores.isfinite().all()):
            raise OneaError("The model's answers are not numbers, so it is damaged; go back with undo.")
        return Judgement(scores, self.familiarity(features, scores))

    def probabilities(self, scores: Tensor) -> Tensor:
        """The probability of each class, as if images showed one of them."""
        return torch.softmax(scores.double() / self.state.temperature, dim=1)

    def _chances_of_none(self, found: Judgement) -> list[float | None]:
        if self._odds is None:
            return [None] * len(found.familiarity)
        slope, offset = self._odds
        chances: list[float | None] = torch.sigmoid(slope * found.familiarity.double() + offset).tolist()
        return chances

    def _strange(self, found: Judgement) -> Tensor:
        return found.familiarity < self.threshold


def _ranked(scores: Tensor) -> Tensor:
    """Classes from the nearest to the farthest; of two that are equally near, the older one first."""
    return scores.sort(dim=1, descending=True, stable=True).indices
