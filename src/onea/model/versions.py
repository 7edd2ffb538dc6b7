# SPDX-License-Identifier: Apache-2.0
"""The rules of versions: which stay when one is added, which number comes next, what going back removes."""

from __future__ import annotations

import reprlib
import sys
import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from onea.errors import OneaError
from onea.model.answers import Snapshot
from onea.model.asking import Asking
from onea.model.engine import Engine
from onea.model.names import check_integer_labels, name_of
from onea.model.state import NO_CLASSES, State
from onea.model.storage.erasure import erase
from onea.text import plural, utc_timestamp

if TYPE_CHECKING:
    from onea.model.storage.folder import StoredVersions


@dataclass(frozen=True)
class Versions:
    """Numbers of the versions that a model keeps; estimator, model folder and service share these rules.

    >>> first = Versions().committed(keep=1)
    >>> first.committed(keep=1).committed(keep=1)
    Versions(kept=(2, 3), counter=3)
    >>> first.committed(keep=1).undone().committed(keep=1)
    Versions(kept=(1, 3), counter=3)

    Attributes:
        kept: oldest first; the last one is the present.
        counter: the highest number ever given, so that none is used twice, even after undo.
    """

    kept: tuple[int, ...] = ()
    counter: int = 0

    @property
    def present(self) -> int:
        """The number of the present version; 0 before the first."""
        return self.kept[-1] if self.kept else 0

    @property
    def next(self) -> int:
        """The number that the next version gets."""
        return self.counter + 1

    def committed(self, keep: int) -> Versions:
        """With one more version, and at most so many before it."""
        return Versions((*self.kept, self.next)[-1 - keep :], self.next)

    def undone(self) -> Versions:
        """Without the present version.

        Raises:
            OneaError: there is no earlier one.
        """
        if len(self.kept) < 2:
            raise OneaError("There is no earlier version to go back to; the last updates alone are kept.")
        return replace(self, kept=self.kept[:-1])


class Versioned(Asking):
    """A model in versions, one after each update; the present one answers, also while the next is prepared."""

    unknown: float | None
    keep: int

    def __post_init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._versions = Versions()
        self._states: dict[int, State] = {}  # of the versions that are kept, as far as they were read or made here
        self._stored: StoredVersions | None = None  # where the others are
        self._ancestry: frozenset[str] = frozenset()
        self._changing = threading.RLock()

    @abstractmethod
    def _ready(self) -> Engine:
        """What runs the network."""

    @property
    def classes_(self) -> npt.NDArray[Any]:
        """The classes it knows, sorted: the columns of ``predict_proba``."""
        current = self._snapshot
        if current is None:  # scikit-learn takes a missing attribute for an estimator that is not fitted
            raise AttributeError("classes_ is not there before a class was taught")
        return np.sort(current.state.labels(current.classes))

    @property
    def version(self) -> int:
        """Number of the update that made the present state; 0 before the first. Never used twice, even after undo."""
        return self._versions.present

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every update that made the present state, oldest first."""
        return [dict(update) for update in self._snapshot.state.updates] if self._snapshot else []

    @property
    def versions(self) -> Versions:
        """The versions that are kept: those that ``undo`` can go back to, and the present one."""
        *earlier, present = self._versions.kept or [0]
        kept = (version for version in earlier if version in self._states or version in (self._stored or ()))
        return replace(self._versions, kept=(*kept, present)) if present else self._versions

    def state(self, version: int) -> State:
        """One of the versions that are kept; read from the model folder if need be."""
        with self._changing:
            if version not in self._states:
                assert self._stored is not None
                self._states[version] = self._stored.read(version, self.snapshot().state)
            return self._states[version]

    def is_based_on(self, version: int, id: str) -> bool:
        """Whether this model was once in the state of this id, so that no other model is overwritten."""
        return id in self._ancestry or (version in self.versions.kept and self.state(version).id == id)

    def snapshot(self) -> Snapshot:
        """The present version as an object that answers and never changes, whatever is learned meanwhile."""
        current = self._snapshot
        if current is None:
            raise _not_taught()
        return current

    def __repr__(self) -> str:
        made = super().__repr__()
        if self._snapshot is None:
            return made
        state = self._snapshot.state
        names = reprlib.repr(list(state.classes))  # the first few
        known = f"{plural(len(state.classes), 'class', 'classes')} {names}"
        return f"<{made} knows {known} from {plural(sum(state.images), 'image', 'images')}, version {state.version}>"

    def __sklearn_is_fitted__(self) -> bool:
        return self._snapshot is not None

    # changes that need no images

    def forget(self, *classes: str | int, everywhere: bool = False) -> Self:
        """No longer answer these classes. What the adapter learned from their images stays in it.

        Earlier versions, to which ``undo`` can go back, still hold them. With ``everywhere`` these versions and the
        names in the history are removed, too: there is no undo, and ``save`` leaves nothing of it in the model folder.
        """
        with self._changing:
            names, state = [name_of(label) for label in classes], self.snapshot().state
            if everywhere:
                self._commit(erase(state, names, self._versions.next, utc_timestamp()), keep=0)
            else:
                self._commit(state.forget(names, self._versions.next, utc_timestamp()))
        return self

    def rename(self, old: str | int, new: str | int, *, merge: bool = False) -> Self:
        """Call a class by another name; with ``merge``, one that is known: the two become one class."""
        with self._changing:
            before, names = self.snapshot().state, (name_of(old), name_of(new))
            state = (before.merge_classes if merge else before.rename)(*names, self._versions.next, utc_timestamp())
            check_integer_labels(state.classes, state.integer_labels, self.unknown)
            self._commit(state)
        return self

    def undo(self) -> Self:
        """Go back to before the last update."""
        with self._changing:
            self.snapshot()
            self._turn_to(self.versions.undone())
        return self

    def restore(self, present: State, versions: Versions, stored: StoredVersions | None = None) -> None:
        """Become what was saved: the present version, and earlier ones as they are stored."""
        self._states, self._stored = {present.version: present}, stored
        self._turn_to(versions)

    # inside

    @contextmanager
    def _from_nothing(self) -> Iterator[None]:
        """Know nothing, so that what is learned meanwhile is all; after an error, know again what was known."""
        with self._changing:
            before = self._snapshot, self._versions
            self._snapshot, self._versions = None, Versions(counter=self._versions.counter)
            try:
                yield
            except BaseException:
                self._snapshot, self._versions = before
                raise

    def _commit(self, state: State, keep: int | None = None) -> None:
        self._states[state.version] = state
        self._turn_to(self.versions.committed(self.keep if keep is None else keep))

    def _turn_to(self, versions: Versions) -> None:
        """Make other versions the ones that are kept, the last of them the present."""
        self._swap(self.state(versions.present))
        self._versions = versions
        self._states = {version: state for version, state in self._states.items() if version in versions.kept}

    def _swap(self, state: State) -> None:
        self._snapshot = Snapshot(self._ready(), state, self.unknown)
        self._ancestry |= {state.id}


def _not_taught() -> OneaError:
    if sys.modules.get("sklearn") is None:
        return OneaError(NO_CLASSES)
    from onea.model.conventions import NotTaughtError

    return NotTaughtError(NO_CLASSES)
