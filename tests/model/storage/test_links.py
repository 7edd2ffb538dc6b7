# SPDX-License-Identifier: Apache-2.0
"""A model folder from an untrusted source: links are refused, and only files of a model are ever removed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from support.models import class_folders, tiny_model

import onea
from onea.errors import OneaError
from onea.model.storage import folder as folders
from onea.model.storage.teaching import teach_folder

MACHINE = {"threads": 1, "precision": "fp32", "device": "cpu"}


@pytest.fixture(scope="module")
def made(tiny_vit, tiny_images, tmp_path_factory) -> Path:
    files = class_folders(tiny_images / "train")
    model = tiny_model(tiny_vit)
    for names in (("class00", "class01"), ("class02", "class03")):
        model.learn([file for name in names for file in files[name]], [name for name in names for _ in files[name]])
    return model.save(tmp_path_factory.mktemp("made") / "shop.onea")


@pytest.fixture
def received(made, tmp_path) -> Path:
    """A model beside a user's other files."""
    home = tmp_path / "home"
    (home / "letters").mkdir(parents=True)
    (home / "letters/mum.txt").write_text("dear mum")
    (home / "000007").mkdir()
    (home / "000007/state.json").write_text("not ours")
    (home / "secret.md").write_text("my password is swordfish")
    return Path(shutil.copytree(made, home / "shop.onea"))


def everything(home: Path) -> dict[str, str | bytes]:
    """All files and links outside the model."""
    places = (place for place in home.rglob("*") if "shop.onea" not in place.parts)
    return {str(place.relative_to(home)): place.read_bytes() for place in places if place.is_file()}


def rename(path: Path) -> None:
    folders.change(path, lambda state, version, date: state.rename("class00", "null", version, date))


def forget_and_save(path: Path) -> None:
    onea.load(path, threads=1).forget("class00").save(path)


def teach(path: Path, images: Path) -> None:
    teach_folder(path, images / "train", None, {}, MACHINE, "fail")


LINKS = {
    "states": "..",
    "states/000002": "../../letters",
    "states/000001": "../../000007",
    "states/000009": "../../letters",
    "states/.partial-abcdefgh": "../../letters",
    "states/000002/state.json": "../../../secret.md",
    "states/000002/state.safetensors": "../../../secret.md",
    "model.json": "../secret.md",
    "README.md": "../secret.md",
    "history.png": "../letters/mum.txt",
    "lock": "../secret.md",
}


@pytest.mark.parametrize("name", LINKS)
def test_a_link_is_refused_and_its_target_unchanged(received, tiny_images, name):
    place = received / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(LINKS[name])
    home = received.parent
    before = everything(home)
    for use in (rename, forget_and_save, folders.undo, lambda path: teach(path, tiny_images)):
        with pytest.raises(OneaError, match="is a symbolic link"):
            use(received)
        assert everything(home) == before
        assert place.is_symlink(), "the link itself stays for its owner to see"
    assert not any("swordfish" in file.read_text(errors="ignore") for file in received.rglob("*.md") if file != place)


@pytest.mark.parametrize("target", [".model.json.{}.partial", ".README.md.{}.partial"])
def test_a_link_in_place_of_a_partial_file_is_not_followed(received, target):
    victim = received.parent / "secret.md"
    (received / target.format(os.getpid())).symlink_to(victim)
    rename(received)
    assert victim.read_text() == "my password is swordfish"
    assert "null" in onea.load(received, threads=1).classes_


def test_the_path_of_a_model_may_be_a_link(received):
    """The path is chosen by the user, unlike links inside the folder."""
    link = received.parent / "mine.onea"
    link.symlink_to(received)
    rename(link)
    assert "null" in onea.load(link, threads=1).classes_


def test_a_lock_file_with_a_hard_link_is_refused(received):
    victim = received.parent / "secret.md"
    (received / "lock").unlink()
    (received / "lock").hardlink_to(victim)
    with pytest.raises(OneaError, match="hard link"):
        rename(received)
    assert victim.read_text() == "my password is swordfish"


@pytest.mark.parametrize("name", ["lock", "model.json", "README.md", "states/000002/state.json"])
def test_pipes_and_folders_in_place_of_files_are_refused(received, name):
    (received / name).unlink()
    os.mkfifo(received / name)
    with pytest.raises(OneaError, match="not a plain file"):
        rename(received)
    (received / name).unlink()
    (received / name).mkdir()
    with pytest.raises(OneaError, match="not a plain file"):
        rename(received)


