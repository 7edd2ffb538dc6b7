# SPDX-License-Identifier: Apache-2.0
"""CIFAR-100 consists of pickles, and no code in them is run."""

from __future__ import annotations

import os
import pickle
import struct
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from onea.errors import OneaError
from onea.research.data import cifar
from onea.research.data.cifar import read_classes, read_images
from onea.research.data.sources import load_dataset

CLASSES = [b"apple", b"bear"]
RANDOM = np.random.default_rng(0)
TRAIN, TEST = (RANDOM.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8) for count in (4, 2))


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined, misc]
    """Writes text and bytes like the Python 2 that wrote CIFAR-100."""

    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_bytes(self, content: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)

    dispatch[bytes] = save_bytes

    def save_text(self, text: str) -> None:
        self.save_bytes(text.encode("latin1"))

    dispatch[str] = save_text


def pickled(value: Any) -> bytes:
    file = BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue()


def images(pixels: np.ndarray) -> dict[str, Any]:
    labels = [k % 2 for k in range(len(pixels))]
    return {"filenames": ["a.png"] * len(pixels), "fine_labels": labels, "data": pixels.reshape(len(pixels), -1)}


def write_cifar(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, value in (("meta", {"fine_label_names": CLASSES}), ("train", images(TRAIN)), ("test", images(TEST))):
        (folder / name).write_bytes(pickled(value))


@pytest.fixture
def any_md5(monkeypatch):
    """Accept files with any MD5."""
    monkeypatch.setattr(cifar, "_md5_by_file", lambda: dict.fromkeys(("meta", "train", "test")))


def test_published_files_are_read(tmp_path, any_md5):
    write_cifar(tmp_path / "cifar-100-python")
    dataset = load_dataset("cifar100", root=tmp_path)
    assert dataset.classes == ("apple", "bear")
    np.testing.assert_array_equal(dataset.train.pixels, TRAIN)
    np.testing.assert_array_equal(dataset.test.pixels, TEST)
    assert dataset.train.labels.tolist() == [0, 1, 0, 1]
    assert dataset.train.pixels is not None
    assert dataset.train.pixels.flags.writeable


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_in_fortran_order_and_newer_pickle_protocols(protocol, tmp_path):
    values = {name.encode(): value for name, value in images(TRAIN).items()}
    values[b"data"] = np.asfortranarray(values[b"data"])
    (tmp_path / "train").write_bytes(pickle.dumps(values, protocol))
    np.testing.assert_array_equal(read_images(tmp_path / "train")[0], TRAIN)


class Evil:
    def __init__(self, what: Any, *arguments: Any):
        self.call = what, arguments

    def __reduce__(self) -> Any:
        return self.call


def malicious_pickles() -> dict[str, bytes]:
    """Pickles that run code or have an unexpected content, by description."""
    marker = "touched"
    array = {"fine_labels": [0], "data": np.zeros((1, 3072), np.uint8)}
    return {
        "a command": pickled(Evil(os.system, f"touch {marker}")),
        "inside": pickled(array | {"coarse_labels": Evil(os.mkdir, marker)}),
        "eval": pickled(Evil(eval, f"open({marker!r}, 'w')")),
        "getattr": pickled(Evil(getattr, marker, "upper")),
        "numpy's own loader": pickled(Evil(np.load, marker, None, True)),
        "objects": pickled(array | {"data": np.array([Evil(os.mkdir, marker)], dtype=object)}),
        "numbers": pickled(array | {"data": np.zeros((1, 3072), np.float32)}),
        "a state": b"\x80\x02cnumpy\nndarray\n)R}(X\x01\x00\x00\x00aK\x01ub.",
        "another shape": pickled(array | {"data": np.zeros((1, 3071), np.uint8)}),
        "labels": pickled(array | {"fine_labels": [b"0"]}),
        "a label": pickled(array | {"fine_labels": [10**30]}),
        "a list": pickled([1, 2]),
        "nothing": b"",
        "a piece": pickled(array)[:-9],
        "no pickle": b"hello",
        "memory": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
    }


@pytest.mark.parametrize("name", malicious_pickles())
def test_a_malicious_pickle_is_refused_without_running_code(name, tmp_path, monkeypatch, any_md5):
    monkeypatch.chdir(tmp_path)
    write_cifar(Path("cifar-100-python"))
    Path("cifar-100-python/train").write_bytes(malicious_pickles()[name])
    with pytest.raises(
        OneaError, match=r"^cifar-100-python.train is not a file of CIFAR-100 \(.*\); delete it"
    ) as caught:
        load_dataset("cifar100", root=Path())
    assert len(str(caught.value).splitlines()) == 1
    assert [path.name for path in Path().iterdir()] == ["cifar-100-python"]


def test_files_with_another_md5_are_not_opened(tmp_path, monkeypatch):
    """They count as missing, and the MD5 of a downloaded archive is compared as well."""
    write_cifar(tmp_path / "cifar-100-python")
    with tarfile.open(tmp_path / "cifar-100-python.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "cifar-100-python", "cifar-100-python")
    monkeypatch.setattr(cifar, "_read", lambda path: 1 / 0)
    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", lambda *_: None)
    with pytest.raises(OneaError, match="could not be downloaded"):
        load_dataset("cifar100", root=tmp_path)


def test_class_names_must_be_text(tmp_path):
    (tmp_path / "meta").write_bytes(pickled({"fine_label_names": [1]}))
    with pytest.raises(OneaError, match="no class names"):
        read_classes(tmp_path / "meta")
