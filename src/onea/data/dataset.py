# SPDX-License-Identifier: Apache-2.0
"""A dataset: named classes, a training side and a test side, and perhaps natural groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onea.errors import OneaError

Labels = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]


class MissingData(OneaError):  # noqa: N818 - it says what is missing
    """There is nothing where the data should be."""


@dataclass(frozen=True)
class Split:
    """One side of a dataset: labels, and the images either as files or as pixels, never both.

    >>> len(Split(np.array([0, 0, 1]), pixels=np.zeros((3, 3, 8, 8), np.uint8)))
    3

    Attributes:
        labels: ``int64 [N]``, each an index into ``Dataset.classes``.
        files: N image files, or None.
        pixels: ``uint8 [N, 3, H, W]``, or None.
    """

    labels: Labels
    files: tuple[Path, ...] | None = None
    pixels: Pixels | None = None

    def __post_init__(self) -> None:
        images = self.files if self.files is not None else self.pixels
        if images is None or (self.files is not None and self.pixels is not None):
            raise ValueError("a split holds either files or pixels")
        if len(images) != len(self.labels):
            raise ValueError(f"{len(images)} images but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Group:
    """Classes that belong together by nature (one folder, one writing system): a task of its own size.

    >>> Group("monday", classes=(0, 1, 2))
    Group(name='monday', classes=(0, 1, 2))
    """

    name: str
    classes: tuple[int, ...]


@dataclass(frozen=True)
class Dataset:
    """Named classes with training and test images.

    >>> side = Split(np.array([0, 1]), pixels=np.zeros((2, 3, 8, 8), np.uint8))
    >>> Dataset("pairs", ("left", "right"), train=side, test=side, fingerprint="").classes
    ('left', 'right')

    Attributes:
        fingerprint: hex digest of names and labels, and of the pixels; of images in files, which are not read to be
            listed, of their sizes instead.
        groups: natural tasks in their natural order; empty when the data has none.
        mirror: whether an image flipped left to right still shows its class.
        stamp: hex digest of names, sizes and times of the files: the same, and nobody has touched them. Empty where
            the images are not in files.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    fingerprint: str
    groups: tuple[Group, ...] = ()
    mirror: bool = True
    stamp: str = ""
