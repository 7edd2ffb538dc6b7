# SPDX-License-Identifier: Apache-2.0
"""Models with versions: predict with the current version, create the next one, and undo."""

from __future__ import annotations

import reprlib
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from onea.data.file_checks import OnBad
from onea.errors import OneaError
from onea.model.answers import Snapshot
from onea.model.engine import Engine
from onea.model.evaluation.evaluation import Evaluation, evaluate
from onea.model.evaluation.metrics import Counts
from onea.model.learning.images import read_labelled
from onea.model.names import check_integer_labels, class_name
from onea.model.state import NO_CLASSES, State
from onea.model.storage.erasure import erase
from onea.runtime import NO_PROGRESS, Progress
from onea.text import plural, utc_timestamp

if TYPE_CHECKING:
    from onea.model.storage.folder import StoredVersions


@dataclass(frozen=True)
class Versions:
    """Numbers of the versions that a model keeps.

    >>> first = Versions().committed(keep=1)
    >>> first.committed(keep=1).committed(keep=1)
    Versions(kept=(2, 3), counter=3)
    >>> first.committed(keep=1).undone().committed(keep=1)
    Versions(kept=(1, 3), counter=3)

    Attributes:
        kept: oldest first; the last one is the current version.
        counter: the highest number so far, so that no number is used twice, even after undo.
    """

    kept: tuple[int, ...] = ()
    counter: int = 0

    @property
    def current(self) -> int:
        """The number of the current version; 0 before the first."""
        return self.kept[-1] if self.kept else 0

    @property
    def next(self) -> int:
        """The number of the next version."""
        return self.counter + 1

    def committed(self, keep: int) -> Versions:
        """With one more version, and at most ``keep`` earlier ones."""
        return Versions((*self.kept, self.next)[-1 - keep :], self.next)

    def undone(self) -> Versions:
        """Without the current version.

        Raises:
            OneaError: there is no earlier one.
        """
        if len(self.kept) < 2:
            raise OneaError("There is no earlier version to restore; only the last ones are kept.")
        return replace(self, kept=self.kept[:-1])


