# SPDX-License-Identifier: Apache-2.0
"""Photos and files of one update that need a look, by name: for whoever taught them, never part of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Conflict:
    """A photo that is also there under another class.

    Attributes:
        image: its name.
        label: the class that it was taught as.
        other: the other class.
    """

    image: str
    label: str
    other: str


@dataclass(frozen=True)
class PhotoReport:
    """What was found among the photos and files of an update. The history of the model has the counts alone.

    Attributes:
        skipped: ``path: reason`` of each photo that could not be read.
        conflicts: photos that are also there under another class.
        left_out: files that are no photos by their ending, or lie in no class folder.
        groups: folders that hold class folders.
    """

    skipped: tuple[str, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    left_out: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many of each there are, by the names that a history has for them."""
        return {
            "skipped": len(self.skipped),
            "two_names": len(self.conflicts),
            "left_out": len(self.left_out),
            "groups": len(self.groups),
        }


def conflicts_of(names: Sequence[str], labels: Sequence[str], others: Mapping[int, str]) -> tuple[Conflict, ...]:
    """Photos, by their row, that are also there under another class."""
    return tuple(Conflict(names[row], labels[row], other) for row, other in sorted(others.items()))
