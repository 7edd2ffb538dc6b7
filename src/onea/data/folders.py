# SPDX-License-Identifier: Apache-2.0
"""Datasets of the user's own: folders of class folders, and text files that list images with their labels."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

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

ENDINGS = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".heic", ".heif", ".hif", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".jp2", ".tga", ".qoi"),
)
# What file managers, disk stations and zips leave in folders of pictures.
_LITTER = ("thumbs.db", "desktop.ini", "@eadir", "__macosx")


class NoClassFoldersError(OneaError):
    """A folder without class folders, so that nothing says what its images show."""


@dataclass(frozen=True)
class ClassTree:
    """The images below one folder by class, and the class names by group when the layout has groups.

    Attributes:
        loose: files that lie beside class folders, in none of them.
    """

    images: ImagesByClass
    groups: dict[str, list[str]]
    loose: tuple[Path, ...] = ()


def load_folder(path: Path) -> Dataset:
    """Read ``train/`` and ``test/`` (or ``val/``) of class folders, or one folder of class folders.

    Without a test side about a fifth of each class is held out, chosen by file name alone. Class folders may lie in
    group folders (``<group>/<class>/<image>``): each group is then one natural task.

    Raises:
        OneaError: the layout is not one of these, a class is empty, or it is missing on one side.
    """
    check_path(path)
    if not path.is_dir():
        problem, kind = ("is a file, not a folder", OneaError) if path.exists() else ("does not exist", MissingData)
        raise kind(f"Dataset folder {path} {problem}: give folder:PATH with one folder of images for each class.")
    name = path.resolve().name
    sides = find_splits(path)
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
        OneaError: names the list and the line.
    """
    try:
        alone = Path(argument).expanduser().is_file()  # its name may hold a comma
    except OSError:  # too long for one name
        alone = False
    lists = [argument] if alone else argument.split(",")
    if len(lists) > 2 or not all(part.strip() for part in lists):
        raise OneaError(f"Cannot read 'list:{argument}': give list:TRAIN.txt or list:TRAIN.txt,TEST.txt.")
    paths = [Path(part.strip()).expanduser() for part in lists]
    sides = [read_list(path) for path in paths]
    if len(sides) == 1:
        return dataset_from_files(paths[0].stem, *split_by_class(sides[0]))
    _check_disjoint(*sides)
    check_same_classes(*sides, train_name=str(paths[0]), test_name=str(paths[1]))
    return dataset_from_files(paths[0].stem, *sides)


def find_splits(path: Path) -> tuple[Path, Path] | None:
    """The train and test folders in ``path``, or None where its folders are the classes themselves."""
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
    return None  # among other class folders, a class of trains


def read_tree(path: Path) -> ClassTree:
    """Read ``<class>/<image>`` or ``<group>/<class>/<image>`` below ``path``.

    Raises:
        NoClassFoldersError: there is not one folder in it.
        OneaError: the layout is neither, a class is empty, or a class is in two groups.
    """
    top = _list(path)
    inside = {folder: _list(folder) for folder in top.folders}
    if not inside:
        raise NoClassFoldersError(
            f"There are no class folders in {path}: make one folder for each class and put its images in."
        )
    if not any(listing.folders for listing in inside.values()):
        return ClassTree(
            {folder.name: _images(folder, listing, path) for folder, listing in inside.items()}, {}, top.files
        )
    _check_only_groups(inside)
    images: ImagesByClass = {}
    groups: dict[str, list[str]] = {}
    group_of: dict[str, str] = {}
    for group, listing in inside.items():
        for folder in listing.folders:
            label = folder.name
            if label in group_of:
                raise OneaError(
                    f"In {path} class '{label}' is in two tasks: {group_of[label]} and {group.name}; "
                    "rename one of the two folders, or put the images together in one."
                )
            group_of[label] = group.name
            groups.setdefault(group.name, []).append(label)
            images[label] = _images(folder, _list(folder), path)
    return ClassTree(images, groups, (*top.files, *(file for listing in inside.values() for file in listing.files)))


