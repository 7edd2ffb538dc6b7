# SPDX-License-Identifier: Apache-2.0
"""Published datasets in the layout they are published in, each checked against its known counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from onea.data.dataset import Dataset, ImageFile, ImagesByClass, MissingData, dataset_from_files, split_by_class
from onea.data.folders import load_folder, read_tree
from onea.errors import OneaError


@dataclass(frozen=True)
class Counts:
    """Numbers of classes and images of a published dataset; ``train`` and ``test`` where it has an official split."""

    classes: int
    images: int
    train: int | None = None
    test: int | None = None

    def __str__(self) -> str:
        text = f"{self.classes:,} classes and {self.images:,} images"
        return text if self.train is None else f"{text} ({self.train:,} training, {self.test:,} test)"


@dataclass(frozen=True)
class Published:
    """The origin and the counts of a dataset.

    Attributes:
        title: the name its authors gave it.
        archive: the file to unpack.
        publisher: who hands it out, with the homepage.
        folders: folder names it may have below the data folder; the first is that of the archive.
        counts: what a complete copy holds.
    """

    name: str
    title: str
    archive: str
    publisher: str
    folders: tuple[str, ...]
    counts: Counts


CUB200 = Published(
    name="cub200",
    title="CUB-200-2011",
    archive="CUB_200_2011.tgz",
    publisher="Caltech, https://www.vision.caltech.edu/datasets/cub_200_2011/",
    folders=("CUB_200_2011", "cub200", "cub"),
    counts=Counts(classes=200, images=11_788, train=5_994, test=5_794),
)
IMAGENET_A = Published(
    name="imagenet-a",
    title="ImageNet-A",
    archive="imagenet-a.tar",
    publisher="Hendrycks et al., https://github.com/hendrycks/natural-adv-examples",
    folders=("imagenet-a",),
    counts=Counts(classes=200, images=7_500),
)
IMAGENET_R = Published(
    name="imagenet-r",
    title="ImageNet-R",
    archive="imagenet-r.tar",
    publisher="Hendrycks et al., https://github.com/hendrycks/imagenet-r",
    folders=("imagenet-r",),
    counts=Counts(classes=200, images=30_000),
)


def load_cub200(root: Path, published: Published = CUB200) -> Dataset:
    """CUB-200-2011 with its official split, or divided into ``train/`` and ``test/`` folders by others.

    Raises:
        OneaError: it is missing or incomplete; says what is expected, what was found, and where it comes from.
    """

    def is_here(base: Path) -> bool:
        return (base / "images.txt").is_file()

    return _load(root, published, is_here, _read_cub)


def load_imagenet_variant(root: Path, published: Published) -> Dataset:
    """ImageNet-A or ImageNet-R with about a fifth of each class held out, or in ``train/`` and ``test/`` folders.

    Raises:
        OneaError: it is missing or incomplete; says what is expected, what was found, and where it comes from.
    """

    def is_here(base: Path) -> bool:
        # Below the data folder itself lie folders of other datasets; class folders are named n01234567.
        return base.is_dir() and any(child.is_dir() and child.name[1:].isdecimal() for child in base.glob("n*"))

    return _load(root, published, is_here, _read_class_folders)


def _load(
    root: Path, published: Published, is_here: Callable[[Path], bool], read: Callable[[Path, Published], Dataset]
) -> Dataset:
    for base in (*(root / folder for folder in published.folders), root):
        if (base / "train").is_dir() and (base / "test").is_dir():
            return _read_divided(base, published)
        if is_here(base):
            return read(base, published)
    raise MissingData(
        f"{published.title} is not in {root}: unpack {published.archive} ({published.publisher}) there, so that "
        f"{root / published.folders[0]} exists, or set ONEA_DATA to the folder that has it."
    )


def _read_divided(base: Path, published: Published) -> Dataset:
    """The layout of PILOT and others; they divide differently, so only the number of classes is certain."""
    dataset = load_folder(base)
    if len(dataset.classes) != published.counts.classes:
        raise _incomplete(base, published, f"{published.counts.classes} classes", f"{len(dataset.classes)} classes")
    return replace(dataset, name=published.name)


def _read_class_folders(base: Path, published: Published) -> Dataset:
    images = read_tree(base).images
    found = Counts(len(images), sum(map(len, images.values())))
    if found != published.counts:
        raise _incomplete(base, published, str(published.counts), str(found))
    return dataset_from_files(published.name, *split_by_class(images))


def _read_cub(base: Path, published: Published) -> Dataset:
    """Join the four tables of CUB: file, class and side of each image number, and name of each class number."""
    names = _table(base / "classes.txt", published)
    files = _table(base / "images.txt", published)
    class_of = _table(base / "image_class_labels.txt", published)
    in_train = _table(base / "train_test_split.txt", published)
    train: ImagesByClass = {name: [] for name in names.values()}
    test: ImagesByClass = {name: [] for name in names.values()}
    for number, file in files.items():
        label = names.get(class_of.get(number, ""))
        if label is None or number not in in_train:
            raise OneaError(
                f"Image {number} ({file}) in {base / 'images.txt'} has no class or no side: "
                f"{_unpack_again(base, published)}."
            )
        side = train if in_train[number] == "1" else test
        side[label].append(ImageFile(base / "images" / file, file))
    _check_cub(base, published, train, test)
    return dataset_from_files(published.name, train, test)


def _check_cub(base: Path, published: Published, train: ImagesByClass, test: ImagesByClass) -> None:
    present = [sum(image.path.is_file() for images in side.values() for image in images) for side in (train, test)]
    classes = sum(bool(train[name]) and bool(test[name]) for name in train)
    found = Counts(classes, sum(present), *present)
    if found != published.counts:
        raise _incomplete(base, published, str(published.counts), str(found))


def _table(path: Path, published: Published) -> dict[str, str]:
    """Read lines of ``number value``."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise OneaError(f"Cannot read {path}: {_unpack_again(path.parent, published)}.") from None
    table: dict[str, str] = {}
    for i, line in enumerate(lines, start=1):
        number, _, value = line.strip().partition(" ")
        if number and not value:
            raise OneaError(f"Line {i} of {path} is not 'number value': {_unpack_again(path.parent, published)}.")
        if number:
            table[number] = value
    return table


def _incomplete(base: Path, published: Published, expected: str, found: str) -> OneaError:
    return OneaError(
        f"{published.title} in {base} should have {expected}, but has {found}: {_unpack_again(base, published)}."
    )


def _unpack_again(base: Path, published: Published) -> str:
    return f"unpack {published.archive} ({published.publisher}) into {base.parent} again"