class VersionedModel(ABC):
    """A model with one version for each update. The current one predicts while the next one is prepared.

    Images are given as a path, a folder (all images below it), or any number of paths, Pillow images, arrays or
    tensors.
    """

    unknown: float | None
    keep: int
    verbose: bool

    def __post_init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._versions = Versions()
        self._states: dict[int, State] = {}  # kept versions that are in memory
        self._stored: StoredVersions | None = None  # reads the other kept versions
        self._ancestry: frozenset[str] = frozenset()
        self._lock = threading.RLock()

    @abstractmethod
    def _load_engine(self) -> Engine:
        """The network; it is loaded by the first call."""

    def __repr__(self) -> str:
        params = super().__repr__()
        if self._snapshot is None:
            return params
        state = self._snapshot.state
        classes = f"{plural(len(state.classes), 'class', 'classes')} {reprlib.repr(list(state.classes))}"
        return f"<{params} with {classes} from {plural(sum(state.images), 'image', 'images')}, version {state.version}>"

    def __sklearn_is_fitted__(self) -> bool:
        return self._snapshot is not None

    @property
    def classes_(self) -> npt.NDArray[Any]:
        """The classes of the model, sorted: the columns of ``predict_proba``."""
        if self._snapshot is None:  # scikit-learn regards an estimator without this attribute as not fitted
            raise AttributeError("classes_ does not exist before the first update")
        return np.sort(self._snapshot.state.labels(self._snapshot.classes))

    @property
    def version(self) -> int:
        """Number of the current version; 0 before the first update. No number is used twice, even after undo."""
        return self._versions.current

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every update of the current version, oldest first."""
        return [dict(update) for update in self._snapshot.state.updates] if self._snapshot else []

    @property
    def versions(self) -> Versions:
        """The kept versions: those that ``undo`` can go back to, and the current one."""
        *earlier, current = self._versions.kept or [0]
        kept = (version for version in earlier if version in self._states or version in (self._stored or ()))
        return replace(self._versions, kept=(*kept, current)) if current else self._versions

    def state(self, version: int) -> State:
        """A kept version; it is read from the model folder if necessary."""
        with self._lock:
            if version not in self._states:
                assert self._stored is not None
                self._states[version] = self._stored.read(version, self.snapshot().state)
            return self._states[version]

    def is_based_on(self, version: int, state_id: str) -> bool:
        """Whether this model was made from the version with this number and id."""
        return state_id in self._ancestry or (version in self.versions.kept and self.state(version).id == state_id)

    def snapshot(self) -> Snapshot:
        """The current version as an immutable object, which later updates do not change."""
        if self._snapshot is None:
            raise _not_taught()
        return self._snapshot

    # predictions

    def _prediction_progress(self) -> AbstractContextManager[Progress]:
        if not self.verbose:
            return nullcontext(NO_PROGRESS)
        from onea.model.progress_bar import PredictionBar

        return PredictionBar()

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The class of each image, or ``unknown`` (-1 if classes are numbers)."""
        snapshot = self.snapshot()
        with self._prediction_progress() as progress:
            return snapshot.state.labels(snapshot.predict(X, progress).tolist())

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:
        """The probability of each class of ``classes_``, ``[N, classes]``, calibrated on held-out images.

        A row and the probability that the image shows none of the classes add up to 1; with ``unknown=0``, the row.
        """
        snapshot = self.snapshot()
        with self._prediction_progress() as progress:
            order = np.argsort(snapshot.state.labels(snapshot.classes))
            return snapshot.predict_proba(X, progress)[:, order]

    def predict_topk(self, X: Any, k: int = 5) -> list[list[tuple[Any, float]]]:
        """The ``k`` most probable classes of each image, best first, with the probabilities of ``predict_proba``."""
        snapshot = self.snapshot()
        labels = dict(zip(snapshot.classes, snapshot.state.labels(snapshot.classes).tolist(), strict=True))
        with self._prediction_progress() as progress:
            predictions = snapshot.predict_topk(X, k, progress)
        return [[(labels[name], probability) for name, probability in top] for top in predictions]

    def familiarity(self, X: Any) -> npt.NDArray[np.float64]:
        """The similarity of each image to the taught images, ``[N]``; below ``threshold_`` it is ``unknown``."""
        with self._prediction_progress() as progress:
            values: npt.NDArray[np.float64] = self.snapshot().compute_scores(X, progress).familiarity.double().numpy()
        return values

    @property
    def threshold_(self) -> float:
        """The familiarity below which an image is ``unknown``; minus infinity if none is."""
        return self.snapshot().threshold

    def transform(self, X: Any) -> npt.NDArray[np.float32]:
        """The features of each image by the network with its adapter, ``[N, width]``.

        They are comparable only within a version, because updates change the adapter.
        """
        snapshot = self.snapshot()
        with self._prediction_progress() as progress:
            features: npt.NDArray[np.float32] = snapshot.features(X, progress).numpy()
        return features

    def score(self, X: Any, y: Any = None) -> float:
        """The accuracy of ``predict``, as in ``evaluate``."""
        snapshot = self.snapshot()
        with self._prediction_progress() as progress:
            batch = read_labelled(X, y, snapshot.side, None, progress, purpose="score")
            assert batch.labels is not None
            return Counts.from_predictions(batch.labels, snapshot.predict(batch, progress).tolist()).accuracy

    def evaluate(self, X: Any, y: Any = None, on_bad: OnBad = "fail") -> Evaluation:
        """Accuracy, confusion matrix and mistakes on labelled images; a folder of class folders needs no ``y``.

        ``print`` shows a summary, ``by_class`` has the results for each class, ``as_json()`` all results.
        """
        snapshot = self.snapshot()
        with self._prediction_progress() as progress:
            return evaluate(snapshot, X, y, on_bad=on_bad, progress=progress)

    # updates without images

    def forget(self, *classes: str | int, everywhere: bool = False) -> Self:
        """Remove classes. The adapter still contains what it learned from their images.

        Earlier versions, to which ``undo`` can go back, still have the classes. With ``everywhere`` these versions and
        the names in the history are removed, too: undo becomes impossible, and ``save`` removes them from the folder.
        """
        with self._lock:
            names, state = [class_name(label) for label in classes], self.snapshot().state
            if everywhere:
                self._commit(erase(state, names, self._versions.next, utc_timestamp()), keep=0)
            else:
                self._commit(state.forget(names, self._versions.next, utc_timestamp()))
        return self

    def rename(self, old: str | int, new: str | int, *, merge: bool = False) -> Self:
        """Rename a class; with ``merge``, into another class, so that the two become one."""
        with self._lock:
            before, names = self.snapshot().state, (class_name(old), class_name(new))
            state = (before.merge_classes if merge else before.rename)(*names, self._versions.next, utc_timestamp())
            check_integer_labels(state.classes, state.integer_labels, self.unknown)
            self._commit(state)
        return self

    def undo(self) -> Self:
        """Go back to the version before the last update."""
        with self._lock:
            self.snapshot()
            self._set_versions(self.versions.undone())
        return self

    # versions

    def restore(self, current: State, versions: Versions, stored: StoredVersions | None = None) -> None:
        """Set the state to a saved model: its current version and, as ``stored``, earlier ones."""
        self._states, self._stored = {current.version: current}, stored
        self._set_versions(versions)

    @contextmanager
    def _without_classes(self) -> Iterator[None]:
        """Run the block on a model without classes; restore the classes if it fails."""
        with self._lock:
            before = self._snapshot, self._versions
            self._snapshot, self._versions = None, Versions(counter=self._versions.counter)
            try:
                yield
            except BaseException:
                self._snapshot, self._versions = before
                raise

    def _commit(self, state: State, keep: int | None = None) -> None:
        self._states[state.version] = state
        self._set_versions(self.versions.committed(self.keep if keep is None else keep))

    def _set_versions(self, versions: Versions) -> None:
        """Keep these versions; the last one is the current version."""
        self._set_current(self.state(versions.current))
        self._versions = versions
        self._states = {version: state for version, state in self._states.items() if version in versions.kept}

    def _set_current(self, state: State) -> None:
        self._snapshot = Snapshot(self._load_engine(), state, self.unknown)
        self._ancestry |= {state.id}


def _not_taught() -> OneaError:
    if sys.modules.get("sklearn") is None:  # None: it must not be imported
        return OneaError(NO_CLASSES)
    from onea.model.scikit_learn import NotTaughtError

    return NotTaughtError(NO_CLASSES)
