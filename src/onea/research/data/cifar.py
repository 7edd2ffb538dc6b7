# SPDX-License-Identifier: Apache-2.0
"""CIFAR-100, which is published as pickles: read without running what a pickle can ask for."""

from __future__ import annotations

import http.client
import pickle
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from onea.data.dataset import Dataset, MissingData, Split, fingerprint_of_pixels
from onea.errors import OneaError, truncate

Pixels = npt.NDArray[np.uint8]
_SHAPE, _CLASSES = (3, 32, 32), 100
_META, _TRAIN, _TEST = "meta", "train", "test"


def load_cifar100(root: Path, *, fetch: bool = True) -> Dataset:
    """CIFAR-100 from ``root``, fetched there first where it is missing and a network is at hand.

    Raises:
        MissingData: it is missing and cannot be, or is not to be, fetched; says which file to put where.
        OneaError: a file holds something else.
    """
    from torchvision.datasets import CIFAR100
    from torchvision.datasets.utils import check_integrity, download_and_extract_archive

    folder, known = root / CIFAR100.base_folder, _known_files()

    def is_here() -> bool:
        return all(check_integrity(str(folder / name), md5) for name, md5 in known.items())

    if not is_here():
        try:
            if not fetch:
                raise RuntimeError("Dataset not found or corrupted")
            download_and_extract_archive(CIFAR100.url, str(root), filename=CIFAR100.filename, md5=CIFAR100.tgz_md5)
        except (OSError, RuntimeError, EOFError, http.client.HTTPException, tarfile.TarError) as error:
            raise MissingData(
                f"CIFAR-100 is not in {root} and could not be downloaded ({_one_line(error)}): get {CIFAR100.filename} "
                f"from https://www.cs.toronto.edu/~kriz/cifar.html and put it into {root}, where its md5 is checked "
                "and it is unpacked."
            ) from error
    classes = read_classes(folder / _META)
    return cifar_dataset("cifar100", classes, read_images(folder / _TRAIN), read_images(folder / _TEST))


def cifar_dataset(
    name: str, classes: Sequence[str], train: tuple[Pixels, Sequence[int]], test: tuple[Pixels, Sequence[int]]
) -> Dataset:
    """Build a dataset from ``uint8 [N, 3, H, W]`` images and labels."""
    train_split, test_split = (
        Split(labels=np.asarray(labels, dtype=np.int64), pixels=np.ascontiguousarray(images))
        for images, labels in (train, test)
    )
    fingerprint = fingerprint_of_pixels(classes, train_split, test_split)
    return Dataset(name, tuple(classes), train_split, test_split, fingerprint)


def read_classes(path: Path) -> list[str]:
    """The names of the fine classes."""
    names = _read(path).get(b"fine_label_names")
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise _damaged(path, "it has no names of classes")
    return [name.decode("ascii", "replace") for name in names]


def read_images(path: Path) -> tuple[Pixels, list[int]]:
    """Images ``[N, 3, 32, 32]`` and the fine label of each."""
    found = _read(path)
    images, labels = found.get(b"data"), found.get(b"fine_labels")
    if not (isinstance(images, _Array) and isinstance(labels, list) and all(map(_is_label, labels))):
        raise _damaged(path, "it has no images and labels")
    try:
        return images.values().reshape(len(labels), *_SHAPE), labels
    except (OverflowError, TypeError, ValueError) as error:
        raise _damaged(path, _one_line(error)) from error


def _is_label(label: object) -> bool:
    return type(label) is int and 0 <= label < _CLASSES


def _known_files() -> dict[str, str]:
    """The md5 of each file, by its name."""
    from torchvision.datasets import CIFAR100

    return dict([*CIFAR100.train_list, *CIFAR100.test_list, (CIFAR100.meta["filename"], CIFAR100.meta["md5"])])


class _Type:
    """Stands for ``numpy.dtype``; of its states, which decide how memory is read, only that of bytes is taken."""

    def __init__(self, name: object, *_: object) -> None:
        if name not in ("u1", b"u1"):
            raise pickle.UnpicklingError("an array in it has numbers other than bytes")

    def __setstate__(self, state: object) -> None:
        """A type of one byte has no state that matters."""


class _Array:
    """Stands for ``numpy.ndarray``: what is noted about one, without numpy."""

    def __init__(self, *_: object) -> None:
        self._shape: Any = (0,)
        self._by_columns, self._content = False, b""

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), tuple(shape), _Type(), bool(by_columns), bytes(content)):
                self._shape, self._by_columns, self._content = shape, by_columns, content
            case _:
                raise pickle.UnpicklingError("an array in it is not one of bytes")

    def values(self) -> Pixels:
        """The array."""
        order: Literal["F", "C"] = "F" if self._by_columns else "C"
        return np.frombuffer(self._content, np.uint8).reshape(self._shape, order=order).copy()


_STAND_INS: Mapping[tuple[str, str], type] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
}


class _Reader(pickle.Unpickler):
    """Makes text, numbers, lists, dictionaries and arrays of bytes; anything else that a pickle names is refused."""

    def find_class(self, module: str, name: str) -> type:
        """The stand-in for a class of numpy."""
        if found := _STAND_INS.get((module, name)):
            return found
        raise pickle.UnpicklingError(f"it asks for {truncate(module)}.{truncate(name)}")


def _read(path: Path) -> dict[Any, Any]:
    try:
        with path.open("rb") as file:
            found = _Reader(file, encoding="bytes").load()
    except Exception as error:  # a pickle that nobody made by pickling can fail in any way
        raise _damaged(path, _one_line(error)) from error
    if not isinstance(found, dict):
        raise _damaged(path, "it is no dictionary")
    return found


def _damaged(path: Path, reason: str) -> OneaError:
    return OneaError(f"{path} is not a file of CIFAR-100 ({reason}); delete it and unpack the archive again.")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
