# SPDX-License-Identifier: Apache-2.0
"""Published datasets of image files in their original layout, each checked against its published counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from onea.data.dataset import Dataset, ImageFile, ImagesByClass, MissingData, dataset_from_files, split_by_class
from onea.data.folders import load_folder, read_tree
from onea.errors import OneaError


@dataclass(frozen=True)
class Counts:
    """Numbers of classes and images of a published dataset; ``train`` and ``test`` if it has an official split."""

    classes: int
    images: int
    train: int | None = None
    test: int | None = None

    def __str__(self) -> str:
        text = f"{self.classes:,} classes and {self.images:,} images"
        return text if self.train is None else f"{text} ({self.train:,} training, {self.test:,} test)"


@dataclass(frozen=True)
class PublishedDataset:
    """The origin and the counts of a dataset.

    Attributes:
        name: name on the command line.
        title: name in publications.
        archive: file to unpack.
        publisher: authors and homepage.
        folders: possible folder names below the data folder; the first one is that of the archive.
        counts: counts of a complete copy.
    """

    name: str
    title: str
    archive: str
    publisher: str
    folders: tuple[str, ...]
    counts: Counts

    def remedy(self, base: Path) -> str:
        """What to do about an incomplete or damaged copy in this folder."""
        return f"unpack {self.archive} ({self.publisher}) into {base.parent} again"

    def incomplete_error(self, base: Path, expected: object, actual: object) -> OneaError:
        """The error for a copy with other counts."""
        return OneaError(f"{self.title} in {base} should have {expected}, but has {actual}: {self.remedy(base)}.")


CUB200 = PublishedDataset(
    name="cub200",
    title="CUB-200-2011",
    archive="CUB_200_2011.tgz",
    publisher="Caltech, https://www.vision.caltech.edu/datasets/cub_200_2011/",
    folders=("CUB_200_2011", "cub200", "cub"),
    counts=Counts(classes=200, images=11_788, train=5_994, test=5_794),
)
IMAGENET_A = PublishedDataset(
    name="imagenet-a",
    title="ImageNet-A",
    archive="imagenet-a.tar",
    publisher="Hendrycks et al., https://github.com/hendrycks/natural-adv-examples",
    folders=("imagenet-a",),
    counts=Counts(classes=200, images=7_500),
)
IMAGENET_R = PublishedDataset(
    name="imagenet-r",
    title="ImageNet-R",
    archive="imagenet-r.tar",
    publisher="Hendrycks et al., https://github.com/hendrycks/imagenet-r",
    folders=("imagenet-r",),
    counts=Counts(classes=200, images=30_000),
)


def load_cub200(root: Path, published: PublishedDataset = CUB200) -> Dataset:
    """CUB-200-2011 with its official split, or in ``train/`` and ``test/`` folders.

    Raises:
        MissingData: it is not below ``root``.
        OneaError: it is incomplete.
    """
    return _load(root, published, lambda base: (base / "images.txt").is_file(), _read_cub)


def load_imagenet_variant(root: Path, published: PublishedDataset) -> Dataset:
    """ImageNet-A or ImageNet-R with about a fifth of each class held out, or in ``train/`` and ``test/`` folders.

    Raises:
        MissingData: it is not below ``root``.
        OneaError: it is incomplete.
    """

    def has_class_folders(base: Path) -> bool:
        # The data folder also contains other datasets; class folders have names such as n01234567.
        return base.is_dir() and any(child.is_dir() and child.name[1:].isdecimal() for child in base.glob("n*"))

    return _load(root, published, has_class_folders, _read_class_folders)


def _load(
    root: Path,
    published: PublishedDataset,
    is_present: Callable[[Path], bool],
    read: Callable[[Path, PublishedDataset], Dataset],
) -> Dataset:
    for base in (*(root / folder for folder in published.folders), root):
        if (base / "train").is_dir() and (base / "test").is_dir():
            return _read_split_folders(base, published)
        if is_present(base):
            return read(base, published)
    raise MissingData(
        f"{published.title} is not in {root}: unpack {published.archive} ({published.publisher}) there, so that "
        f"{root / published.folders[0]} exists, or set ONEA_DATA to the folder that contains it."
    )


def _read_split_folders(base: Path, published: PublishedDataset) -> Dataset:
    """The layout of PILOT and similar toolboxes. Their splits differ, so only the number of classes is checked."""
    dataset = load_folder(base)
    if len(dataset.classes) != published.counts.classes:
        raise published.incomplete_error(base, f"{published.counts.classes} classes", f"{len(dataset.classes)} classes")
    return replace(dataset, name=published.name)


def _read_class_folders(base: Path, published: PublishedDataset) -> Dataset:
    images = read_tree(base).images
    counts = Counts(len(images), sum(map(len, images.values())))
    if counts != published.counts:
        raise published.incomplete_error(base, published.counts, counts)
    return dataset_from_files(published.name, *split_by_class(images))


def _read_cub(base: Path, published: PublishedDataset) -> Dataset:
    """Join CUB's four tables: class names, and file, class and split of each image."""
    remedy = published.remedy(base)
    names, files, class_numbers, in_train = (
        _read_table(base / f"{name}.txt", remedy)
        for name in ("classes", "images", "image_class_labels", "train_test_split")
    )
    train: ImagesByClass = {name: [] for name in names.values()}
    test: ImagesByClass = {name: [] for name in names.values()}
    for number, file in files.items():
        name = names.get(class_numbers.get(number, ""))
        if name is None or number not in in_train:
            raise OneaError(f"Image {number} ({file}) in {base / 'images.txt'} has no class or no split: {remedy}.")
        split = train if in_train[number] == "1" else test
        split[name].append(ImageFile(base / "images" / file, file))
    present = [sum(image.path.is_file() for images in split.values() for image in images) for split in (train, test)]
    counts = Counts(sum(bool(train[name] and test[name]) for name in train), sum(present), *present)
    if counts != published.counts:
        raise published.incomplete_error(base, published.counts, counts)
    return dataset_from_files(published.name, train, test)


def _read_table(path: Path, remedy: str) -> dict[str, str]:
    """The values of lines ``number value``, by number."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise OneaError(f"Cannot read {path}: {remedy}.") from None
    table: dict[str, str] = {}
    for index, line in enumerate(lines, start=1):
        number, _, value = line.strip().partition(" ")
        if number and not value:
            raise OneaError(f"Line {index} of {path} is not 'number value': {remedy}.")
        if number:
            table[number] = value
    return table
