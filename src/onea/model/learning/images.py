# SPDX-License-Identifier: Apache-2.0
"""Input images: folders, files, Pillow images, arrays, tensors, datasets and loaders as square uint8 images."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from torch import Tensor

from onea.data.dataset import Pixels, natural_key
from onea.data.decode import BadImage, fit, read_image, upright_rgb
from onea.data.file_checks import OnBad, describe_unreadable, map_threaded
from onea.data.folders import ClassTree, NoClassFoldersError, is_ignored, is_photo, read_tree, unreadable_folder
from onea.errors import OneaError
from onea.model.names import class_name, is_integer
from onea.runtime import NO_PROGRESS, Progress

CLASS_FOLDERS = "one folder of images for each class"
Purpose = Literal["learn", "evaluate", "score"]
_IMAGE_COLUMNS, _LABEL_COLUMNS = ("image", "img", "images"), ("label", "labels", "fine_label", "class")


@dataclass(frozen=True)
class DecodedImages:
    """Decoded images.

    Attributes:
        pixels: ``uint8 [N, 3, size, size]``.
        labels: the class name of each image; None without labels.
        names: names of the images: paths or numbers.
        skipped: ``path: reason`` of each image that could not be read.
        integer_labels: whether all labels are whole numbers.
        ignored_files: files without the ending of an image, or outside the class folders.
        group_folders: subfolders that contain class folders.
        fingerprints: fingerprints of the photos, ``int64 [N, 2]``, if they are not computed from the pixels.
        copies: the number of images, the last ones, that are stored copies of earlier photos.
    """

    pixels: Pixels
    labels: tuple[str, ...] | None
    names: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    integer_labels: bool = False
    ignored_files: tuple[str, ...] = ()
    group_folders: tuple[str, ...] = ()
    fingerprints: Tensor | None = None
    copies: int = 0

    def __len__(self) -> int:
        return len(self.pixels)


def read_labelled(
    images: Any,
    labels: Any,
    size: int,
    on_bad: OnBad | None = "fail",
    progress: Progress = NO_PROGRESS,
    purpose: Purpose = "learn",
) -> DecodedImages:
    """Read labelled images: a folder of class folders, a dataset or loader, or images and their labels.

    Error messages suggest ``on_bad="skip"`` unless ``on_bad`` is None, and name the calling method, ``purpose``.
    """
    ignored_files: tuple[str, ...] = ()
    group_folders: tuple[str, ...] = ()
    if labels is None and isinstance(images, str | os.PathLike):
        items, label_values, ignored_files, group_folders = _from_folder(Path(images), purpose)
    elif labels is None:
        items, label_values = _labelled_source(images, purpose)
    else:
        items, label_values = list(_items(images)), _to_list(labels)
        if len(items) != len(label_values):
            raise OneaError(
                f"There are {len(items)} images but {len(label_values)} labels; give one label for each image."
            )
    if not items:
        learning = "learn from; give at least two for each new class"
        raise OneaError(f"There are no images to {learning if purpose == 'learn' else f'{purpose}; give some'}.")
    names = [class_name(label) for label in label_values]
    decoded = _decode(items, names, size, on_bad, progress)
    return replace(
        decoded,
        integer_labels=all(map(is_integer, label_values)),
        ignored_files=ignored_files,
        group_folders=group_folders,
    )


def read_unlabelled(
    images: Any, size: int, on_bad: OnBad | None = "fail", progress: Progress = NO_PROGRESS
) -> DecodedImages:
    """Read images without labels: a folder (all images below it), paths, bytes, Pillow images, arrays or a dataset."""
    return _decode(list(_items(images)), None, size, on_bad, progress)


def check_folder(path: Path, contents: str) -> None:
    """Refuse a path that is not a folder; the message describes the ``contents`` that it should have."""
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise OneaError(f"{path} {problem}; give a folder with {contents}.")


def find_images(path: Path) -> list[Path]:
    """All image files below a folder, in natural order and without hidden ones; or the path, if it is a file."""
    if not path.is_dir():
        return [path]
    images: list[Path] = []
    visited: set[str] = set()  # to stop at cycles of links
    for folder, folders, files in os.walk(path, onerror=_raise_unreadable, followlinks=True):
        if (resolved := os.path.realpath(folder)) in visited:
            folders.clear()
            continue
        visited.add(resolved)
        folders[:] = sorted((name for name in folders if not is_ignored(name)), key=natural_key)
        photos = (name for name in files if is_photo(name) and not is_ignored(name))
        images.extend(Path(folder) / name for name in sorted(photos, key=natural_key))
    if not images:
        raise OneaError(f"There are no images below {path}; give image files, or a folder that contains some.")
    return images


def _raise_unreadable(error: OSError) -> None:
    raise unreadable_folder(Path(error.filename), error) from error


def _labelled_source(source: Any, purpose: Purpose) -> tuple[list[Any], list[Any]]:
    if columns := _columns(source):
        image, label, names = columns
        if label is None:
            raise OneaError(f"The dataset has no label column (it has {', '.join(source.column_names)}); give labels.")
        return [row[image] for row in source], [_label_name(row[label], names) for row in source]
    pairs = list(_pairs(source, purpose))
    names = getattr(getattr(source, "dataset", source), "classes", None)
    return [image for image, _ in pairs], [_label_name(label, names) for _, label in pairs]


def _from_folder(path: Path, purpose: Purpose) -> tuple[list[Any], list[str], tuple[str, ...], tuple[str, ...]]:
    """Photos in class folders, their classes, ignored files, and group folders."""
    check_folder(path, f"{CLASS_FOLDERS}, or give labels too")
    tree = _class_tree(path, purpose)
    files = [(image.path, label) for label, images in tree.images.items() for image in images]
    photos = [(file, label) for file, label in files if is_photo(file.name)]
    if empty := [label for label in tree.images if label not in {label for _, label in photos}]:
        raise OneaError(f"Class folder {empty[0]} in {path} contains no photos: add its images, or remove the folder.")
    other_files = [file for file, _ in files if not is_photo(file.name)]
    ignored = tuple(map(str, [*other_files, *tree.loose]))
    return [file for file, _ in photos], [label for _, label in photos], ignored, tuple(tree.groups)


def _class_tree(path: Path, purpose: Purpose) -> ClassTree:
    try:
        return read_tree(path)
    except NoClassFoldersError as error:
        if purpose == "learn":
            raise
        raise OneaError(
            f"There are no class folders in {path}, so the images have no class: put the images of each "
            f"class into a folder with its name, such as {path / 'apple'}."
        ) from error


def _items(source: Any) -> Iterator[Any]:
    """The images of a source: paths, bytes, Pillow images or arrays ``[H, W(, channels)]``."""
    if isinstance(source, str | os.PathLike):
        yield from find_images(Path(source))
    elif isinstance(source, bytes | Image.Image):
        yield source
    elif is_array(source):
        yield from _items(np.ravel(source).tolist()) if is_object_array(source) else iterate_images(source)
    elif columns := _columns(source):
        yield from (row[columns[0]] for row in source)
    elif isinstance(source, list | tuple):
        for item in source:
            yield from _items(item) if isinstance(item, str | os.PathLike) or is_array(item) else [item]
    elif isinstance(source, Iterator):
        for item in source:
            yield from (image for image, _ in _pairs([item])) if _is_pair(item) else _items([item])
    elif isinstance(source, Iterable) or hasattr(source, "__getitem__"):
        yield from (image for image, _ in _pairs(source))
    else:
        raise _unreadable_source(source)


def _pairs(source: Any, purpose: Purpose = "learn") -> Iterator[tuple[Any, Any]]:
    """Image and label pairs of a loader (batches) or a dataset (single images)."""
    if not (isinstance(source, Iterable) or hasattr(source, "__getitem__")):
        raise _unreadable_source(source)
    for pair in source if isinstance(source, Iterable) else (source[i] for i in range(len(source))):
        if not _is_pair(pair):
            raise OneaError(
                f"Labels are missing: give {purpose}(images, labels), a folder of class folders, or (image, label) "
                "pairs."
            )
        images, labels = pair
        batch_images = list(_items(images))
        is_batch = isinstance(labels, list | tuple) or (
            is_array(labels) and not isinstance(labels, str)
        )  # not a NumPy string
        batch_labels = _to_list(labels) if is_batch else [labels]
        if len(batch_images) != len(batch_labels):
            raise OneaError(
                f"A batch has {len(batch_images)} images but {len(batch_labels)} labels; give one label for each image."
            )
        yield from zip(batch_images, batch_labels, strict=True)


def _is_pair(item: Any) -> bool:
    return isinstance(item, list | tuple) and len(item) == 2


def _columns(source: Any) -> tuple[str, str | None, Sequence[str] | None] | None:
    """Image column, label column and class names of a Hugging Face dataset; None for anything else."""
    features, columns = getattr(source, "features", None), getattr(source, "column_names", None)
    if features is None or not isinstance(columns, list):
        return None
    kinds = {name: type(features[name]).__name__ for name in columns}
    image = next((n for n in columns if kinds[n] == "Image"), next((n for n in _IMAGE_COLUMNS if n in columns), None))
    if image is None:
        raise OneaError(f"The dataset has no image column (it has {', '.join(columns)}); give the images themselves.")
    label = next(
        (n for n in columns if kinds[n] == "ClassLabel"), next((n for n in _LABEL_COLUMNS if n in columns), None)
    )
    return image, label, getattr(features[label], "names", None) if label else None


def _to_list(labels: Any) -> list[Any]:
    if isinstance(labels, str | bytes):
        raise OneaError("labels is a single string; give one label for each image.")
    if not hasattr(labels, "tolist"):
        labels = list(labels) if isinstance(labels, Iterable) else np.asarray(labels)
    flat = labels if isinstance(labels, list) else labels.tolist()
    return flat if isinstance(flat, list) else [flat]


def _label_name(label: Any, names: Sequence[str] | None) -> Any:
    return names[label] if names is not None and isinstance(label, int) and 0 <= label < len(names) else label


def _decode(
    items: Sequence[Any],
    labels: Sequence[str] | None,
    size: int,
    on_bad: OnBad | None,
    progress: Progress,
) -> DecodedImages:
    if on_bad not in ("fail", "skip", None):
        raise OneaError(f"on_bad is {on_bad!r:.80}; choose fail or skip.")
    names = [str(item) if isinstance(item, str | os.PathLike) else f"image {n + 1}" for n, item in enumerate(items)]
    results = map_threaded(_square_decoder(size), list(zip(items, names, strict=True)))
    pixels = np.empty((len(items), 3, size, size), np.uint8)
    decoded: list[int] = []  # positions in items
    skipped: list[str] = []
    progress.start_images("reading images", len(items))
    for row, result in enumerate(results):
        progress.step(1)
        if isinstance(result, str):
            skipped.append(result)
        else:
            pixels[len(decoded)] = result
            decoded.append(row)
    if skipped and (on_bad != "skip" or not decoded):
        raise OneaError(describe_unreadable(skipped, len(items), may_skip=on_bad == "fail"))
    kept_labels = None if labels is None else tuple(labels[row] for row in decoded)
    return DecodedImages(pixels[: len(decoded)], kept_labels, tuple(names[row] for row in decoded), tuple(skipped))


def _square_decoder(size: int) -> Callable[[tuple[Any, str]], Pixels | str]:
    """A function from a source and its name to square pixels, or to the reason why it cannot be read."""

    def decode(item: tuple[Any, str]) -> Pixels | str:
        source, name = item
        try:
            return fit(_to_rgb(source, name, size), size, size)
        except BadImage as error:
            return f"{error.path}: {error.reason}"

    return decode


def _to_rgb(source: Any, name: str, size: int) -> Image.Image:
    if isinstance(source, str | os.PathLike | bytes):
        return read_image(source, min_side=size, name=name)
    if isinstance(source, Image.Image):
        return upright_rgb(source)
    if is_array(source):
        return to_image(source, name)
    raise _unreadable_source(source)


def _unreadable_source(source: Any) -> OneaError:
    return OneaError(
        f"{type(source).__name__} cannot be read as images; give a folder, paths, Pillow images, arrays, "
        "tensors, a Hugging Face dataset or a DataLoader."
    )


_CHANNELS = (1, 3, 4)


def is_array(value: Any) -> bool:
    """Whether this is an array or a tensor."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__array__")


