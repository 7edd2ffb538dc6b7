# SPDX-License-Identifier: Apache-2.0
"""Images in all forms: a photo gives the same pixels from a file, Pillow, an array or a loader."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.models import class_folders

from onea.errors import OneaError
from onea.model.learning.images import find_images, read_labelled, read_unlabelled

SIDE = 32


@pytest.fixture(scope="module")
def files(tiny_images):
    return class_folders(tiny_images / "train")["class00"]


@pytest.fixture(scope="module")
def pixels(files):
    """The photos as ``[N, H, W, 3]``; they already have the requested size, so no pixel may change."""
    return np.stack([np.array(Image.open(file)) for file in files])


SOURCES = {
    "paths": lambda files, pixels: files,
    "text": lambda files, pixels: [str(file) for file in files],
    "folder": lambda files, pixels: files[0].parent,
    "bytes": lambda files, pixels: [file.read_bytes() for file in files],
    "pillow": lambda files, pixels: [Image.open(file) for file in files],
    "NHWC": lambda files, pixels: pixels,
    "NCHW": lambda files, pixels: pixels.transpose(0, 3, 1, 2),
    "list of HWC": lambda files, pixels: list(pixels),
    "floats in 0..1": lambda files, pixels: pixels.astype(np.float32) / 255,
    "floats in 0..255": lambda files, pixels: pixels.astype(np.float64),
    "tensor": lambda files, pixels: torch.from_numpy(pixels).permute(0, 3, 1, 2),
    "float tensor": lambda files, pixels: torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255,
    "half tensor": lambda files, pixels: torch.from_numpy(pixels).permute(0, 3, 1, 2).bfloat16(),
    "tensors": lambda files, pixels: list(torch.from_numpy(pixels).permute(0, 3, 1, 2)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_form_of_images_gives_the_same_pixels(source, files, pixels):
    batch = read_unlabelled(SOURCES[source](files, pixels), SIDE)
    assert np.array_equal(batch.pixels, pixels.transpose(0, 3, 1, 2))


def test_one_image_is_a_batch_of_one(files, pixels):
    for one in (files[0], str(files[0]), files[0].read_bytes(), Image.open(files[0]), pixels[0], pixels[0].mean(2)):
        assert len(read_unlabelled(one, SIDE)) == 1


def test_labels_of_loaders_and_datasets(pixels):
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    numbers = torch.tensor([0, 1, 0, 1, 1, 0])
    dataset = torch.utils.data.TensorDataset(images, numbers)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    for source in (loader, dataset, list(loader), iter(loader)):
        batch = read_labelled(source, None, SIDE)
        assert batch.labels == ("0", "1", "0", "1", "1", "0")
        assert np.array_equal(batch.pixels, images.numpy())
    dataset.classes = ["cat", "dog"]  # as torchvision's folders have them
    assert read_labelled(loader, None, SIDE).labels == ("cat", "dog", "cat", "dog", "dog", "cat")
    assert len(read_unlabelled(loader, SIDE)) == 6


class Table:
    """An object with the interface of a Hugging Face dataset."""

    def __init__(self, **columns):
        self.columns = columns

    column_names = property(lambda self: list(self.columns))

    @property
    def features(self):
        names = type("ClassLabel", (), {"names": ["cat", "dog"]})
        kinds = {"photo": type("Image", (), {})(), "kind": names(), "id": type("Value", (), {})()}
        return {name: kinds[name] for name in self.columns}

    def __iter__(self):
        return (dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True))


def test_class_names_of_hugging_face_datasets(files):
    photos = [Image.open(file) for file in files]
    table = Table(id=range(6), photo=photos, kind=[0, 1, 0, 1, 1, 0])
    assert read_labelled(table, None, SIDE).labels == ("cat", "dog", "cat", "dog", "dog", "cat")
    assert len(read_unlabelled(table, SIDE)) == 6
    with pytest.raises(OneaError, match="no label column"):
        read_labelled(Table(photo=photos), None, SIDE)
    with pytest.raises(OneaError, match="no image column"):
        read_unlabelled(Table(id=range(6)), SIDE)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (np.zeros((2, 5, 5, 7), np.uint8), "not \\[H, W, 3\\]"),
        (np.zeros((2, 2, 3, 5, 5), np.uint8), "is not one or more images"),
        (np.full((5, 5, 3), -1.0), "before they are normalised"),
        (np.full((5, 5, 3), np.nan), "NaN, infinity"),
        ([object()], "cannot be read as images"),
        (3, "cannot be read as images"),
        ("nowhere.png", "no such file"),
        ([b""], "empty"),
    ],
)
def test_invalid_images_are_refused(source, words):
    with pytest.raises(OneaError, match=words):
        read_unlabelled(source, SIDE)


def test_an_unreadable_folder_is_not_skipped(tiny_images, monkeypatch):
    """The error is simulated, because root can read every folder."""
    closed, real = tiny_images / "test/class01", os.scandir

    def scandir(place):
        if Path(place) == closed:
            raise PermissionError(13, "Permission denied", str(place))
        return real(place)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OneaError, match=r"class01 \(Permission denied\); make it readable, or move it away\.$"):
        find_images(tiny_images / "test")


def test_labels_must_match_the_images(files):
    with pytest.raises(OneaError, match="one label for each"):
        read_labelled(files, "cat", SIDE)
    with pytest.raises(OneaError, match=r"Labels are missing: give learn\(images, labels\)"):
        read_labelled(files, None, SIDE)
    with pytest.raises(OneaError, match=r"Labels are missing: give evaluate\(images, labels\)"):
        read_labelled(files, None, SIDE, purpose="evaluate")
    assert read_labelled(files, np.arange(6), SIDE).labels == ("0", "1", "2", "3", "4", "5")


def test_unreadable_images_can_be_skipped(tmp_path, files):
    broken = tmp_path / "broken.png"
    broken.write_bytes(files[0].read_bytes()[:60])
    with pytest.raises(OneaError, match=r"1 of 7 images cannot be read .*cut short"):
        read_labelled([*files, broken], ["a"] * 7, SIDE)
    batch = read_labelled([*files[:2], broken, *files[2:]], list("aabaaaa"), SIDE, "skip")
    assert batch.labels == ("a",) * 6
    assert "broken.png" in batch.skipped[0]


def test_other_files_in_class_folders_are_ignored_and_reported(tmp_path, files):
    for name in ("a/1.png", "a/2.JPG", "a/notes.txt", "a/IMG_1.AAE", "b/scan", "loose.png", "a/thumbs.db", "a/.x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(files[0].read_bytes())
    batch = read_labelled(tmp_path, None, SIDE)
    assert batch.labels == ("a", "a", "b")
    assert [Path(name).name for name in batch.ignored_files] == ["IMG_1.AAE", "notes.txt", "loose.png"]
    (tmp_path / "c").mkdir()
    (tmp_path / "c/notes.txt").write_text("soon")
    with pytest.raises(
        OneaError, match=r"Class folder c in .* contains no photos: add its images, or remove the folder"
    ):
        read_labelled(tmp_path, None, SIDE)


def test_other_files_beside_group_folders_are_ignored(tmp_path, files):
    for name in ("monday/a/1.png", "monday/b/2.png", "monday/README", "tuesday/c/3.png", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(files[0].read_bytes())
    batch = read_labelled(tmp_path, None, SIDE)
    assert batch.labels == ("a", "b", "c")
    assert [Path(name).name for name in batch.ignored_files] == ["notes.txt", "README"]


@pytest.mark.parametrize("others", [(), ("kiwi/1.png",), ("kiwi/1.png", "kiwi/more/2.png")])
def test_photos_beside_folders_in_a_class_folder_are_refused(tmp_path, files, others):
    for name in ("lemon/1.png", "lemon/2.png", "lemon/edited/3.png", *others):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(files[0].read_bytes())
    with pytest.raises(
        OneaError, match=r"(lemon|kiwi) contains both photos \(1.png\) and folders \((edited|more)\): put all"
    ):
        read_labelled(tmp_path, None, SIDE)


def test_thumbnail_folders_of_a_disk_station_are_ignored(tmp_path, files):
    for name in ("a/1.png", "a/@eaDir/1.png/THUMB.jpg", "@eaDir/a.png", "__MACOSX/a/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(files[0].read_bytes())
    assert read_labelled(tmp_path, None, SIDE).labels == ("a",)
    assert find_images(tmp_path) == [tmp_path / "a/1.png"]


def test_a_heic_photo_is_found(tmp_path):
    (tmp_path / "IMG_1.HEIC").write_bytes(b"\0\0\0\x1cftypheic")
    assert find_images(tmp_path) == [tmp_path / "IMG_1.HEIC"]


def test_images_are_found_in_natural_order(tmp_path, files):
    for name in ("b/10.png", "b/9.png", "a.png", ".hidden/x.png", "notes.txt", "b/.x.png", "b/scan"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(files[0].read_bytes())
    found = [str(file.relative_to(tmp_path)) for file in find_images(tmp_path)]
    assert found == ["a.png", "b/9.png", "b/10.png", "b/scan"], "a photo without an ending is one, as in class folders"
    (tmp_path / "b/circle").symlink_to(tmp_path)
    assert len(find_images(tmp_path)) == 4
    (tmp_path / "empty").mkdir()
    with pytest.raises(OneaError, match="no images below"):
        find_images(tmp_path / "empty")
