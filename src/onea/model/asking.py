# SPDX-License-Identifier: Apache-2.0
"""What a taught model can be asked, in scikit-learn's words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from onea.data.image_files import OnBad
from onea.model.answers import Snapshot
from onea.model.evaluation.evaluation import Evaluation, evaluate
from onea.model.evaluation.metrics import Counts
from onea.model.learning.images import read_labelled
from onea.runtime import NO_PROGRESS, Progress


class Asking(ABC):
    """Questions to the present version of a model; images are taken as ``predict`` takes them everywhere.

    That is: a path, a folder (all images below it), or any number of paths, Pillow images, arrays or tensors.
    """

    verbose: bool

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """The version that answers."""

    def _asked(self) -> AbstractContextManager[Progress]:
        """Who hears how far many images are: a bar, or nobody."""
        if not self.verbose:
            return nullcontext(NO_PROGRESS)
        from onea.model.progress_bar import AskingBar

        return AskingBar()

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The class of each image, or ``unknown`` (-1 where classes are numbers) if it is too far from all of them."""
        current = self.snapshot()
        with self._asked() as progress:
            return current.state.labels(current.predict(X, progress).tolist())

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:
        """The probability of each class of ``classes_``, ``[N, classes]``, calibrated on held-out images.

        A row adds up to 1 less the probability that the image shows none of the classes; with ``unknown=0``, to 1.
        """
        current = self.snapshot()
        with self._asked() as progress:
            return current.predict_proba(X, progress)[:, np.argsort(current.state.labels(current.classes))]

    def predict_topk(self, X: Any, k: int = 5) -> list[list[tuple[Any, float]]]:
        """The ``k`` most probable classes of each image, best first, with the probabilities of ``predict_proba``."""
        current = self.snapshot()
        label = dict(zip(current.classes, current.state.labels(current.classes).tolist(), strict=True))
        with self._asked() as progress:
            found = current.predict_topk(X, k, progress)
        return [[(label[name], chance) for name, chance in top] for top in found]

    def familiarity(self, X: Any) -> npt.NDArray[np.float64]:
        """How much each image looks like something that was taught, ``[N]``; below ``threshold_`` it is ``unknown``."""
        with self._asked() as progress:
            found: npt.NDArray[np.float64] = self.snapshot().compute_scores(X, progress).familiarity.double().numpy()
        return found

    @property
    def threshold_(self) -> float:
        """The familiarity below which an image is answered ``unknown``; minus infinity where none is."""
        return self.snapshot().threshold

    def transform(self, X: Any) -> npt.NDArray[np.float32]:
        """The features of each image, ``[N, width]``: what the network and its adapter make of it.

        They are comparable only within a version, since the adapter learns.
        """
        current = self.snapshot()
        with self._asked() as progress:
            features: npt.NDArray[np.float32] = current.features(X, progress).numpy()
        return features

    def score(self, X: Any, y: Any = None) -> float:
        """Accuracy: the share of images whose class ``predict`` gives, as in ``evaluate``."""
        current = self.snapshot()
        with self._asked() as progress:
            batch = read_labelled(X, y, current.side, None, progress, purpose="score")
            assert batch.labels is not None
            return Counts.from_predictions(batch.labels, current.predict(batch, progress).tolist()).accuracy

    def evaluate(self, X: Any, y: Any = None, on_bad: OnBad = "fail") -> Evaluation:
        """How well each class is answered, and what is taken for what; a folder of class folders needs no ``y``.

        ``print`` shows the sum of it, ``by_class`` each class, ``as_json()`` all of it.
        """
        current = self.snapshot()
        with self._asked() as progress:
            return evaluate(current, X, y, on_bad=on_bad, progress=progress)