def is_object_array(array: Any) -> bool:
    """Whether this is an array of objects or text, such as paths, instead of pixels.

    >>> is_object_array(np.array(["a.jpg", "b.jpg"])), is_object_array(np.zeros((2, 8, 8, 3)))
    (True, False)
    """
    kind = getattr(array.dtype, "kind", None)
    if kind is None and not hasattr(array, "detach"):  # a pandas column with an extension type
        kind = np.asarray(array).dtype.kind
    return kind in tuple("OTU")  # objects and text in NumPy and pandas


def iterate_images(array: Any) -> Iterator[Any]:
    """The images of an array: the array itself if it has two or three axes, or those along the first of four axes.

    >>> [image.shape for image in iterate_images(np.zeros((2, 3, 8, 9), np.uint8))]
    [(3, 8, 9), (3, 8, 9)]
    """
    values = _to_numpy(array)
    if values.ndim == 4:
        yield from values
    elif values.ndim == 3 and not {values.shape[0], values.shape[2]} & {*_CHANNELS}:
        raise OneaError(
            f"An array of shape {tuple(values.shape)} has no colour channels; give grey images as [N, H, W, 1], "
            "such as images[..., None], and one image as [H, W] or [H, W, 3]."
        )
    elif values.ndim in (2, 3):
        yield values
    else:
        shape = tuple(values.shape)
        raise OneaError(
            f"An array of shape {shape} is not one or more images; give [H, W, 3], [N, H, W, 3] or [N, 3, H, W]."
        )


