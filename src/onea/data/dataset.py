# SPDX-License-Identifier: Apache-2.0
"""Datasets: named classes, training and test images, natural groups; and their construction from image files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onea.errors import OneaError
from onea.files import file_stamp

Labels = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]


class MissingData(OneaError):  # noqa: N818
    """The dataset does not exist."""


@dataclass(frozen=True)
class Split:
    """The training or test split of a dataset: labels, and images as files or as pixels.

    >>> len(Split(np.array([0, 0, 1]), pixels=np.zeros((3, 3, 8, 8), np.uint8)))
    3

    Attributes:
        labels: ``int64 [N]``, indices into ``Dataset.classes``.
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
    """Classes that belong together (one folder, one writing system) and form a natural task.

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
        fingerprint: hex digest of names, labels and pixels; for image files, of their sizes instead of pixels.
        groups: natural tasks in order; empty if the data has none.
        mirror: whether a horizontally flipped image still belongs to its class.
        stamp: hex digest of names, sizes and times of the files, to detect changes; empty without files.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    fingerprint: str
    groups: tuple[Group, ...] = ()
    mirror: bool = True
    stamp: str = ""


@dataclass(frozen=True)
class ImageFile:
    """One image file of a dataset: its path, and its name relative to the dataset."""

    path: Path
    name: str


ImagesByClass = dict[str, list[ImageFile]]


def natural_key(name: str) -> tuple[list[str | tuple[int, str]], str]:
    """Sort key for natural order, in which numbers compare by value.

    >>> sorted(["task10", "task2", "Task1"], key=natural_key)
    ['Task1', 'task2', 'task10']
    """
    # Text and digits alternate, text first, so keys never compare a number with text.
    parts = re.split(r"([0-9]+)", name.casefold())
    key: list[str | tuple[int, str]] = [*parts]
    for i in range(1, len(parts), 2):
        digits = parts[i].lstrip("0")
        key[i] = len(digits), digits  # sorts like the numbers; int() refuses thousands of digits
    return key, name


def choose_test_names(names: Iterable[str]) -> frozenset[str]:
    """Choose about a fifth of the names as the test split; of two or more names at least one, and never all.

    The choice depends only on the names, not on their order, the machine or a seed.

    >>> sorted(choose_test_names(f"cat/{i}.png" for i in range(10)))
    ['cat/0.png', 'cat/8.png']
    """
    # File names on Linux need not be valid UTF-8; surrogateescape restores their bytes.
    digests = {name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() for name in names}
    shuffled = sorted(digests, key=lambda name: (digests[name], name))
    return frozenset(shuffled[: max(1, (2 * len(shuffled) + 5) // 10)])


def split_by_class(images: Mapping[str, Sequence[ImageFile]]) -> tuple[ImagesByClass, ImagesByClass]:
    """Divide each class into training and test images with ``choose_test_names``.

    Raises:
        OneaError: a class has a single image.
    """
    train: ImagesByClass = {}
    test: ImagesByClass = {}
    for name, members in images.items():
        if len(members) < 2:
            raise OneaError(
                f"Class '{name}' has only 1 image, which leaves none for testing: add images, at least 2 per class."
            )
        held_out = choose_test_names(image.name for image in members)
        train[name] = [image for image in members if image.name not in held_out]
        test[name] = [image for image in members if image.name in held_out]
    return train, test


def check_same_classes(train: Iterable[str], test: Iterable[str], *, train_name: str, test_name: str) -> None:
    """Refuse classes that are in only one of the splits.

    Raises:
        OneaError: a class is missing in one split.
    """
    train_classes, test_classes = set(train), set(test)
    for present, absent, missing in (
        (train_name, test_name, train_classes - test_classes),
        (test_name, train_name, test_classes - train_classes),
    ):
        if missing:
            first = min(missing, key=natural_key)
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise OneaError(
                f"Class '{first}'{more} is in {present} but not in {absent}: add its images there, or remove the class."
            )


def dataset_from_files(
    name: str,
    train: Mapping[str, Sequence[ImageFile]],
    test: Mapping[str, Sequence[ImageFile]],
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> Dataset:
    """A dataset from two splits with the same classes; classes, groups and images are in natural order."""
    classes = tuple(sorted(train, key=natural_key))
    train, test = (
        {label: sorted(side[label], key=lambda image: natural_key(image.name)) for label in classes}
        for side in (train, test)
    )
    fingerprint, stamp = _digests(train, test)
    index = {label: i for i, label in enumerate(classes)}
    natural_groups = [
        Group(group, tuple(sorted(index[label] for label in members))) for group, members in (groups or {}).items()
    ]
    return Dataset(
        name=name,
        classes=classes,
        train=_split(train),
        test=_split(test),
        fingerprint=fingerprint,
        groups=tuple(sorted(natural_groups, key=lambda group: natural_key(group.name))),
        stamp=stamp,
    )


def fingerprint_of_pixels(classes: Sequence[str], train: Split, test: Split) -> str:
    """Hex digest over class names, pixels and labels, for a dataset in memory."""
    digest = hashlib.sha256("\n".join(["pixels", *classes]).encode())
    for side in (train, test):
        assert side.pixels is not None
        digest.update(f"\0{side.pixels.shape}\0".encode())
        digest.update(np.ascontiguousarray(side.pixels).data)
        digest.update(np.ascontiguousarray(side.labels, dtype="<i8").data)
    return digest.hexdigest()


def _split(images: Mapping[str, Sequence[ImageFile]]) -> Split:
    files = tuple(image.path for members in images.values() for image in members)
    labels = np.repeat(np.arange(len(images)), [len(members) for members in images.values()])
    return Split(labels=labels.astype(np.int64), files=files)


def _digests(train: Mapping[str, Sequence[ImageFile]], test: Mapping[str, Sequence[ImageFile]]) -> tuple[str, str]:
    """The fingerprint and the stamp, without reading the files, which takes long for large datasets."""
    fingerprint, stamp = hashlib.sha256(b"files"), hashlib.sha256(b"stamps")
    for side_name, side in (("train", train), ("test", test)):
        for i, (label, images) in enumerate(side.items()):
            for image in images:
                file = file_stamp(image.path)
                size = file.partition(" ")[0] or "-1"  # a dangling link, which is reported when it is read
                fields = (side_name, str(i), label, image.name, size)
                fingerprint.update("\0".join(fields).encode("utf-8", "surrogateescape") + b"\n")
                stamp.update(f"{file}\n".encode())
    stamp.update(fingerprint.digest())
    return fingerprint.hexdigest(), stamp.hexdigest()
