# SPDX-License-Identifier: Apache-2.0
"""Every dataset by its name on the command line: ``cifar100``, ``folder:PATH``, ``list:TRAIN.txt,TEST.txt``..."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from onea.data.dataset import Dataset
from onea.errors import OneaError, did_you_mean, truncate
from onea.registry import Registry


@dataclass(frozen=True)
class Request:
    """The arguments of a loader.

    Attributes:
        argument: what follows the colon, empty without one.
        root: the folder published datasets are looked for in.
        cache: where a loader may keep what it made; None to keep nothing.
        fetch: whether a loader may download what is missing.
    """

    argument: str
    root: Path
    cache: Path | None
    fetch: bool = True


@dataclass(frozen=True)
class DatasetInfo:
    """One line of the list of datasets.

    Attributes:
        usage: how to write it, for example ``folder:PATH``.
        takes_path: whether the name must be followed by a colon and a path.
    """

    usage: str
    description: str
    load: Callable[[Request], Dataset]
    takes_path: bool = False


def load_dataset(spec: str, *, root: Path | None = None, cache: Path | None = None, fetch: bool = True) -> Dataset:
    """Load a dataset by name. Images in files are only listed here, not read.

    >>> glyphs = load_dataset("glyphs-mini")
    >>> len(glyphs.classes), len(glyphs.train), glyphs.groups[0].name
    (50, 600, 'suits')

    Args:
        spec: a name in ``DATASETS``, with ``:PATH`` where its usage has one.
        root: the folder that holds published datasets; by default ``$ONEA_DATA``, else ``./data``.
        cache: where generated datasets are kept between calls; by default they are not.
        fetch: whether what is missing may be downloaded.

    Raises:
        MissingData: there is nothing where the data should be.
        OneaError: the name is unknown, or the data is incomplete or laid out in another way.
    """
    name, colon, argument = spec.partition(":")
    if name not in DATASETS.names:
        raise OneaError(f"Unknown dataset '{truncate(spec)}'; {_hint(spec, name)}")
    info: DatasetInfo = DATASETS.load(name)
    if info.takes_path and not argument.strip():
        raise OneaError(f"Dataset '{spec}' needs a path: write {info.usage}.")
    if colon and not info.takes_path:
        raise OneaError(f"Dataset '{name}' takes no path: write {info.usage}, and set ONEA_DATA to where the data is.")
    return info.load(Request(argument, root if root is not None else default_root(), cache, fetch))


def default_root() -> Path:
    """The folder that published datasets are looked for in: ``$ONEA_DATA``, else ``./data``."""
    return Path(os.environ.get("ONEA_DATA") or "data").expanduser()


def _hint(spec: str, name: str) -> str:
    path = Path(spec).expanduser()
    with suppress(OSError):  # too long for a path
        if path.is_dir():
            return f"did you mean 'folder:{spec}'?"
        if path.is_file():
            return f"did you mean 'list:{spec}'?"
    return did_you_mean(name, DATASETS.names)


# The loaders import what they need when they are called: listing the names must not import torchvision.
def _folder(request: Request) -> Dataset:
    from onea.data.folders import load_folder

    return load_folder(Path(request.argument).expanduser())


def _list(request: Request) -> Dataset:
    from onea.data.folders import load_list

    return load_list(request.argument)


def _cifar100(request: Request) -> Dataset:
    from onea.research.data.cifar import load_cifar100

    return load_cifar100(request.root, fetch=request.fetch)


def _cub200(request: Request) -> Dataset:
    from onea.research.data.published import load_cub200

    return load_cub200(request.root)


def _imagenet_a(request: Request) -> Dataset:
    from onea.research.data.published import IMAGENET_A, load_imagenet_variant

    return load_imagenet_variant(request.root, IMAGENET_A)


def _imagenet_r(request: Request) -> Dataset:
    from onea.research.data.published import IMAGENET_R, load_imagenet_variant

    return load_imagenet_variant(request.root, IMAGENET_R)


def _glyphs(request: Request) -> Dataset:
    from onea.data.glyphs import load_glyphs

    return load_glyphs("glyphs", request.cache)


def _glyphs_mini(request: Request) -> Dataset:
    from onea.data.glyphs import load_glyphs

    return load_glyphs("glyphs-mini", request.cache)


_OWN = {
    "folder": DatasetInfo(
        "folder:PATH",
        "your images: <class>/<image>, with train/ and test/ or without, or in task folders",
        _folder,
        True,
    ),
    "list": DatasetInfo("list:TRAIN.txt[,TEST.txt]", "your images: text files with 'path label' lines", _list, True),
    "cifar100": DatasetInfo("cifar100", "CIFAR-100: 100 classes, 50,000 + 10,000 images of 32 x 32", _cifar100),
    "cub200": DatasetInfo("cub200", "CUB-200-2011: 200 bird species, 5,994 + 5,794 photographs", _cub200),
    "imagenet-a": DatasetInfo("imagenet-a", "ImageNet-A: 200 classes, 7,500 hard photographs", _imagenet_a),
    "imagenet-r": DatasetInfo("imagenet-r", "ImageNet-R: 200 classes, 30,000 renditions", _imagenet_r),
    "glyphs": DatasetInfo("glyphs", "drawn characters in tasks of unequal size, generated here", _glyphs),
    "glyphs-mini": DatasetInfo("glyphs-mini", "a small glyphs for trying things out", _glyphs_mini),
}

DATASETS = Registry("dataset", "onea.datasets", _OWN)
"""Every dataset that ``load_dataset`` knows, by name; installed packages add a ``DatasetInfo`` by entry point."""
