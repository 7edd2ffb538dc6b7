# SPDX-License-Identifier: Apache-2.0
"""Custom datasets: folders with one folder per class, and text files that list images with their labels."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from onea.data.dataset import (
    Dataset,
    ImageFile,
    ImagesByClass,
    MissingData,
    check_same_classes,
    dataset_from_files,
    natural_key,
    split_by_class,
)
from onea.errors import OneaError
from onea.files import check_path

EXTENSIONS = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".heic", ".heif", ".hif", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".jp2", ".tga", ".qoi"),
)
# Files and folders of file managers, network drives and zip tools.
_SYSTEM_FILES = ("thumbs.db", "desktop.ini", "@eadir", "__macosx")


class NoClassFoldersError(OneaError):
    """A folder without class folders, so that its images have no labels."""


@dataclass(frozen=True)
class ClassTree:
    """The images in a folder by class, and the class names by group if there are group folders.

    Attributes:
        loose: files next to class folders.
    """

    images: ImagesByClass
    groups: dict[str, list[str]]
    loose: tuple[Path, ...] = ()


def load_folder(path: Path) -> Dataset:
    """Read ``train/`` and ``test/`` (or ``val/``) of class folders, or one folder of class folders.

    Without a test split, about a fifth of each class is held out, chosen by file name. Class folders may be in group
    folders (``<group>/<class>/<image>``); each group is then a natural task.

    Raises:
        OneaError: the layout is different, or a class is empty or missing in one split.
    """
    check_path(path)
    if not path.is_dir():
        problem, kind = ("is a file, not a folder", OneaError) if path.exists() else ("does not exist", MissingData)
        raise kind(f"Dataset folder {path} {problem}: give folder:PATH with one folder of images for each class.")
    name = path.resolve().name
    sides = _find_splits(path)
    if sides is None:
        tree = read_tree(path)
        return dataset_from_files(name, *split_by_class(tree.images), groups=tree.groups)
    train, test = (read_tree(side) for side in sides)
    train_name, test_name = (f"{side.name}/" for side in sides)
    check_same_classes(train.images, test.images, train_name=train_name, test_name=test_name)
    _check_same_groups(train, test, train_name, test_name)
    return dataset_from_files(name, train.images, test.images, groups=train.groups)


def load_list(argument: str) -> Dataset:
    """Read ``TRAIN.txt`` or ``TRAIN.txt,TEST.txt``, each line ``path label``, paths relative to the list's folder.

    Raises:
        OneaError: a list cannot be read; the message names the line.
    """
    try:
        is_single_file = Path(argument).expanduser().is_file()  # file names may contain commas
    except OSError:  # too long for a file name
        is_single_file = False
    lists = [argument] if is_single_file else argument.split(",")
    if len(lists) > 2 or not all(part.strip() for part in lists):
        raise OneaError(f"Cannot read 'list:{argument}': give list:TRAIN.txt or list:TRAIN.txt,TEST.txt.")
    paths = [Path(part.strip()).expanduser() for part in lists]
    sides = [_read_list(path) for path in paths]
    if len(sides) == 1:
        return dataset_from_files(paths[0].stem, *split_by_class(sides[0]))
    _check_disjoint(*sides)
    check_same_classes(*sides, train_name=str(paths[0]), test_name=str(paths[1]))
    return dataset_from_files(paths[0].stem, *sides)


def _find_splits(path: Path) -> tuple[Path, Path] | None:
    """The train and test folders in ``path``, or None if its folders are the classes."""
    names = {folder.name for folder in _list(path).folders}
    if "train" not in names:
        return None
    for test in ("test", "val"):
        if test in names:
            return path / "train", path / test
    if names == {"train"}:
        raise OneaError(
            f"{path} has train/ but neither test/ nor val/: add one, or give {path / 'train'} itself to have about "
            "a fifth of each class held out."
        )
    return None  # "train" is one of the classes


def read_tree(path: Path) -> ClassTree:
    """Read ``<class>/<image>`` or ``<group>/<class>/<image>`` below ``path``.

    Raises:
        NoClassFoldersError: it contains no folders.
        OneaError: the layout is different, a class is empty, or a class is in two groups.
    """
    top = _list(path)
    inside = {folder: _list(folder) for folder in top.folders}
    if not inside:
        raise NoClassFoldersError(
            f"There are no class folders in {path}: make one folder for each class and put its images there."
        )
    if not any(listing.folders for listing in inside.values()):
        return ClassTree(
            {folder.name: _images(folder, listing, path) for folder, listing in inside.items()}, {}, (*top.files,)
        )
    _check_only_groups(inside)
    images: ImagesByClass = {}
    groups: dict[str, list[str]] = {}
    for group, listing in inside.items():
        for folder in listing.folders:
            label = folder.name
            if label in images:
                other = next(name for name, members in groups.items() if label in members)
                raise OneaError(
                    f"In {path}, class '{label}' is in two tasks, {other} and {group.name}: "
                    "rename one of the two folders, or put all images into one of them."
                )
            groups.setdefault(group.name, []).append(label)
            images[label] = _images(folder, _list(folder), path)
    return ClassTree(images, groups, (*top.files, *(file for listing in inside.values() for file in listing.files)))


def _read_list(path: Path) -> ImagesByClass:
    """Read a list of images, ``path label`` on each line; blank lines and comments (#) are skipped.

    Raises:
        OneaError: a line has no label, a missing file, or a file of an earlier line.
    """
    images: ImagesByClass = {}
    line_of: dict[Path, int] = {}
    for number, line in enumerate(_lines(path), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        fields = text.rsplit(maxsplit=1)
        if len(fields) < 2:
            raise OneaError(f"Line {number} of {path} has no label: write 'path label', for example 'cats/1.jpg cat'.")
        name, label = fields
        file = path.parent / Path(name).expanduser()
        if not file.is_file():
            raise OneaError(f"Line {number} of {path}: there is no file {file}; correct the line or remove it.")
        if file in line_of:
            raise OneaError(
                f"Line {number} of {path} lists the same file as line {line_of[file]}: remove one of the two."
            )
        line_of[file] = number
        images.setdefault(label, []).append(ImageFile(file, name))
    if not images:
        raise OneaError(f"{path} lists no images: write one 'path label' on each line.")
    return images


def _lines(path: Path) -> list[str]:
    check_path(path)
    if path.is_char_device():
        raise OneaError(f"{path} is a device, not a text file: give list:TRAIN.txt or list:TRAIN.txt,TEST.txt.")
    try:
        # Not splitlines(), which also splits at characters that file names may contain.
        return path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise MissingData(f"There is no list file {path}: give list:TRAIN.txt or list:TRAIN.txt,TEST.txt.") from None
    except UnicodeDecodeError:
        raise OneaError(f"{path} is not a UTF-8 text file: save it as one, with 'path label' on each line.") from None
    except OSError as error:
        raise OneaError(f"Cannot read the list {path}: {error.strerror}.") from None


def is_photo(name: str) -> bool:
    """Whether a file in a folder counts as a photo: it has an image extension or none.

    >>> is_photo("IMG_1.HEIC"), is_photo("IMG_1.AAE"), is_photo("scan")
    (True, False, True)
    """
    extension = Path(name).suffix.lower()
    return not extension or extension in EXTENSIONS


def is_ignored(name: str) -> bool:
    """Whether to ignore a file or folder: hidden, or created by the system.

    >>> is_ignored(".DS_Store"), is_ignored("@eaDir"), is_ignored("Thumbs.db"), is_ignored("kiwi")
    (True, True, True, False)
    """
    return name.startswith(".") or name.lower() in _SYSTEM_FILES


class _Listing(NamedTuple):
    """The folders and files in a folder, without hidden and system files."""

    folders: list[Path]
    files: list[Path]


def _list(path: Path) -> _Listing:
    """List a folder; includes files of any extension and dangling links, so that they are reported."""
    listing = _Listing([], [])
    try:
        with os.scandir(path) as entries:  # needs no stat for each entry
            for entry in sorted(entries, key=lambda entry: natural_key(entry.name)):
                if is_ignored(entry.name):
                    continue
                if entry.is_dir():
                    listing.folders.append(path / entry.name)
                elif entry.is_file() or entry.is_symlink():
                    listing.files.append(path / entry.name)
    except OSError as error:
        raise unreadable_folder(path, error) from None
    return listing


def unreadable_folder(path: Path, error: OSError) -> OneaError:
    """The error for a folder that cannot be listed."""
    return OneaError(f"Cannot list the folder {path} ({error.strerror}); make it readable, or move it away.")


def _images(folder: Path, inside: _Listing, root: Path) -> list[ImageFile]:
    if inside.folders:
        raise OneaError(
            f"Class folder {folder} contains folders ({inside.folders[0].name}): "
            "use <class>/<image> or <task>/<class>/<image> throughout."
        )
    if not inside.files:
        raise OneaError(f"Class folder {folder} is empty: add its images, or remove the folder.")
    below = folder.relative_to(root).as_posix()
    return [ImageFile(file, f"{below}/{file.name}") for file in inside.files]


def _check_only_groups(inside: dict[Path, _Listing]) -> None:
    """If one folder contains folders, all must contain folders and no photos: otherwise the layout is ambiguous."""
    for folder, listing in inside.items():
        photos = [file.name for file in listing.files if file.suffix.lower() in EXTENSIONS]
        if listing.folders and photos:
            raise OneaError(
                f"{folder} contains both photos ({photos[0]}) and folders ({listing.folders[0].name}): put all "
                "images of a class into one folder, without subfolders."
            )
    group = next(folder for folder, listing in inside.items() if listing.folders)
    for folder, listing in inside.items():
        if listing.files and not listing.folders:
            raise OneaError(
                f"{folder} contains files ({listing.files[0].name}) while {group} contains folders: "
                "use <class>/<image> or <task>/<class>/<image> throughout."
            )
        if not listing.folders:
            raise OneaError(f"Class folder {folder} is empty: add its images, or remove the folder.")


def _check_same_groups(train: ClassTree, test: ClassTree, train_name: str, test_name: str) -> None:
    def by_class(tree: ClassTree) -> dict[str, str]:
        return {label: group for group, members in tree.groups.items() for label in members}

    train_groups, test_groups = by_class(train), by_class(test)
    for label in train.images:
        train_group, test_group = train_groups.get(label, "no task"), test_groups.get(label, "no task")
        if train_group != test_group:
            raise OneaError(
                f"Class '{label}' is in {train_group} under {train_name} but in {test_group} under {test_name}: "
                "use the same task folders on both sides."
            )


def _check_disjoint(train: ImagesByClass, test: ImagesByClass) -> None:
    train_paths = {image.path for members in train.values() for image in members}
    for image in chain.from_iterable(test.values()):
        if image.path in train_paths:
            raise OneaError(f"{image.path} is in the training and in the test list: remove it from one of the two.")
