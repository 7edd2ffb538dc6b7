# SPDX-License-Identifier: Apache-2.0
"""Datasets by their names on the command line, such as ``cifar100``, ``folder:PATH`` or ``list:TRAIN.txt,TEST.txt``."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onea.data.dataset import Dataset
from onea.data.folders import load_folder, load_list
from onea.errors import OneaError, did_you_mean, truncate
from onea.registry import Registry
from onea.research.data.cifar import load_cifar100
from onea.research.data.published import IMAGENET_A, IMAGENET_R, load_cub200, load_imagenet_variant


@dataclass(frozen=True)
class Request:
    """The arguments of a loader.

    Attributes:
        argument: text after the colon; empty without one.
        root: folder of published datasets.
        cache: folder for generated images; None for no cache.
        download: whether a missing dataset may be downloaded.
    """

    argument: str
    root: Path
    cache: Path | None
    download: bool = True


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset in the list of datasets.

    Attributes:
        usage: its name as an argument, such as ``folder:PATH``.
        description: one line.
        load: the loader.
        takes_path: whether a colon and a path must follow the name.
    """

    usage: str
    description: str
    load: Callable[[Request], Dataset]
    takes_path: bool = False


def load_dataset(spec: str, *, root: Path | None = None, cache: Path | None = None, download: bool = True) -> Dataset:
    """Load a dataset by name. Image files are listed, but not read.

    >>> glyphs = load_dataset("glyphs-mini")
    >>> len(glyphs.classes), len(glyphs.train), glyphs.groups[0].name
    (50, 600, 'suits')

    Args:
        spec: a name in ``DATASETS``, with ``:PATH`` where its usage has one.
        root: folder of published datasets; by default ``$ONEA_DATA``, else ``./data``.
        cache: folder for generated images; by default they are not cached.
        download: whether a missing dataset may be downloaded.

    Raises:
        MissingData: the dataset does not exist.
        OneaError: the name is unknown, or the dataset is incomplete or has another layout.
    """
    name, colon, argument = spec.partition(":")
    if name not in DATASETS.names:
        raise OneaError(f"Unknown dataset '{truncate(spec)}'; {_hint(spec, name)}")
    info: DatasetInfo = DATASETS.load(name)
    if info.takes_path and not argument.strip():
        raise OneaError(f"Dataset '{spec}' needs a path: write {info.usage}.")
    if colon and not info.takes_path:
        raise OneaError(
            f"Dataset '{name}' takes no path: write {info.usage}, and set ONEA_DATA to the folder that contains it."
        )
    return info.load(Request(argument, root if root is not None else default_root(), cache, download))


def default_root() -> Path:
    """The folder of published datasets: ``$ONEA_DATA``, else ``./data``."""
    return Path(os.environ.get("ONEA_DATA") or "data").expanduser()


def _hint(spec: str, name: str) -> str:
    path = Path(spec).expanduser()
    with suppress(OSError):  # too long for a path
        if path.is_dir():
            return f"did you mean 'folder:{spec}'?"
        if path.is_file():
            return f"did you mean 'list:{spec}'?"
    return did_you_mean(name, DATASETS.names)


def _load_glyphs(request: Request, name: str = "glyphs") -> Dataset:
    from onea.data.glyphs import load_glyphs  # imports Pillow, which is not needed to list the datasets

    return load_glyphs(name, request.cache)


_BUILT_IN = {
    "folder": DatasetInfo(
        "folder:PATH",
        "your images: <class>/<image>, optionally below train/ and test/, or below task folders",
        lambda request: load_folder(Path(request.argument).expanduser()),
        takes_path=True,
    ),
    "list": DatasetInfo(
        "list:TRAIN.txt[,TEST.txt]",
        "your images: text files with 'path label' lines",
        lambda request: load_list(request.argument),
        takes_path=True,
    ),
    "cifar100": DatasetInfo(
        "cifar100",
        "CIFAR-100: 100 classes, 50,000 + 10,000 images of 32 x 32",
        lambda request: load_cifar100(request.root, download=request.download),
    ),
    "cub200": DatasetInfo(
        "cub200",
        "CUB-200-2011: 200 bird species, 5,994 + 5,794 photographs",
        lambda request: load_cub200(request.root),
    ),
    "imagenet-a": DatasetInfo(
        "imagenet-a",
        "ImageNet-A: 200 classes, 7,500 hard photographs",
        lambda request: load_imagenet_variant(request.root, IMAGENET_A),
    ),
    "imagenet-r": DatasetInfo(
        "imagenet-r",
        "ImageNet-R: 200 classes, 30,000 renditions",
        lambda request: load_imagenet_variant(request.root, IMAGENET_R),
    ),
    "glyphs": DatasetInfo("glyphs", "generated images of characters, in tasks of unequal size", _load_glyphs),
    "glyphs-mini": DatasetInfo(
        "glyphs-mini", "a small version of glyphs for quick experiments", partial(_load_glyphs, name="glyphs-mini")
    ),
}

DATASETS = Registry("dataset", "onea.datasets", _BUILT_IN)
"""The datasets of ``load_dataset`` by name; installed packages add a ``DatasetInfo`` by entry point."""
