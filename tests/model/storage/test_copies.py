# SPDX-License-Identifier: Apache-2.0
"""Files of small copies in model folders: shared by versions, checked, removed with their versions, never sent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.models import class_folders, onnx_runtime_or_skip, tiny_model

import onea
from onea.errors import OneaError
from onea.model.storage import folder as folders

A, B, C, D = (f"class{number:02d}" for number in range(4))


@pytest.fixture(scope="module")
def files(tiny_images):
    return class_folders(tiny_images / "train")


def teach(model, files, *names):
    chosen = [(file, name) for name in names for file in files[name]]
    return model.learn([file for file, _ in chosen], [name for _, name in chosen])


@pytest.fixture
def saved(tiny_vit, files, tmp_path) -> Path:
    """Two versions: three classes, then one more, with three copies of each."""
    model = teach(tiny_model(tiny_vit, memory=3), files, A, B, C)
    path = model.save(tmp_path / "shop.onea")
    return teach(model, files, D).save(path)


def names(path: Path) -> set[str]:
    return {file.name for file in (path / "copies").iterdir()} if (path / "copies").exists() else set()


def needed(path: Path) -> set[str]:
    states = [folders.read_state(path, version) for version in folders.read_manifest(path).versions.kept]
    return {file.name for state in states for entries in state.exemplars.values() for file in entries}


def test_versions_share_the_files_of_unchanged_classes(saved):
    assert names(saved) == needed(saved)
    assert len(names(saved)) == 4
    assert folders.verify(saved) == (1, 2)


def test_undo_restores_the_copies(saved):
    folders.undo(saved)
    state = folders.read_state(saved, 1)
    assert set(state.exemplars) == {A, B, C}
    assert names(saved) == needed(saved)
    assert len(names(saved)) == 3


def test_forget_removes_the_copies_from_this_version_and_everywhere_from_all(saved):
    model = onea.load(saved, threads=1)
    [gone] = model.snapshot().state.exemplars[B]
    model.forget(B).save(saved)
    assert gone.name in names(saved), "earlier versions still have them"
    model.forget(B, everywhere=True).save(saved)
    assert gone.name not in names(saved)
    assert names(saved) == needed(saved)


def test_removed_copies_are_not_missed(saved, files):
    shutil.rmtree(saved / "copies")
    model = onea.load(saved, threads=1)
    assert model.predict(files[A][:1]).tolist() == model.predict([str(files[A][0])]).tolist()
    assert folders.verify(saved) == (1, 2)
    with pytest.raises(OneaError, match="photos of 0 classes to train on"):
        model.refresh()
    assert teach(model, files, "class04").history[-1]["replayed"] == 0
    model.save(saved)
    assert names(saved) == {file.name for file in model.snapshot().state.exemplars["class04"]}


def test_a_changed_file_is_refused_when_it_is_needed(saved, files):
    changed = saved / "copies" / sorted(names(saved))[0]
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    assert len(onea.load(saved, threads=1).predict(files[A])) == 6, "predictions need no copies"
    with pytest.raises(OneaError, match="its content does not match its name"):
        folders.verify(saved)
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    with pytest.raises(OneaError, match="restore it from a backup, or remove it"):
        onea.load(saved, threads=1).refresh()
    assert before == {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}


def test_a_link_in_place_of_a_file_is_refused(saved, tmp_path):
    target = saved / "copies" / sorted(names(saved))[0]
    shutil.move(target, tmp_path / "elsewhere")
    target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OneaError, match="symbolic link"):
        onea.load(saved, threads=1).refresh()


def test_other_files_below_copies_are_never_removed(saved):
    other = saved / "copies" / "holiday.jpg"
    other.write_bytes(b"a photo")
    onea.load(saved, threads=1).forget(A, everywhere=True).save(saved)
    assert other.read_bytes() == b"a photo"


def test_a_copy_of_a_model_has_its_copies(saved, tmp_path):
    other = onea.load(saved, threads=1).save(tmp_path / "other.onea")
    assert names(other) == names(saved)
    assert folders.verify(other) == (1, 2)


def test_predictions_read_no_copies(saved, files, monkeypatch):
    monkeypatch.setattr("onea.model.exemplars.ExemplarFile.read", lambda self: pytest.fail("a file of copies was read"))
    onea.load(saved, threads=1).predict(files[A][:2])


@pytest.mark.parametrize("copies", [False, True])
def test_copies_are_uploaded_only_on_request(saved, tmp_path, monkeypatch, copies):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "create_repo", lambda *_, **__: None)
    monkeypatch.setattr(
        hub,
        "upload_folder",
        lambda folder_path, **_: str(shutil.copytree(folder_path, tmp_path / "hub" / "shop.onea")),
    )
    model = onea.load(saved, threads=1)
    sent = Path(model.push_to_hub("owner/shop", copies=copies))
    assert len(names(sent)) == (4 if copies else 0)
    card = (sent / "README.md").read_text("utf-8")
    assert ("The model stores 12 small copies" if copies else "No photo is stored.") in card
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: str(sent))
    fetched = onea.OneA.from_pretrained("owner/shop", threads=1, backbone=model.backbone)
    assert sum(len(entries) for entries in fetched.snapshot().state.exemplars.values()) == (4 if copies else 0)


def test_an_exported_file_contains_no_copy(saved, tmp_path):
    onnx_runtime_or_skip()
    from onea.model.export import export

    export(onea.load(saved, threads=1).snapshot(), "onnx", tmp_path / "shop.onnx")
    content = (tmp_path / "shop.onnx").read_bytes()
    for name in names(saved):
        assert (saved / "copies" / name).read_bytes()[-200:] not in content
        assert b"WEBP" not in content
