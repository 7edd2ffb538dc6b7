# SPDX-License-Identifier: Apache-2.0
"""Names of datasets, layouts and error messages."""

from __future__ import annotations

import dataclasses
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from onea.data.dataset import Dataset, Group, Split, choose_test_names, natural_key
from onea.errors import OneaError
from onea.research.data import published
from onea.research.data.cifar import cifar_dataset
from onea.research.data.published import CUB200, IMAGENET_A, Counts, load_cub200, load_imagenet_variant
from onea.research.data.sources import DATASETS, default_root, load_dataset


def image(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (2, 2)).save(path, format="PNG")
    return path


def images(folder: Path, count: int) -> None:
    for i in range(count):
        image(folder / f"{i}.png")


def names(split: Split, root: Path) -> list[str]:
    assert split.files is not None
    return [file.relative_to(root).as_posix() for file in split.files]


def error_of(spec: str, root: Path | None = None) -> str:
    with pytest.raises(OneaError) as caught:
        load_dataset(spec, root=root)
    message = str(caught.value)
    assert "\n" not in message
    return message


def all_names(dataset: Dataset, root: Path) -> list[str]:
    return sorted(names(dataset.train, root) + names(dataset.test, root))


# ---- names ----


def test_unknown_names_get_the_closest_name() -> None:
    assert error_of("cifar10") == "Unknown dataset 'cifar10'; did you mean 'cifar100'?"
    assert error_of("zzz").startswith("Unknown dataset 'zzz'; known: cifar100, cub200, folder, glyphs")


def test_hint_for_a_path_without_prefix(tmp_path: Path) -> None:
    (tmp_path / "train.txt").touch()
    assert error_of(str(tmp_path)).endswith(f"did you mean 'folder:{tmp_path}'?")
    assert error_of(str(tmp_path / "train.txt")).endswith(f"did you mean 'list:{tmp_path / 'train.txt'}'?")


def test_only_some_datasets_take_a_path() -> None:
    assert error_of("folder:") == "Dataset 'folder:' needs a path: write folder:PATH."
    assert error_of("list") == "Dataset 'list' needs a path: write list:TRAIN.txt[,TEST.txt]."
    assert error_of("cub200:/data") == (
        "Dataset 'cub200' takes no path: write cub200, and set ONEA_DATA to the folder that contains it."
    )


def test_every_dataset_is_described_in_one_line() -> None:
    for name, info in DATASETS.load_all().items():
        assert info.usage.startswith(name)
        assert info.description
        assert "\n" not in info.description
        assert info.takes_path == (":" in info.usage)


def test_listing_datasets_imports_nothing_heavy() -> None:
    code = "import sys, onea.research.data.sources; print({'torch', 'torchvision', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ONEA_DATA", raising=False)
    assert default_root() == Path("data")
    monkeypatch.setenv("ONEA_DATA", str(tmp_path))
    assert default_root() == tmp_path
    assert f"is not in {tmp_path}" in error_of("imagenet-r")
    assert f"is not in {tmp_path / 'else'}" in error_of("imagenet-r", tmp_path / "else")


# ---- folders ----