def to_image(array: Any, name: str) -> Image.Image:
    """An array ``[H, W]``, ``[H, W, channels]`` or ``[channels, H, W]`` as an RGB image.

    Integers are pixels in 0..255; floating-point numbers are pixels in 0..1, or in 0..255 if some exceed 1.

    Raises:
        BadImage: the shape or the numbers are not those of an image.
    """
    values = _to_numpy(array)
    if values.ndim == 3 and values.shape[2] not in _CHANNELS and values.shape[0] in _CHANNELS:
        values = values.transpose(1, 2, 0)
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in _CHANNELS) or 0 in values.shape:
        raise BadImage(name, f"an array of shape {tuple(values.shape)} is not [H, W, 3] or [3, H, W]")
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    return Image.fromarray(_to_uint8(values, name)).convert("RGB")


def _to_uint8(values: Any, name: str) -> Any:
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    if values.dtype == np.bool_:
        return np.where(values, np.uint8(255), np.uint8(0))
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        raise BadImage(name, "the array contains NaN, infinity or values that are not real numbers")
    if values.min() < 0 or values.max() > 255:
        raise BadImage(name, "pixels must lie in 0..1 or 0..255: give images before they are normalised")
    scale = 255.0 if np.issubdtype(values.dtype, np.floating) and values.max() <= 1 else 1.0
    return np.rint(values.astype(np.float64) * scale).astype(np.uint8)


def _to_numpy(array: Any) -> Any:
    if hasattr(array, "detach"):  # a tensor, maybe on a device or in bfloat16
        array = array.detach().cpu()
        array = array.float() if array.is_floating_point() else array
    return np.asarray(array)
