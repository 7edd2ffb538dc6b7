# SPDX-License-Identifier: Apache-2.0
"""CIFAR-100, whose files are pickles, read by an unpickler that runs no code."""

from __future__ import annotations

import http.client
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from onea.data.dataset import Dataset, MissingData, Split, fingerprint_of_pixels
from onea.errors import OneaError, truncate

Pixels = npt.NDArray[np.uint8]
_SHAPE, _CLASSES = (3, 32, 32), 100


def load_cifar100(root: Path, *, download: bool = True) -> Dataset:
    """CIFAR-100 from ``root``; it is downloaded there if it is missing.

    Raises:
        MissingData: it is missing and cannot or must not be downloaded.
        OneaError: a file is damaged.
    """
    from torchvision.datasets import CIFAR100
    from torchvision.datasets.utils import check_integrity, download_and_extract_archive

    folder = root / CIFAR100.base_folder
    if not all(check_integrity(str(folder / name), md5) for name, md5 in _md5_by_file().items()):
        try:
            if not download:
                raise RuntimeError("Dataset not found or corrupted")
            download_and_extract_archive(CIFAR100.url, str(root), filename=CIFAR100.filename, md5=CIFAR100.tgz_md5)
        except (OSError, RuntimeError, EOFError, http.client.HTTPException, tarfile.TarError) as error:
            raise MissingData(
                f"CIFAR-100 is not in {root} and could not be downloaded ({_one_line(error)}): get {CIFAR100.filename} "
                f"from https://www.cs.toronto.edu/~kriz/cifar.html and put it into {root}, where its MD5 is checked "
                "and it is unpacked."
            ) from error
    return cifar_dataset(
        "cifar100", read_classes(folder / "meta"), read_images(folder / "train"), read_images(folder / "test")
    )


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
        raise _damaged(path, "it has no class names")
    return [name.decode("ascii", "replace") for name in names]


def read_images(path: Path) -> tuple[Pixels, list[int]]:
    """Images ``[N, 3, 32, 32]`` and the fine label of each."""
    content = _read(path)
    images, labels = content.get(b"data"), content.get(b"fine_labels")
    if not (isinstance(images, _Array) and isinstance(labels, list) and all(map(_is_label, labels))):
        raise _damaged(path, "it has no images and labels")
    try:
        return images.to_numpy().reshape(len(labels), *_SHAPE), labels
    except (OverflowError, TypeError, ValueError) as error:
        raise _damaged(path, _one_line(error)) from error


def _is_label(value: object) -> bool:
    return type(value) is int and 0 <= value < _CLASSES


def _md5_by_file() -> dict[str, str]:
    """The md5 of each file, by its name."""
    from torchvision.datasets import CIFAR100

    return dict([*CIFAR100.train_list, *CIFAR100.test_list, (CIFAR100.meta["filename"], CIFAR100.meta["md5"])])


class _DType:
    """Replaces ``numpy.dtype`` in a pickle; only bytes are allowed."""

    def __init__(self, name: object, *_: object) -> None:
        if name not in ("u1", b"u1"):
            raise pickle.UnpicklingError("an array in it does not consist of bytes")

    def __setstate__(self, state: object) -> None:
        """Ignore the state, which a type of one byte does not need."""


class _Array:
    """Replaces ``numpy.ndarray`` in a pickle; its content is checked before NumPy reads it."""

    def __init__(self, *_: object) -> None:
        self._shape: Any = (0,)
        self._order: Literal["F", "C"] = "C"
        self._content = b""

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), tuple(shape), _DType(), bool(is_fortran), bytes(content)):
                self._shape, self._order, self._content = shape, "F" if is_fortran else "C", content
            case _:
                raise pickle.UnpicklingError("an array in it does not consist of bytes")

    def to_numpy(self) -> Pixels:
        return np.frombuffer(self._content, np.uint8).reshape(self._shape, order=self._order).copy()


_REPLACEMENTS: dict[tuple[str, str], type] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
}


class _Unpickler(pickle.Unpickler):
    """Reads text, numbers, lists, dictionaries and arrays of bytes; any other class or function is refused."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _REPLACEMENTS:
            raise pickle.UnpicklingError(f"it refers to {truncate(module)}.{truncate(name)}")
        return _REPLACEMENTS[module, name]


def _read(path: Path) -> dict[Any, Any]:
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except Exception as error:  # a damaged or malicious pickle can raise anything
        raise _damaged(path, _one_line(error)) from error
    if not isinstance(content, dict):
        raise _damaged(path, "it is not a dictionary")
    return content


def _damaged(path: Path, reason: str) -> OneaError:
    return OneaError(f"{path} is not a file of CIFAR-100 ({reason}); delete it and unpack the archive again.")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