def test_only_files_of_a_model_are_removed(received):
    """Versions that are no longer valid are removed, with their files; all other files stay."""
    states = received / "states"
    ours = [states / "000009", states / ".partial-abcd1234", states / "000008"]
    for place in ours:
        place.mkdir()
        (place / "state.json").write_text("{}")
        (place / ".state.safetensors.77.partial").write_text("")
    (states / "000008/letter.txt").write_text("dear mum")
    (states / "holiday").mkdir()
    (states / "holiday/photo.jpg").write_text("sea")
    (states / "1234567").mkdir()
    (received / "notes.txt").write_text("mine")
    (received / ".model.json.99.partial").write_text("{")
    (received / ".notes.txt.99.partial").write_text("{")
    rename(received)
    assert not any(place.exists() for place in ours[:2])
    assert [place.name for place in ours[2].iterdir()] == ["letter.txt"]
    assert {place.name for place in states.iterdir()} == {"000001", "000002", "000003", "000008", "holiday", "1234567"}
    assert (states / "holiday/photo.jpg").read_text() == "sea"
    left = {place.name for place in received.iterdir()} - {"model.json", "states", "README.md", "history.png", "lock"}
    assert left == {"notes.txt", ".notes.txt.99.partial"}


# Before training


class TrainedError(Exception):
    """Training began."""


@pytest.fixture
def no_training(monkeypatch):
    def begin(*arguments, **options):
        raise TrainedError

    monkeypatch.setattr("onea.model.estimator.read_labelled", begin)


def test_a_folder_that_cannot_become_a_model_is_refused_before_training(no_training, tiny_vit, tiny_images, tmp_path):
    new = {"backbone": tiny_vit, "epochs": 1}

    def refused(path: Path, words: str) -> None:
        before = sorted(path.rglob("*"))
        with pytest.raises(OneaError, match=words):
            teach_folder(path, tiny_images / "train", None, new, MACHINE, "fail")
        assert [place for place in sorted(path.rglob("*")) if place.name != "lock"] == before

    letters = tmp_path / "letters"
    letters.mkdir()
    (letters / "mum.txt").write_text("dear mum")
    refused(letters, "is not empty and contains no model")
    lost = tmp_path / "lost.onea"
    (lost / "states/000004").mkdir(parents=True)
    refused(lost, r"has versions of a model \(000004\) and no model.json")
    with pytest.raises(TrainedError):
        teach_folder(tmp_path / "new.onea", tiny_images / "train", None, new, MACHINE, "fail")
    assert not (tmp_path / "new.onea").exists()


def test_versions_whose_manifest_was_lost_are_never_overwritten(received, tiny_vit, tiny_images):
    for name in ("model.json", "README.md", "history.png"):
        (received / name).unlink()
    before = sorted(received.rglob("*"))
    with pytest.raises(OneaError, match="has versions of a model"):
        teach_folder(received, tiny_images / "train", None, {"backbone": tiny_vit, "epochs": 1}, MACHINE, "fail")
    assert sorted(received.rglob("*")) == before


# A full disk


def test_a_full_disk_without_a_lock_file_leaves_nothing(received, tiny_images, monkeypatch):
    real = os.open

    def full(path, flags, *arguments, **options):
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, flags, *arguments, **options)

    (received / "lock").unlink()
    before = sorted(received.rglob("*"))
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OneaError, match="No space left in"):
        rename(received)
    with pytest.raises(OneaError, match="No space left in"):
        teach_folder(received.parent / "new.onea", tiny_images / "train", None, {}, MACHINE, "fail")
    assert sorted(received.rglob("*")) == before
    assert not (received.parent / "new.onea").exists()


@pytest.mark.parametrize("moment", range(4))
def test_a_first_save_on_a_full_disk_leaves_nothing(made, tmp_path, monkeypatch, moment):
    model, real, calls = onea.load(made, threads=1), os.fsync, 0

    def full(handle):
        nonlocal calls
        calls += 1
        if calls > 2 * moment:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OneaError, match="No space left in"):
            model.save(tmp_path / "new.onea")
    assert not (tmp_path / "new.onea").exists()
    model.save(tmp_path / "new.onea")
    assert onea.load(tmp_path / "new.onea", threads=1).version == 2
