# SPDX-License-Identifier: Apache-2.0
"""The rules of versions: which stay when one is added, which number comes next, what going back removes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onea.errors import OneaError


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