def test_train_and_test_folders(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        for label in ("class10", "class2"):
            images(tmp_path / split / label, count)
    dataset = load_dataset(f"folder:{tmp_path}")
    assert dataset.name == tmp_path.name
    assert dataset.classes == ("class2", "class10")
    assert dataset.groups == ()
    assert dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert dataset.train.labels.dtype == np.int64
    assert names(dataset.test, tmp_path) == [f"test/class{c}/{i}.png" for c in (2, 10) for i in (0, 1)]


def test_val_replaces_a_missing_test_folder(tmp_path: Path) -> None:
    for split in ("train", "val"):
        images(tmp_path / split / "cat", 2)
    assert names(load_dataset(f"folder:{tmp_path}").test, tmp_path)[0] == "val/cat/0.png"
    images(tmp_path / "test" / "cat", 1)
    assert names(load_dataset(f"folder:{tmp_path}").test, tmp_path) == ["test/cat/0.png"]


def test_a_train_folder_needs_a_test_folder(tmp_path: Path) -> None:
    images(tmp_path / "train" / "cat", 2)
    assert "has train/ but neither test/ nor val/" in error_of(f"folder:{tmp_path}")


def test_a_class_may_be_named_train(tmp_path: Path) -> None:
    images(tmp_path / "train", 3)
    images(tmp_path / "bus", 3)
    assert load_dataset(f"folder:{tmp_path}").classes == ("bus", "train")


def test_a_single_folder_is_split_by_class(tmp_path: Path) -> None:
    images(tmp_path / "cat", 10)
    images(tmp_path / "dog", 2)
    image(tmp_path / "cat" / ".hidden.png")
    (tmp_path / "cat" / "Thumbs.db").write_bytes(b"left by a file manager")
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.txt").write_text("about")
    dataset = load_dataset(f"folder:{tmp_path}")
    assert np.bincount(dataset.train.labels).tolist() == [8, 1]
    assert np.bincount(dataset.test.labels).tolist() == [2, 1]
    # Must not change, because published results depend on this choice.
    assert names(dataset.test, tmp_path)[:2] == ["cat/0.png", "cat/8.png"]
    assert len(set(all_names(dataset, tmp_path))) == 12


def test_the_split_of_a_copied_folder_is_the_same(tmp_path: Path) -> None:
    images(tmp_path / "a" / "cat", 9)
    files = sorted((tmp_path / "a" / "cat").iterdir())
    random.Random(3).shuffle(files)
    (tmp_path / "b" / "cat").mkdir(parents=True)
    for file in files:  # copied in another order
        shutil.copy(file, tmp_path / "b" / "cat" / file.name)
    first, second = load_dataset(f"folder:{tmp_path / 'a'}"), load_dataset(f"folder:{tmp_path / 'b'}")
    assert names(first.test, tmp_path / "a") == names(second.test, tmp_path / "b")
    assert first.fingerprint == second.fingerprint


def test_the_fingerprint_depends_on_names_sizes_and_labels(tmp_path: Path) -> None:
    images(tmp_path / "cat", 5)
    images(tmp_path / "dog", 5)
    fingerprints = [load_dataset(f"folder:{tmp_path}").fingerprint]
    with (tmp_path / "cat" / "0.png").open("ab") as file:
        file.write(b"more")
    fingerprints.append(load_dataset(f"folder:{tmp_path}").fingerprint)
    (tmp_path / "cat" / "0.png").rename(tmp_path / "cat" / "zero.png")
    fingerprints.append(load_dataset(f"folder:{tmp_path}").fingerprint)
    (tmp_path / "dog").rename(tmp_path / "wolf")
    fingerprints.append(load_dataset(f"folder:{tmp_path}").fingerprint)
    assert len(set(fingerprints)) == 4


@pytest.mark.parametrize("splits", [("",), ("train", "test")])
def test_task_folders_become_groups(tmp_path: Path, splits: Iterable[str]) -> None:
    for split in splits:
        for group, labels in {"task10": ["d", "a"], "task2": ["c", "b", "e"]}.items():
            for label in labels:
                images(tmp_path / split / group / label, 5)
    dataset = load_dataset(f"folder:{tmp_path}")
    assert dataset.classes == ("a", "b", "c", "d", "e")
    assert dataset.groups == (Group("task2", (1, 2, 4)), Group("task10", (0, 3)))


def test_non_images_and_dangling_links_are_listed_as_files(tmp_path: Path) -> None:
    images(tmp_path / "cat", 3)
    (tmp_path / "cat" / "notes.txt").write_text("words")
    (tmp_path / "cat" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    assert len(all_names(load_dataset(f"folder:{tmp_path}"), tmp_path)) == 5


def test_error_messages_for_invalid_layouts(tmp_path: Path) -> None:
    spec = f"folder:{tmp_path / 'd'}"
    root = tmp_path / "d"
    assert error_of(spec).startswith(f"Dataset folder {root} does not exist")
    root.touch()
    assert error_of(spec).startswith(f"Dataset folder {root} is a file, not a folder")
    root.unlink()
    root.mkdir()
    assert error_of(spec).startswith(f"There are no class folders in {root}")
    images(root / "cat", 1)
    assert error_of(spec) == (
        "Class 'cat' has only 1 image, which leaves none for testing: add images, at least 2 per class."
    )
    images(root / "cat", 2)
    (root / "dog").mkdir()
    assert error_of(spec) == f"Class folder {root / 'dog'} is empty: add its images, or remove the folder."
    images(root / "dog" / "young", 2)
    assert error_of(spec).startswith(f"{root / 'cat'} contains files (0.png) while {root / 'dog'} contains folders: ")
    shutil.rmtree(root / "cat")
    (root / "cat").mkdir()
    assert error_of(spec).startswith(f"Class folder {root / 'cat'} is empty")
    (root / "cat" / "old").mkdir()
    assert error_of(spec).startswith(f"Class folder {root / 'cat' / 'old'} is empty")
    images(root / "cat" / "old" / "deeper", 2)
    assert error_of(spec).startswith(f"Class folder {root / 'cat' / 'old'} contains folders (deeper): ")


def test_a_class_in_two_tasks(tmp_path: Path) -> None:
    for group in ("a", "b"):
        images(tmp_path / group / "x", 2)
    assert "class 'x' is in two tasks, a and b: rename" in error_of(f"folder:{tmp_path}")


def test_a_folder_without_read_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("onea.data.folders.os.scandir", refuse)
    assert error_of(f"folder:{tmp_path}") == (
        f"Cannot list the folder {tmp_path} (Permission denied); make it readable, or move it away."
    )


def test_classes_missing_in_train_or_test(tmp_path: Path) -> None:
    spec = f"folder:{tmp_path}"
    for split, label in (("train", "cat"), ("test", "cat"), ("train", "dog")):
        images(tmp_path / split / label, 1)
    assert error_of(spec) == ("Class 'dog' is in train/ but not in test/: add its images there, or remove the class.")
    images(tmp_path / "train" / "emu", 1)
    assert error_of(spec).startswith("Class 'dog' (and 1 more) is in train/ but not in test/")
    for label in ("dog", "emu", "fox"):
        images(tmp_path / "test" / label, 1)
    assert error_of(spec).startswith("Class 'fox' is in test/ but not in train/")


def test_tasks_must_be_equal_in_train_and_test(tmp_path: Path) -> None:
    images(tmp_path / "train" / "one" / "cat", 1)
    images(tmp_path / "test" / "two" / "cat", 1)
    assert error_of(f"folder:{tmp_path}").startswith("Class 'cat' is in one under train/ but in two under test/")
    shutil.rmtree(tmp_path / "test")
    images(tmp_path / "test" / "cat", 1)
    assert error_of(f"folder:{tmp_path}").startswith("Class 'cat' is in one under train/ but in no task under test/")


@given(st.sets(st.text(st.characters(codec="utf-8"), min_size=1), min_size=2, max_size=60), st.randoms())
def test_held_out_names(members: set[str], rng: random.Random) -> None:
    shuffled = sorted(members)
    rng.shuffle(shuffled)
    held_out = choose_test_names(shuffled)
    assert held_out == choose_test_names(members)
    assert held_out < members
    assert 1 <= len(held_out) <= max(1, round(0.2 * len(members) + 0.5))


@given(st.lists(st.text(max_size=8)), st.randoms())
def test_natural_order_is_total(words: list[str], rng: random.Random) -> None:
    shuffled = list(words)
    rng.shuffle(shuffled)
    assert sorted(words, key=natural_key) == sorted(shuffled, key=natural_key)


@given(st.lists(st.integers(0, 10**6), unique=True))
def test_natural_order_of_numbers(numbers: list[int]) -> None:
    ordered = sorted((f"task{number}" for number in numbers), key=natural_key)
    assert ordered == [f"task{number}" for number in sorted(numbers)]


# ---- lists ----


def test_two_lists(tmp_path: Path) -> None:
    for name in ("a b.png", "c.png", "sub/d.png", "e.png"):
        image(tmp_path / name)
    (tmp_path / "train.txt").write_text("# images\n\na b.png 10\r\nc.png\t2\n")
    (tmp_path / "test.txt").write_text(f"sub/d.png 2\n{tmp_path / 'e.png'} 10\n", encoding="utf-8-sig")
    dataset = load_dataset(f"list:{tmp_path / 'train.txt'},{tmp_path / 'test.txt'}")
    assert dataset.name == "train"
    assert dataset.classes == ("2", "10")
    assert names(dataset.train, tmp_path) == ["c.png", "a b.png"]
    assert names(dataset.test, tmp_path) == ["sub/d.png", "e.png"]
    assert dataset.test.labels.tolist() == [0, 1]


def test_a_single_list_is_split_by_class(tmp_path: Path) -> None:
    images(tmp_path / "cat", 10)
    lines = [f"cat/{i}.png cat" for i in range(10)]
    (tmp_path / "a,b.txt").write_text("\n".join(lines))
    (tmp_path / "reversed.txt").write_text("\n".join(reversed(lines)))
    first, second = (load_dataset(f"list:{tmp_path / name}") for name in ("a,b.txt", "reversed.txt"))
    assert names(first.test, tmp_path) == names(second.test, tmp_path) == ["cat/0.png", "cat/8.png"]
    assert first.fingerprint == second.fingerprint


def test_error_messages_for_invalid_lists(tmp_path: Path) -> None:
    image(tmp_path / "a.png")
    image(tmp_path / "b.png")
    train, test = tmp_path / "train.txt", tmp_path / "test.txt"

    def message(text: str) -> str:
        train.write_text(text)
        return error_of(f"list:{train}")

    assert error_of(f"list:{train}").startswith(f"There is no list file {train}")
    assert message("a.png 1\n\nlonely\n").startswith(f"Line 3 of {train} has no label: write 'path label'")
    assert message("a.png 1\nnone.png 1\n") == (
        f"Line 2 of {train}: there is no file {tmp_path / 'none.png'}; correct the line or remove it."
    )
    assert message("a.png 1\na.png 2\n").startswith(f"Line 2 of {train} lists the same file as line 1")
    assert message("# nothing\n").startswith(f"{train} lists no images")
    assert "leaves none for testing" in message("a.png 1\n")
    test.write_text("b.png 2\n")
    assert error_of(f"list:{train},{test}").startswith(f"Class '1' is in {train} but not in {test}")
    test.write_text("a.png 1\n")
    assert error_of(f"list:{train},{test}").startswith(f"{tmp_path / 'a.png'} is in the training and in the test list")
    assert error_of(f"list:{train},{test},{test}").endswith("give list:TRAIN.txt or list:TRAIN.txt,TEST.txt.")
    assert error_of(f"list:{train},").endswith("give list:TRAIN.txt or list:TRAIN.txt,TEST.txt.")
    train.write_bytes(b"\xff\xfe\x00 1\n")
    assert "is not a UTF-8 text file" in error_of(f"list:{train}")
    assert error_of(f"list:{tmp_path}").startswith(f"Cannot read the list {tmp_path}: ")


# ---- published ----


def test_cifar_arrays_become_a_dataset() -> None:
    rng = np.random.default_rng(0)
    train = rng.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
    test = rng.integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
    dataset = cifar_dataset("cifar100", ["apple", "bear"], (train, [0, 1] * 3), (test, [1, 0] * 2))
    assert dataset.classes == ("apple", "bear")
    assert dataset.train.pixels is not None
    assert dataset.train.pixels.shape == (6, 3, 32, 32)
    assert dataset.train.pixels.flags.c_contiguous
    assert dataset.train.pixels[2, 1, 3, 4] == train[2, 1, 3, 4]
    assert dataset.test.labels.tolist() == [1, 0, 1, 0]
    train[0, 0, 0, 0] ^= 1
    other = cifar_dataset("cifar100", ["apple", "bear"], (train, [0, 1] * 3), (test, [1, 0] * 2))
    relabelled = cifar_dataset("cifar100", ["apple", "bear"], (train, [1, 0] * 3), (test, [1, 0] * 2))
    assert len({dataset.fingerprint, other.fingerprint, relabelled.fingerprint}) == 3


def test_error_message_for_cifar100_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", offline)
    message = error_of("cifar100", tmp_path)
    assert message.startswith(f"CIFAR-100 is not in {tmp_path} and could not be downloaded (<urlopen error Name or")
    assert "get cifar-100-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html and put it into" in message
    assert "MD5 is checked" in message


SMALL_CUB = dataclasses.replace(CUB200, counts=Counts(classes=2, images=6, train=4, test=2))


def make_cub(base: Path) -> None:
    files = [f"{c:03d}.Bird_{c}/{i}.jpg" for c in (1, 2) for i in range(3)]
    for file in files:
        image(base / "images" / file)
    tables = {
        "classes.txt": ["001.Bird_1", "002.Bird_2"],
        "images.txt": files,
        "image_class_labels.txt": [1, 1, 1, 2, 2, 2],
        "train_test_split.txt": [1, 0, 1, 0, 1, 1],
    }
    for name, values in tables.items():
        (base / name).write_text("".join(f"{i} {value}\n" for i, value in enumerate(values, start=1)))


def test_cub_official_split(tmp_path: Path) -> None:
    base = tmp_path / "CUB_200_2011"
    make_cub(base)
    dataset = load_cub200(tmp_path, SMALL_CUB)
    assert dataset.name == "cub200"
    assert dataset.classes == ("001.Bird_1", "002.Bird_2")
    assert names(dataset.test, base / "images") == ["001.Bird_1/1.jpg", "002.Bird_2/0.jpg"]
    assert dataset.train.labels.tolist() == [0, 0, 1, 1]
    assert load_cub200(base, SMALL_CUB).fingerprint == dataset.fingerprint


def test_cub_counts_are_checked(tmp_path: Path) -> None:
    base = tmp_path / "CUB_200_2011"
    make_cub(base)
    assert error_of("cub200", tmp_path) == (
        f"CUB-200-2011 in {base} should have 200 classes and 11,788 images (5,994 training, 5,794 test), but has "
        "2 classes and 6 images (4 training, 2 test): unpack CUB_200_2011.tgz (Caltech, "
        f"https://www.vision.caltech.edu/datasets/cub_200_2011/) into {tmp_path} again."
    )
    (base / "images" / "001.Bird_1" / "0.jpg").unlink()
    with pytest.raises(OneaError, match=r"but has 2 classes and 5 images \(3 training, 2 test\)"):
        load_cub200(tmp_path, SMALL_CUB)


def test_cub_tables_are_checked(tmp_path: Path) -> None:
    base = tmp_path / "CUB_200_2011"
    make_cub(base)
    (base / "image_class_labels.txt").write_text("1 1\n2 9\n")
    with pytest.raises(OneaError, match=r"Image 2 \(001.Bird_1/1.jpg\) in .* has no class or no split: unpack CUB_200"):
        load_cub200(tmp_path, SMALL_CUB)
    (base / "classes.txt").write_text("1\n")
    with pytest.raises(OneaError, match=r"Line 1 of .*classes.txt is not 'number value': unpack CUB_200"):
        load_cub200(tmp_path, SMALL_CUB)
    (base / "classes.txt").unlink()
    with pytest.raises(OneaError, match=r"Cannot read .*classes.txt: unpack CUB_200_2011.tgz"):
        load_cub200(tmp_path, SMALL_CUB)


def test_imagenet_variants(tmp_path: Path) -> None:
    for wnid in ("n01498041", "n01531178"):
        images(tmp_path / "imagenet-a" / wnid, 5)
    (tmp_path / "imagenet-a" / "README.txt").write_text("about")
    small = dataclasses.replace(IMAGENET_A, counts=Counts(classes=2, images=10))
    dataset = load_imagenet_variant(tmp_path, small)
    assert dataset.classes == ("n01498041", "n01531178")
    assert (len(dataset.train), len(dataset.test)) == (8, 2)
    assert load_imagenet_variant(tmp_path / "imagenet-a", small).fingerprint == dataset.fingerprint
    assert error_of("imagenet-a", tmp_path) == (
        f"ImageNet-A in {tmp_path / 'imagenet-a'} should have 200 classes and 7,500 images, but has 2 classes and 10 "
        "images: unpack imagenet-a.tar (Hendrycks et al., https://github.com/hendrycks/natural-adv-examples) "
        f"into {tmp_path} again."
    )


def test_error_message_for_missing_published_data(tmp_path: Path) -> None:
    assert error_of("imagenet-r", tmp_path) == (
        f"ImageNet-R is not in {tmp_path}: unpack imagenet-r.tar (Hendrycks et al., "
        f"https://github.com/hendrycks/imagenet-r) there, so that {tmp_path / 'imagenet-r'} exists, or set ONEA_DATA "
        "to the folder that contains it."
    )
    assert error_of("cub200", tmp_path).startswith(f"CUB-200-2011 is not in {tmp_path}: unpack CUB_200_2011.tgz")


@pytest.mark.parametrize(
    ("name", "folder"), [("cub200", "cub"), ("imagenet-a", "imagenet-a"), ("imagenet-r", "imagenet-r"), ("cub200", "")]
)
def test_train_and_test_folders_of_published_datasets(tmp_path: Path, name: str, folder: str) -> None:
    for i in range(200):
        for split in ("train", "test"):
            (tmp_path / folder / split / f"c{i}").mkdir(parents=True)
            (tmp_path / folder / split / f"c{i}" / "0.jpg").touch()
    dataset = load_dataset(name, root=tmp_path)
    assert (dataset.name, len(dataset.classes), len(dataset.train), len(dataset.test)) == (name, 200, 200, 200)
    for split in ("train", "test"):
        shutil.rmtree(tmp_path / folder / split / "c7")
    assert "should have 200 classes, but has 199 classes: unpack" in error_of(name, tmp_path)


def test_published_counts_are_those_of_the_papers() -> None:
    assert published.CUB200.counts == Counts(200, 11_788, 5_994, 5_794)
    assert published.IMAGENET_A.counts == Counts(200, 7_500)
    assert published.IMAGENET_R.counts == Counts(200, 30_000)


@pytest.mark.parametrize("name", ["glyphs", "glyphs-mini"])
def test_name_and_cache_are_passed_to_glyphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls: list[tuple[str, Path | None]] = []
    monkeypatch.setattr("onea.data.glyphs.load_glyphs", lambda name, cache: calls.append((name, cache)))
    load_dataset(name, cache=tmp_path)
    assert calls == [(name, tmp_path)]