def read_list(path: Path) -> ImagesByClass:
    """Read one list of images, ``path label`` on each line; blank lines and lines that start with # do not count.

    Raises:
        OneaError: names the line that has no label, no such file, or a file that an earlier line has.
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
            raise OneaError(f"Line {number} of {path} repeats the file of line {line_of[file]}: remove one of the two.")
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
        # Not splitlines(): that also breaks at characters that a file name may hold.
        return path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise MissingData(f"There is no list file {path}: give list:TRAIN.txt or list:TRAIN.txt,TEST.txt.") from None
    except UnicodeDecodeError:
        raise OneaError(
            f"{path} is not a text file in UTF-8: save it as one, with 'path label' on each line."
        ) from None
    except OSError as error:
        raise OneaError(f"Cannot read the list {path}: {error.strerror}.") from None


def is_photo(name: str) -> bool:
    """Whether a file in a folder is taken for a photo: by its ending, or because it has none.

    >>> is_photo("IMG_1.HEIC"), is_photo("IMG_1.AAE"), is_photo("scan")
    (True, False, True)
    """
    ending = Path(name).suffix.lower()
    return not ending or ending in ENDINGS


def is_ignored(name: str) -> bool:
    """Whether a file or folder is nobody's photo: hidden, or left there by a program.

    >>> is_ignored(".DS_Store"), is_ignored("@eaDir"), is_ignored("Thumbs.db"), is_ignored("kiwi")
    (True, True, True, False)
    """
    return name.startswith(".") or name.lower() in _LITTER


@dataclass(frozen=True)
class _Listing:
    """What one folder holds, hidden entries and litter left out."""

    folders: tuple[Path, ...]
    files: tuple[Path, ...]


def _list(path: Path) -> _Listing:
    """List a folder once. Files count whatever their ending, and links to nowhere too, so that they get reported."""
    folders: list[Path] = []
    files: list[Path] = []
    try:
        with os.scandir(path) as entries:  # it knows folders from files without a look at each
            for entry in entries:
                if is_ignored(entry.name):
                    continue
                if entry.is_dir():
                    folders.append(path / entry.name)
                elif entry.is_file() or entry.is_symlink():
                    files.append(path / entry.name)
    except OSError as error:
        raise unreadable_folder(path, error) from None
    return _Listing(
        tuple(sorted(folders, key=lambda folder: natural_key(folder.name))),
        tuple(sorted(files, key=lambda file: natural_key(file.name))),
    )


def unreadable_folder(path: Path, error: OSError) -> OneaError:
    """What to tell a user whose folder cannot be looked into."""
    return OneaError(f"Cannot list the folder {path} ({error.strerror}); make it readable, or move it away.")


def _images(folder: Path, inside: _Listing, root: Path) -> list[ImageFile]:
    if inside.folders:
        raise OneaError(
            f"Class folder {folder} has folders in it ({inside.folders[0].name}): "
            "use <class>/<image> or <task>/<class>/<image> throughout."
        )
    if not inside.files:
        raise OneaError(f"Class folder {folder} is empty: put its images in, or remove the folder.")
    below = folder.relative_to(root).as_posix()
    return [ImageFile(file, f"{below}/{file.name}") for file in inside.files]


def _check_only_groups(inside: dict[Path, _Listing]) -> None:
    """Where one folder holds folders, all must, and no photos: half classes and half groups would be a guess."""
    for folder, listing in inside.items():
        photos = [file.name for file in listing.files if file.suffix.lower() in ENDINGS]
        if listing.folders and photos:
            raise OneaError(
                f"{folder} holds photos ({photos[0]}) and folders ({listing.folders[0].name}): put all images of a "
                "class into one folder, with no folder in it."
            )
    a_group = next(folder for folder, listing in inside.items() if listing.folders)
    for folder, listing in inside.items():
        if listing.files and not listing.folders:
            raise OneaError(
                f"{folder} holds files ({listing.files[0].name}) while {a_group} holds folders: "
                "use <class>/<image> or <task>/<class>/<image> throughout."
            )
        if not listing.folders:
            raise OneaError(f"Class folder {folder} is empty: put its images in, or remove the folder.")


def _check_same_groups(train: ClassTree, test: ClassTree, train_name: str, test_name: str) -> None:
    def by_class(tree: ClassTree) -> dict[str, str]:
        return {label: group for group, members in tree.groups.items() for label in members}

    in_train, in_test = by_class(train), by_class(test)
    for label in train.images:
        here, there = in_train.get(label, "no task"), in_test.get(label, "no task")
        if here != there:
            raise OneaError(
                f"Class '{label}' is in {here} under {train_name} but in {there} under {test_name}: "
                "use the same task folders on both sides."
            )


def _check_disjoint(train: ImagesByClass, test: ImagesByClass) -> None:
    trained = {image.path for members in train.values() for image in members}
    for members in test.values():
        for image in members:
            if image.path in trained:
                raise OneaError(f"{image.path} is in the training and in the test list: remove it from one of the two.")
